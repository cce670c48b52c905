"""docs/guarantees.md says which life or trace fails without each part of each rule: it does. `python tests/simulation/table.py` writes it anew."""

from __future__ import annotations

import pytest
from rules_off import PARTS
from table import Found, documented, fails

DOCUMENTED = documented()


def test_every_part_is_in_the_document() -> None:
    assert DOCUMENTED.keys() == PARTS.keys()
    assert {rule for rule, _ in PARTS.values()} == {f"R{n}" for n in range(1, 18)}


@pytest.mark.parametrize(("part", "found"), DOCUMENTED.items(), ids=list(DOCUMENTED))
def test_fails_without(part: str, found: Found) -> None:
    assert fails(part, found), "run: python tests/simulation/table.py"
