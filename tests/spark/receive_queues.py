"""Receive queues as a sink's sidecar writes them, for tests."""

from __future__ import annotations

from collections.abc import Iterable

import pika

from lrq_ha.proto import lrq_pb2 as pb


def transaction(
    sequence: int,
    payloads: Iterable[bytes] = (b"x",),
    *,
    epoch: int = 257,
    kind: pb.ReplicationType = pb.LOG_ENTRY_SYNC,
    request: str = "",
    timestamp_us: int = 1_357_034_400_000_001,
) -> pb.ReceivedTransaction:
    return pb.ReceivedTransaction(
        position=pb.Position(epoch=epoch, sequence=sequence),
        replication_id=f"app/{sequence}",
        timestamp_us=timestamp_us,
        type=kind,
        request_id=request,
        payloads=list(payloads),
    )


class ReceiveQueue:
    """A stream as the sink's sidecar writes it: batches that name what comes before them."""

    def __init__(self, connection: pika.BlockingConnection, source: str, client_name: str, arguments: dict[str, object]) -> None:
        self.name = f"LRQ_Recv_{client_name}_{source}"
        self.source, self.client_name = source, client_name
        self._channel = connection.channel()
        self._channel.confirm_delivery()
        self._burst = connection.channel()
        self._arguments = {"x-queue-type": "stream", **arguments}
        self.declare()
        self._previous = pb.Position()

    def declare(self) -> None:
        self._channel.queue_declare(self.name, durable=True, arguments=self._arguments)

    def batch(self, *transactions: pb.ReceivedTransaction, previous: pb.Position | None = None) -> bytes:
        """A batch that follows the last one made, or `previous`."""
        before = self._previous if previous is None else previous
        self._previous = transactions[-1].position
        return pb.ReceivedBatch(
            source=self.source, client_name=self.client_name, previous=before, transactions=transactions
        ).SerializeToString()

    def write(self, *bodies: bytes) -> None:
        """Confirmed one by one: a chunk of its own for each."""
        for body in bodies:
            self._channel.basic_publish("", self.name, body, pika.BasicProperties(delivery_mode=2))

    def write_burst(self, bodies: Iterable[bytes]) -> None:
        """Without waiting between them: chunks of many. All are in the stream on return."""
        last = None
        for body in bodies:
            if last is not None:
                self._burst.basic_publish("", self.name, last, pika.BasicProperties(delivery_mode=2))
            last = body
        self._burst.basic_qos(prefetch_count=1)  # answered when all before it were routed
        if last is not None:
            self.write(last)

    def delete(self) -> None:
        self._channel.queue_delete(self.name)
