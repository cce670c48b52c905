"""The states of a receiver in one queue, and the steps between them.

Rule: a step that is not in TRANSITIONS is a bug and raises.
"""

from __future__ import annotations

from enum import Enum

from lrq_ha.errors import IllegalEvent

from .progress import Phase


class State(Enum):
    """The states of a receiver in one queue."""

    DISCONNECTED = "disconnected"  # no node takes the receiver
    WAITING = "waiting"  # the queue does not exist yet, or has no whole snapshot
    BOOTSTRAP = "bootstrap"  # a snapshot is being given
    LOCAL_REPLAY = "local-replay"  # deltas that came during the snapshot are given again
    NORMAL = "normal"  # the application's tables equal the source's, but for the lag
    ERROR = "error"  # fenced, or the listener has raised Stop: only a new start helps


_S = State
TRANSITIONS: dict[State, frozenset[State]] = {
    _S.DISCONNECTED: frozenset({_S.WAITING, _S.BOOTSTRAP, _S.LOCAL_REPLAY, _S.NORMAL, _S.ERROR}),
    _S.WAITING: frozenset({_S.BOOTSTRAP, _S.LOCAL_REPLAY, _S.NORMAL, _S.DISCONNECTED, _S.ERROR}),
    _S.BOOTSTRAP: frozenset({_S.LOCAL_REPLAY, _S.NORMAL, _S.WAITING, _S.DISCONNECTED, _S.ERROR}),
    _S.LOCAL_REPLAY: frozenset({_S.NORMAL, _S.BOOTSTRAP, _S.WAITING, _S.DISCONNECTED, _S.ERROR}),
    _S.NORMAL: frozenset({_S.BOOTSTRAP, _S.WAITING, _S.DISCONNECTED, _S.ERROR}),
    _S.ERROR: frozenset(),
}
OF_PHASE = {None: _S.WAITING, Phase.BOOTSTRAP: _S.BOOTSTRAP, Phase.LOCAL_REPLAY: _S.LOCAL_REPLAY, Phase.NORMAL: _S.NORMAL}


def require_legal(old: State, new: State) -> None:
    """Raises IllegalEvent if no step leads from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalEvent(f"a receiver goes from {old.value} to {new.value}")
