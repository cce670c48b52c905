"""The table of roles: every pair, and its diagram."""

from __future__ import annotations

import itertools

import pytest

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.roles import TRANSITIONS, Role, mermaid, require_legal


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Role, Role)))
def test_every_pair(old: Role, new: Role) -> None:
    if new in TRANSITIONS[old]:
        require_legal(old, new)
    else:
        with pytest.raises(IllegalEvent, match=f"cannot go from {old.value} to {new.value}"):
            require_legal(old, new)


def test_a_primary_ends_its_incarnation_before_it_is_anything_else() -> None:
    assert TRANSITIONS[Role.ACTIVE] == {Role.STANDALONE}


def test_the_door_opens_only_after_recovering() -> None:
    assert [old for old in Role if Role.ACTIVE in TRANSITIONS[old]] == [Role.RECOVERING]


def test_every_role_is_reached_and_left() -> None:
    assert {new for targets in TRANSITIONS.values() for new in targets} == set(Role)
    assert all(TRANSITIONS[role] for role in Role)


def test_mermaid_has_every_transition() -> None:
    lines = mermaid().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) - 1 == sum(len(targets) for targets in TRANSITIONS.values())
    assert "    RECOVERING --> ACTIVE" in lines
