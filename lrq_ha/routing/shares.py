"""Shares: what each destination gets of a transaction, in the bytes of a batch. Made once for all sessions.

Rules:

- Destinations that get equal payloads get one share, and its bytes are made once. Sessions whose next batch is equal get one batch.
- Nothing here is changed after it was made.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import payloads_of, position_message, position_of, received
from lrq_ha.routing.route import Route

_Runs = tuple[tuple[int, int], ...]  # the numbers of a destination's payloads: each run from the first one up to the second
PACKED_MAX = 8  # batches that are remembered, of all sessions


class Share(NamedTuple):
    """One transaction of a receive queue.

    Attributes:
        type, request_id: As in ReceivedTransaction.
        rows: Number of its payloads.
        body: A ReceivedBatch with this transaction alone: batches are such bodies, one behind the other.
    """

    position: Position
    type: pb.ReplicationType
    request_id: str
    rows: int
    body: bytes


def pack_share(transaction: pb.ReceivedTransaction) -> Share:
    """The share for a transaction."""
    body = pb.ReceivedBatch(transactions=[transaction]).SerializeToString()
    return Share(position_of(transaction.position), transaction.type, transaction.request_id, len(transaction.payloads), body)


class ViewEntry:
    """One transaction of a view, as every session takes it.

    Args:
        position: In the source's log.
        transaction: It was checked (`chain.check`).
        body_bytes: Its length in the view.

    Attributes:
        size: The bytes that it takes with its shares, about. A payload that many entries name stands in a share as often.
    """

    __slots__ = ("_runs", "_shares", "client_name", "position", "size", "transaction")

    def __init__(self, position: Position, transaction: pb.Transaction, body_bytes: int) -> None:
        self.position, self.transaction = position, transaction
        self.client_name = transaction.client_name
        self._runs = _runs_of(transaction)  # by destination
        self._shares: dict[_Runs, Share | None] = {}
        self.size = body_bytes + sum(_measure_share(transaction, runs, body_bytes) for runs in set(self._runs.values()))

    def share(self, destination: str) -> Share | None:
        """The share of a destination; None if nothing is for it."""
        runs = self._runs.get(destination, ())
        if runs not in self._shares:
            transaction = received(self.transaction, self.position, _select_payloads(self.transaction, runs))
            self._shares[runs] = None if transaction is None else pack_share(transaction)
        return self._shares[runs]


def _runs_of(transaction: pb.Transaction) -> dict[str, _Runs]:
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for entry in transaction.entries:
        numbers = payloads_of(entry)
        for destination in dict.fromkeys(entry.destinations):
            found[destination].append((numbers.start, numbers.stop))
    return {destination: tuple(runs) for destination, runs in found.items()}


def _select_payloads(transaction: pb.Transaction, runs: _Runs) -> list[bytes]:
    payloads = transaction.payloads
    return [payload for first, end in runs for payload in payloads[first:end]]


def _measure_share(transaction: pb.Transaction, runs: _Runs, body_bytes: int) -> int:
    """The payloads of a share, in bytes; for a share of everything, which most are, without a look at each."""
    if runs == ((0, len(transaction.payloads)),):
        return body_bytes
    return sum(map(len, _select_payloads(transaction, runs)))


class Packing:
    """Makes the batches of all sessions of a group. The newest are remembered, for the sessions that send equal ones."""

    def __init__(self) -> None:
        self._packed: deque[tuple[bytes, tuple[bytes, ...], bytes]] = deque(maxlen=PACKED_MAX)

    def pack(self, route: Route, previous: Position, shares: Sequence[Share]) -> bytes:
        """A ReceivedBatch. `previous`: the last position before it, (0, 0) for the first one of a chain."""
        envelope = pack_envelope(route, previous)
        parts = tuple([share.body for share in shares])
        for known, of, body in self._packed:
            if known == envelope and of == parts:
                return body
        body = b"".join((envelope, *parts))
        self._packed.append((envelope, parts, body))
        return body


def pack_envelope(route: Route, previous: Position) -> bytes:
    """A ReceivedBatch without transactions."""
    batch = pb.ReceivedBatch(source=route.source, client_name=route.client_name, previous=position_message(previous), log_id=route.log_id)
    return batch.SerializeToString()
