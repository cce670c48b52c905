"""The states of a relay, and the steps between them.

Rule: a step that is not in TRANSITIONS is a bug and raises.
"""

from __future__ import annotations

from enum import Enum

from lrq_ha.errors import IllegalEvent


class RelayState(Enum):
    """The states of a relay."""

    STOPPED = "stopped"
    STARTING = "starting"  # it connects to the database and to a node, and takes over the outbox
    TRANSMITTING = "transmitting"  # transactions are transmitted as they are committed
    WAITING = "waiting"  # the database or every node fails: the relay tries again
    REFUSED = "refused"  # the broker refuses the next transaction: the relay tries again, and nothing behind it is transmitted
    FAILED = "failed"  # only an operator can help


_S = RelayState
TRANSITIONS: dict[RelayState, frozenset[RelayState]] = {
    _S.STOPPED: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.TRANSMITTING, _S.WAITING, _S.FAILED, _S.STOPPED}),
    _S.TRANSMITTING: frozenset({_S.WAITING, _S.REFUSED, _S.FAILED, _S.STOPPED}),
    _S.WAITING: frozenset({_S.TRANSMITTING, _S.REFUSED, _S.FAILED, _S.STOPPED}),
    _S.REFUSED: frozenset({_S.TRANSMITTING, _S.WAITING, _S.FAILED, _S.STOPPED}),
    _S.FAILED: frozenset({_S.STARTING}),
}


def require_legal(old: RelayState, new: RelayState) -> None:
    """Raises IllegalEvent if no step leads from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalEvent(f"a relay goes from {old.value} to {new.value}")
