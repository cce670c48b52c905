"""Changes the register in etcd for the parts of a node: one change at a time, its answer before the next.

Rules:

- A change is made on what was read last, and fails if the register is no longer so.
- Until the answer has come, nothing that the change is for is done, and what is read meanwhile counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import IllegalEvent
from .base import NodeBase
from .events import ChangeRegister, RegisterAnswered, RegisterRead
from .log import Members
from .register import Record, Why

Then = Callable[[bool, float], None]


class Registrar:
    """The register's writer at one node."""

    def __init__(self, node: NodeBase) -> None:
        self._node = node
        self._waiting: tuple[Record, Then] | None = None

    @property
    def busy(self) -> bool:
        """Whether a change waits for its answer."""
        return self._waiting is not None

    def change(self, epoch: int, members: Members, then: Then, *, take: bool, why: Why | None = None) -> bool:
        """Writes a record with this node as leader. Returns whether it can: nothing else is under way, and the register has been read.

        Args:
            then: Called with whether it was done, and the time.
            take, why: As of ChangeRegister. A new epoch ends a pause.
        """
        node, view = self._node, self._node.register
        if self.busy or view is None:
            return False
        known = [view.record.version if view.record else 0, node.record_known, node.written.version if node.written else 0]
        paused = bool(node.own_record and node.own_record.paused)
        self._ask(ChangeRegister(Record(max(known) + 1, epoch, node.me, members, paused), view, take, why), then)
        return True

    def pause(self, paused: bool, then: Then) -> bool:
        """Writes into the record whether nodes take epochs by themselves; all else stays as it is. Returns whether it can."""
        view = self._node.register
        if self.busy or view is None or view.record is None:
            return False
        self._ask(ChangeRegister(replace(view.record, version=view.record.version + 1, paused=paused), view, False), then)
        return True

    def _ask(self, change: ChangeRegister, then: Then) -> None:
        self._waiting = change.record, then
        self._node.emit(change)

    def read(self, event: RegisterRead, now: float) -> None:
        """The register was read, or could not be read."""
        self._node.register_away = event.view is None
        if event.view is not None and not self.busy:
            self._node.register = event.view

    def answered(self, event: RegisterAnswered, now: float) -> None:
        """The answer to the change. Raises IllegalEvent if there is none under way."""
        if self._waiting is None:
            raise IllegalEvent("an answer for the register, and nothing was asked")
        (record, then), self._waiting = self._waiting, None
        self._node.register, self._node.register_away = event.view, False
        if event.done:
            self._node.written = record
        then(event.done, now)
