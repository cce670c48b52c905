"""Exchanges, queues and bindings that the log declares and has not deleted again, as the methods that make them
(R17).

Rules:
- A declaration counts when it is noted, in log order. A cut takes changes back: the former state is kept for entries
  that are not safe, or that the node has not come to. So the present state of the node's broker can be told too.
- A deleted queue or exchange takes its bindings with it. An auto-delete exchange that went with its last binding is
  still listed, as one without a binding yet also exists: to declare it where everything is declared does no harm, as
  the log declares it again before it is bound again.
- Rows come in an order in which they can be carried out.
- Each row is also kept as a CHECKPOINT has it: writing a hundred thousand queues takes no longer than joining these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import takewhile

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations, frames

ALONE = "lrq-alone."  # exchanges of this node's own, each leading to the queue in its name
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
_QUEUES = (frames.QUEUE_DECLARE, frames.QUEUE_DELETE)
_TO_QUEUES = (frames.QUEUE_BIND, frames.QUEUE_UNBIND)

Row = tuple[str, bytes]  # vhost, method
_Key = tuple[int, str, tuple[bytes, ...]]
_End = tuple[str, bytes, bytes]  # vhost, b"q" or b"e", name
_Before = list[tuple[_Key, bytes | None]]  # former values, in the order of changes; None: there was none


class Definitions:
    """The definitions of the log, as of its last entry."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = _Rows()
        self._before: deque[tuple[int, _Before]] = deque()  # of entries that are not safe yet, or that the node has not come to
        self._safe_upto = 0
        self._former: tuple[int, int, Definitions] | None = None  # as of this version, without so many of its last changes
        self.version = 0  # grows with every change
        for vhost, method in rows:
            self._rows.carry_out(vhost, method)

    def noted(self, sequence: int, vhost: str, method: bytes) -> None:
        """Entry `sequence` is this declaration or deletion."""
        self._before.append((sequence, self._rows.carry_out(vhost, method)))
        self.version += 1

    def safe(self, upto: int, reached: int) -> None:
        """All entries up to `upto` are safe, and the node has come to entry `reached`."""
        self._safe_upto = upto
        while self._before and self._before[0][0] <= min(upto, reached):
            self._before.popleft()

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._before and self._before[-1][0] >= first:
            self._rows.take_back(self._before.pop()[1])
            self.version += 1

    def at(self, sequence: int) -> Definitions:
        """The definitions after an entry that the node has not come past."""
        later = sum(1 for _ in takewhile(lambda change: change[0] > sequence, reversed(self._before)))
        if not later:
            self._former = None
            return self
        if self._former is None or self._former[:2] != (self.version, later):
            former = Definitions()
            former._rows = self._rows_at(sequence)
            self._former = self.version, later, former
        return self._former[2]

    def rows(self) -> Iterator[Row]:
        """(vhost, method) of every declaration."""
        return ((key[1], self._rows.rows[key]) for of_kind in self._rows.encoded for key in of_kind)

    def declares(self, vhost: str, method: bytes) -> bool:
        """Whether the log declares exactly this, and has not deleted or redeclared it since."""
        return self._rows.rows.get(_key_of(vhost, method)[0]) == method

    def export(self) -> bytes:
        """The rows for a CHECKPOINT: a serialized `pb.Definitions`."""
        return b"".join(row for of_kind in self._rows.encoded for row in of_kind.values())

    def queues(self) -> dict[QueueKey, bytes]:
        """The queues, and how each was declared."""
        return {(vhost, names[0].decode("utf-8", "surrogateescape")): m for (kind, vhost, names), m in self._rows.rows.items() if kind == _QUEUE}

    def queue(self, key: QueueKey) -> bytes | None:
        """How a queue was declared; None: the log has no such queue."""
        return self._declared(_QUEUE, *key)

    def exchange(self, vhost: str, exchange: str) -> bytes | None:
        """How an exchange was declared; None: the log has no such exchange."""
        return self._declared(_EXCHANGE, vhost, exchange)

    def forgotten(self) -> tuple[list[Row], list[Row]]:
        """Safe definitions that a broker may have lost when it went down: objects that are not durable, and what
        is bound to these.

        An auto-delete exchange without a binding is left out: it has perhaps gone long ago, and may be another one by
        now.

        Returns:
            Exchanges and their bindings, and then queues and theirs.
        """
        safe = self._rows_at(self._safe_upto)
        rows = safe.rows
        found: tuple[list[Row], list[Row]] = ([], [])
        seen: set[_Key] = set()
        for kind, of_kind in ((_QUEUE, found[1]), (_EXCHANGE, found[0])):
            bindings: list[_Key] = []
            for key, method in rows.items():
                if key[0] == kind and not declarations.is_durable(method):
                    bound = safe.bindings((key[1], b"q" if kind == _QUEUE else b"e", key[2][0]))
                    if kind == _QUEUE or not declarations.is_auto_delete(method) or any(binding[2][2] == key[2][0] for binding in bound):
                        of_kind.append((key[1], method))
                        bindings += (binding for binding in bound if binding not in seen)
                        seen.update(bound)
            of_kind += ((key[1], rows[key]) for key in bindings)
        return found

    def _declared(self, kind: int, vhost: str, name: str) -> bytes | None:
        return self._rows.rows.get((kind, vhost, (name.encode("utf-8", "surrogateescape"),)))

    def bindings_to(self, keys: Container[QueueKey]) -> Iterator[tuple[QueueKey, str, bytes, bytes]]:
        """The safe bindings of these queues: (queue, exchange, the method that binds, the arguments of the one that unbinds)."""
        for (kind, vhost, names), method in self._rows_at(self._safe_upto).rows.items():
            if kind == _BINDING and names[0] == b"q":
                key = (vhost, names[1].decode("utf-8", "surrogateescape"))
                if key in keys:
                    unbinds = b"\0\0" + b"".join(bytes((len(name),)) + name for name in names[1:4]) + names[4]
                    yield key, names[2].decode("utf-8", "surrogateescape"), method, unbinds

    def bound_to_exchange(self, vhost: str, exchange: str) -> list[tuple[str, bytes]]:
        """The bindings of an exchange to others: (the one that it is bound to, the method)."""
        raw = exchange.encode("utf-8", "surrogateescape")
        keys = self._rows.bindings((vhost, b"e", raw))
        return [(key[2][2].decode("utf-8", "surrogateescape"), self._rows.rows[key]) for key in keys if key[2][:2] == (b"e", raw)]

    def _rows_at(self, sequence: int) -> _Rows:
        """The rows after an entry. Rarely asked for, and copies everything while a later change exists."""
        later = [before for _, before in takewhile(lambda change: change[0] > sequence, reversed(self._before))]
        if not later:
            return self._rows
        rows = self._rows.copy()
        for before in later:
            rows.take_back(before)
        return rows


def rows_of(entry: pb.Checkpoint) -> Iterator[Row]:
    """The declarations of a CHECKPOINT."""
    return ((row.vhost, row.method) for row in pb.Definitions.FromString(entry.definitions).rows)


class _Rows:
    """The rows, with the bindings of each queue and exchange: deleting one of ten thousand queues does not look at the others."""

    def __init__(self) -> None:
        self.rows: dict[_Key, bytes] = {}
        self.encoded: tuple[dict[_Key, bytes], ...] = ({}, {}, {})  # the rows by kind, as they stand in a CHECKPOINT
        self._bindings: dict[_End, dict[_Key, None]] = {}

    def copy(self) -> _Rows:
        new = _Rows()
        new.rows = dict(self.rows)
        new.encoded = tuple(map(dict, self.encoded))
        new._bindings = {end: dict(keys) for end, keys in self._bindings.items()}
        return new

    def carry_out(self, vhost: str, method: bytes) -> _Before:
        """Carries out a method; returns what `take_back` needs."""
        before: _Before = []
        key, kind = _key_of(vhost, method)
        if kind in _BINDS:
            self._put(key, method if _BINDS[kind] else None, before)
        elif kind in (frames.QUEUE_DECLARE, frames.EXCHANGE_DECLARE):
            self._put(key, method, before)
        elif key in self.rows:
            self._put(key, None, before)
            for binding in self.bindings((vhost, b"q" if kind in _QUEUES else b"e", key[2][0])):
                self._put(binding, None, before)
        return before

    def take_back(self, before: _Before) -> None:
        """Undoes the last `carry_out`."""
        for key, method in reversed(before):
            self._put(key, method, [])

    def bindings(self, end: _End) -> list[_Key]:
        """The bindings with this end."""
        return list(self._bindings.get(end, ()))

    def _put(self, key: _Key, method: bytes | None, before: _Before) -> None:
        """Sets a row; None: removes it. Adds the former value to `before`."""
        known = self.rows.get(key)
        before.append((key, known))
        if method is not None:
            self.rows[key] = method
            self.encoded[key[0]][key] = pb.Definitions(rows=[pb.Topology(vhost=key[1], method=method)]).SerializeToString()
        elif known is not None:
            del self.rows[key]
            del self.encoded[key[0]][key]
        if key[0] == _BINDING and (method is None) is not (known is None):
            for one in set(_ends(key)):
                of = self._bindings.setdefault(one, {})
                if method is not None:
                    of[key] = None
                else:
                    del of[key]
                    if not of:
                        del self._bindings[one]


def _key_of(vhost: str, method: bytes) -> tuple[_Key, int]:
    """The key of the object that a method declares or deletes, and the method's ID."""
    kind = frames.method_id(method)
    names, at = [], 6
    for _ in range(_NAMES[kind]):
        end = at + 1 + method[at]
        names.append(method[at + 1 : end])
        at = end
    if kind in _BINDS:
        arguments = method[at:] if kind == frames.QUEUE_UNBIND else method[at + 1 :]  # the others have flags before the arguments
        return (_BINDING, vhost, (b"q" if kind in _TO_QUEUES else b"e", *names, arguments)), kind
    return (_QUEUE if kind in _QUEUES else _EXCHANGE, vhost, (names[0],)), kind


def _ends(key: _Key) -> tuple[_End, _End]:
    """The ends of a binding: its destination and its source."""
    _, vhost, (kind, destination, source, *_) = key
    return (vhost, kind, destination), (vhost, b"e", source)
