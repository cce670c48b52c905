"""A sink's node in memory, whose receive queues a receiver reads without a broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import Update
from lrq_ha.replication.positions import Position
from lrq_ha.routing.commits import Commits
from lrq_ha.routing.names import COMMIT, POSITION_QUESTION, recv_queue
from lrq_ha.streams.errors import ConnectionLost, MessageRefused
from lrq_ha.streams.message import Message
from lrq_ha.streams.node_connection import NodeConnection

CLIENT = "orders"
NODES = ["amqp://u:p@127.0.0.1:1"]
PATIENCE_S = 60.0
EPOCH = 257


def at(sequence: int) -> Position:
    """A position of a source's log."""
    return Position(EPOCH, sequence)


def sequences(updates: list[Update]) -> list[int]:
    """The sequences of a list."""
    return [update.position.sequence for update in updates]


def until(done: Any, timeout_s: float = PATIENCE_S) -> None:
    """Waits for `done()`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)


class ReceiveNode:
    """Every connection of a receiver is to it.

    Attributes:
        demands: The bodies of the demands that were published.
        commits: The positions of receivers in the group's log.
    """

    address = "memory"

    def __init__(self) -> None:
        self._queues: dict[str, list[Message]] = {}
        self._last: dict[str, int] = {}
        self._changed = threading.Condition()
        self._cuts = 0
        self.demands: list[bytes] = []
        self.commits = Commits()
        self._entries = 0

    def write(self, *transactions: tuple[int, pb.ReplicationType, bytes], source: str = "east") -> None:
        """A message; a transaction is a sequence, a kind, and a payload (empty: none)."""
        queue = recv_queue(CLIENT, source)
        previous = self._last.get(queue, 0)
        made = [
            pb.ReceivedTransaction(
                position=pb.Position(epoch=EPOCH, sequence=sequence),
                replication_id=f"app/{sequence}",
                type=kind,
                request_id="" if kind == pb.LOG_ENTRY_SYNC else "r",
                payloads=[payload] if payload else [],
            )
            for sequence, kind, payload in transactions
        ]
        where = pb.Position(epoch=EPOCH if previous else 0, sequence=previous)
        batch = pb.ReceivedBatch(source=source, client_name=CLIENT, previous=where, transactions=made)
        with self._changed:
            messages = self._queues.setdefault(queue, [])
            messages.append(Message(len(messages), batch))
            self._last[queue] = transactions[-1][0]
            self._changed.notify_all()

    def begin(self, source: str = "east") -> None:
        """A whole snapshot of one row: positions 2 to 4."""
        self.write((2, pb.SNAPSHOT_SYNC, b""), (3, pb.SNAPSHOT_SYNC, b"row"), (4, pb.LAST_FULL_SYNC_ENTRY, b""), source=source)

    def delta(self, *numbers: int, source: str = "east") -> None:
        """Deltas, in one message."""
        self.write(*((number, pb.LOG_ENTRY_SYNC, b"%d" % number) for number in numbers), source=source)

    def cut(self) -> None:
        """Every reader loses its connection."""
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    # ---- what receivers call -----------------------------------------------------------------------------------------

    def __enter__(self) -> ReceiveNode:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def get(self, question: str) -> bytes:
        with self._changed:
            if question.startswith(POSITION_QUESTION):
                receiver, _, queue = question.removeprefix(POSITION_QUESTION).rpartition("/")
                return self.commits.of(receiver, queue).SerializeToString()
            states = [pb.ReceiveState(queue=queue) for queue in self._queues]
        return pb.ReceiveQueues(queues=states).SerializeToString()

    def publish(self, queue: str, body: bytes) -> None:
        if queue != COMMIT:
            self.demands.append(body)
            return
        commit = pb.Commit.FromString(body)
        with self._changed:
            if refusal := self.commits.refusal(commit, at(self._last.get(commit.queue, 0))):
                raise MessageRefused(queue, self.address, refusal)
            self._entries += 1
            self.commits.noted(self._entries, commit)
            self.commits.safe(self._entries)

    def first(self, queue: str) -> Message | None:
        return self._queues[queue][0]

    def tail(self, queue: str) -> Message | None:
        return self._queues[queue][-1]

    def at(self, queue: str, offset: int) -> Message:
        return self._queues[queue][offset]

    def follow(self, queue: str, offset: int, idle_s: float, _prefetch: int) -> Generator[list[Message], None, None]:
        cuts = self._cuts
        while True:
            with self._changed:
                if len(self._queues[queue]) <= offset and self._cuts == cuts:
                    self._changed.wait(min(idle_s, 0.02))
                messages = self._queues[queue][offset:]
            if self._cuts > cuts:
                raise ConnectionLost(self.address, "cut")
            offset += len(messages)
            yield messages


def connect_receivers(monkeypatch: pytest.MonkeyPatch) -> ReceiveNode:
    """A node that takes every receiver; readers wait for a moment only before they try again."""
    found = ReceiveNode()
    monkeypatch.setattr(NodeConnection, "open", lambda *_, **__: found)
    monkeypatch.setattr("lrq_ha.receiver.source_reader.RETRY_S", 0.01)
    monkeypatch.setattr("lrq_ha.receiver.receiver.DISCOVER_S", 0.02)
    monkeypatch.setattr("lrq_ha.receiver.receiver.DISCOVER_FIRST_S", 0.02)
    monkeypatch.setattr("lrq_ha.receiver.refusal.AGAIN_MIN_S", 0.01)
    return found
