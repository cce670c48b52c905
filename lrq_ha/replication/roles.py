"""Roles of a node and the legal ways between them, as data. An illegal transition raises and changes nothing.

    standalone   not started yet, or stopped: it serves no client
    joining      its log begins at a renewal and lacks the end of it (R17)
    catch-up     it follows, or waits for a node to follow, and is not in sync
    ready        an in-sync backup: may be promoted
    recovering   it is taking an epoch, and the door is still closed; or the door is open, and confirms wait for the expected backups
                 (Qpid HA: Primary, expectedBackups). `Node.serving` tells these apart
    active       primary: the door is open
    diverged     it refuses to drop a tail that it may have confirmed alone; an operator must choose (R14)
"""

from __future__ import annotations

from enum import Enum

from ..errors import IllegalEvent


class Role(Enum):
    STANDALONE = "standalone"
    JOINING = "joining"
    CATCH_UP = "catch-up"
    READY = "ready"
    RECOVERING = "recovering"
    ACTIVE = "active"
    DIVERGED = "diverged"


TRANSITIONS: dict[Role, frozenset[Role]] = {
    Role.STANDALONE: frozenset({Role.CATCH_UP, Role.JOINING}),
    Role.JOINING: frozenset({Role.CATCH_UP, Role.RECOVERING, Role.DIVERGED, Role.STANDALONE}),
    Role.CATCH_UP: frozenset({Role.READY, Role.RECOVERING, Role.DIVERGED, Role.JOINING, Role.STANDALONE}),
    Role.READY: frozenset({Role.CATCH_UP, Role.RECOVERING, Role.DIVERGED, Role.STANDALONE}),
    Role.RECOVERING: frozenset({Role.ACTIVE, Role.CATCH_UP, Role.JOINING, Role.DIVERGED, Role.STANDALONE}),
    Role.ACTIVE: frozenset({Role.STANDALONE}),
    Role.DIVERGED: frozenset({Role.CATCH_UP, Role.JOINING, Role.RECOVERING, Role.STANDALONE}),
}


def require_legal(old: Role, new: Role) -> None:
    """Raises IllegalEvent unless a node may go from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalEvent(f"a node cannot go from {old.value} to {new.value}")


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2"]
    for old, targets in TRANSITIONS.items():
        lines += [f"    {old.name} --> {new.name}" for new in sorted(targets, key=lambda r: r.name)]
    return "\n".join(lines) + "\n"
