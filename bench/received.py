"""A receive queue that is filled as the sink's sidecar does it, and the processes of a Spark that reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pika

from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb

from .measure import memory_bytes, repeated

EPOCH, SOURCE = 257, "east"
_KEEPER = "lrq_ha.lab.keeper"  # the parent of a lab's brokers and sidecars
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def transaction(sequence: int, payloads: list[bytes], kind: pb.ReplicationType = pb.LOG_ENTRY_SYNC, request: str = "") -> pb.ReceivedTransaction:
    """A transaction as it stands in a receive queue."""
    position = pb.Position(epoch=EPOCH, sequence=sequence)
    return pb.ReceivedTransaction(position=position, replication_id=f"app/{sequence}", type=kind, request_id=request, payloads=payloads)


class ReceiveQueue:
    """A receive queue of a node, which is empty at first.

    Args:
        lab: With a node w1 at the sink.
        client: What the queue is named after.
    """

    def __init__(self, lab: Lab, client: str) -> None:
        self.name, self._client = f"LRQ_Recv_{client}_{SOURCE}", client
        self._nodes, self._admin = lab.nodes["w1"].broker, pika.URLParameters(lab.nodes["w1"].admin)
        self._admin.virtual_host, self._admin.heartbeat = "lrq", 0
        self._previous = pb.Position()
        with pika.BlockingConnection(self._admin) as connection:
            connection.channel().queue_declare(self.name, durable=True, arguments={"x-queue-type": "stream"})

    @property
    def sequence(self) -> int:
        """Of the last transaction that was written."""
        return self._previous.sequence

    @property
    def options(self) -> dict[str, str]:
        """Of format lrq."""
        return {"nodes": self._nodes, "subscribe": self.name}

    def fill(self, messages: Iterable[list[pb.ReceivedTransaction]]) -> None:
        """Writes messages of so many transactions; all are in the stream on return."""
        with pika.BlockingConnection(self._admin) as connection:
            channel = connection.channel()
            for transactions in messages:
                batch = pb.ReceivedBatch(source=SOURCE, client_name=self._client, previous=self._previous, transactions=transactions)
                self._previous = transactions[-1].position
                channel.basic_publish("", self.name, batch.SerializeToString(), pika.BasicProperties(delivery_mode=2))
            channel.confirm_delivery()
            channel.queue_declare(self.name, passive=True)

    def consume(self, messages: int) -> None:
        """Reads the first so many messages with a bare consumer."""
        with pika.BlockingConnection(self._admin) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1000)
            for number, (method, _, _) in enumerate(channel.consume(self.name, arguments={"x-stream-offset": "first"}), 1):
                if number % 100 == 0 or number == messages:
                    channel.basic_ack(method.delivery_tag, multiple=True)
                if number == messages:
                    return


def processes() -> dict[int, str]:
    """This process and all below it, but a lab's: pid -> its command."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = {os.getpid()}, {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new and _KEEPER not in _command(pid)} - found
        found |= new
    return {pid: _command(pid) for pid in found}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").replace("\0", " ")
    except OSError:
        return ""


def spark_cpu_s() -> float:
    """CPU time of this process, its Spark and its Python workers, those that have ended included, in seconds."""
    ticks = 0
    for pid in processes():
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / _TICKS_PER_S


@contextmanager
def worker_peak() -> Iterator[list[int]]:
    """The greatest memory of a Python worker of Spark while the context is open: a list of one number of bytes."""
    peak = [0]

    def look() -> None:
        for pid, command in processes().items():
            if "pyspark" in command and "java" not in command and pid != os.getpid():
                try:
                    peak[0] = max(peak[0], memory_bytes(pid))
                except OSError:
                    continue

    with repeated(look, 0.05):
        yield peak
