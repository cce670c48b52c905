"""What the log declares and has not deleted again: exchanges, queues and bindings, as the methods that make them (R17).

Rules:
- A declaration counts when it is noted, in log order; what is cut off the log is taken out again, so what is not safe is kept apart.
- A queue or exchange takes its bindings with it when it is deleted. An auto-delete exchange that went with its last binding is still listed: to
  declare it once more than needed harms nothing.
- Rows come in an order in which they can be carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from . import frames
from .channels import QueueKey

_EXCHANGE, _QUEUE, _BINDING = range(3)
_NAMES = {
    frames.EXCHANGE_DECLARE: 1,
    frames.EXCHANGE_DELETE: 1,
    frames.QUEUE_DECLARE: 1,
    frames.QUEUE_DELETE: 1,
    frames.EXCHANGE_BIND: 3,
    frames.EXCHANGE_UNBIND: 3,
    frames.QUEUE_BIND: 3,
    frames.QUEUE_UNBIND: 3,
}
_BINDS = {frames.QUEUE_BIND: True, frames.QUEUE_UNBIND: False, frames.EXCHANGE_BIND: True, frames.EXCHANGE_UNBIND: False}
_TO_QUEUES = (frames.QUEUE_BIND, frames.QUEUE_UNBIND)

Row = tuple[str, bytes]  # vhost, method
_Key = tuple[int, str, tuple[bytes, ...]]


class Definitions:
    """See above."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[_Key, bytes] = {}
        self._noted: deque[tuple[int, str, bytes]] = deque()  # not safe yet
        for vhost, method in rows:
            _carry_out(self._rows, vhost, method)

    def noted(self, sequence: int, vhost: str, method: bytes) -> None:
        """Entry `sequence` is this declaration or deletion."""
        self._noted.append((sequence, vhost, method))

    def safe(self, upto: int) -> None:
        """All entries up to `upto` are safe."""
        while self._noted and self._noted[0][0] <= upto:
            _, vhost, method = self._noted.popleft()
            _carry_out(self._rows, vhost, method)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._noted and self._noted[-1][0] >= first:
            self._noted.pop()

    def rows(self) -> Iterator[Row]:
        """(vhost, method) of everything there is."""
        return ((key[1], method) for key, method in sorted(self._now().items(), key=lambda row: row[0][0]))

    def queues(self) -> dict[QueueKey, bytes]:
        """The queues, and how each was declared."""
        return {(vhost, names[0].decode("utf-8", "surrogateescape")): m for (kind, vhost, names), m in self._now().items() if kind == _QUEUE}

    def _now(self) -> dict[_Key, bytes]:
        if not self._noted:
            return self._rows
        rows = dict(self._rows)
        for _, vhost, method in self._noted:
            _carry_out(rows, vhost, method)
        return rows


def _carry_out(rows: dict[_Key, bytes], vhost: str, method: bytes) -> None:
    kind = int.from_bytes(method[:4], "big")
    names, at = [], 6
    for _ in range(_NAMES[kind]):
        end = at + 1 + method[at]
        names.append(method[at + 1 : end])
        at = end
    if kind in _BINDS:
        arguments = method[at:] if kind == frames.QUEUE_UNBIND else method[at + 1 :]  # the others have flags before them
        key = (_BINDING, vhost, (b"q" if kind in _TO_QUEUES else b"e", *names, arguments))
        if _BINDS[kind]:
            rows[key] = method
        else:
            rows.pop(key, None)
        return
    to_queue = kind in (frames.QUEUE_DECLARE, frames.QUEUE_DELETE)
    key = (_QUEUE if to_queue else _EXCHANGE, vhost, (names[0],))
    if kind in (frames.QUEUE_DECLARE, frames.EXCHANGE_DECLARE):
        rows[key] = method
    elif rows.pop(key, None) is not None:
        for other in [k for k in rows if k[0] == _BINDING and k[1] == vhost and _is_of(k[2], to_queue, names[0])]:
            del rows[other]


def _is_of(binding: tuple[bytes, ...], to_queue: bool, name: bytes) -> bool:
    """Whether a binding goes with this queue or exchange: (what its destination is, destination, source, …)."""
    kind, destination, source = binding[:3]
    return (destination == name and kind == (b"q" if to_queue else b"e")) or (not to_queue and source == name)
