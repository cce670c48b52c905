"""docs/verification.md says which life or trace fails without each part of each rule: it does. `python tests/simulation/table.py` writes it anew."""

from __future__ import annotations

import re

import pytest
from rules_off import PARTS
from table import Found, documented, fails

#: One process runs all of them: the checks look at what the parts have found.
pytestmark = [pytest.mark.proves("rules"), pytest.mark.xdist_group("rules")]

DOCUMENTED = documented()
#: What the checks of the simulation say: each has been seen to find something, so none of them is blind.
FINDS = {
    "G1: was confirmed and is not in the log": r"G1: .* are not in the log of the open primary",
    "G1: is confirmed and not safe": r"G1: .* which is not safe in its log",
    "G1: is confirmed and in no queue": r"G1: .* which is not in its queues",
    "G1: local completion, and not in the own stream": r"G1: .* its own stream does not have it",
    "G2: two copies": r"G2: .* has two copies",
    "G2: two entries": r"G2: .* is in the log of .* times",
    "G3: is delivered, and was dequeued": r"G3: .* delivers .* which is safe",
    "G3: a node holds what is finished": r"G3: .* which are finished",
    "G4: stands in a queue": r"G4: .* stands in",
    "G4: is delivered": r"G4: .* delivers",
    "G5": r"G5: ",
    "lost": r"lost: .* has no copy of it",
    "a transaction in part": r"a transaction, entries",
    "the expected backups": r"waits for its expected backups",
    "redelivered": r"R12: .* without saying so",
    "mode strict": r"strict: ",
    "promoted without need": r"is promoted without force, and lacks",
    "silent loss": r"silent loss: ",
    "queues differ": r"have different queues",
    "no rest": r"no rest",
    "E4": r"E4: ",
    "E5": r"E5: ",
    "E6: a door is closed without need": r"E6: .* turns its clients away",
    "E6: an epoch is taken without need": r"E6: .* takes an epoch",
    "E7": r"E7: ",
    "E8": r"E8: ",
    "E10": r"E10: ",
}
_found: dict[str, str] = {}


def test_every_part_is_in_the_document() -> None:
    assert DOCUMENTED.keys() == PARTS.keys()
    assert {rule for rule, _ in PARTS.values()} == {f"R{n}" for n in range(1, 18)} | {f"E{n}" for n in range(1, 11)}


@pytest.mark.parametrize(("part", "found"), DOCUMENTED.items(), ids=list(DOCUMENTED))
def test_fails_without(part: str, found: Found) -> None:
    _found[part] = fails(part, found)
    assert _found[part], "run: python tests/simulation/table.py"


@pytest.mark.parametrize("check", FINDS)
def test_every_check_finds_something(check: str) -> None:
    for part, found in DOCUMENTED.items():
        if part not in _found:  # it ran in another process, or not at all
            _found[part] = fails(part, found)
        if re.search(FINDS[check], _found[part]):
            return
    pytest.fail(f"nothing that is switched off is found by it; found is {sorted({each[:60] for each in _found.values()})}")
