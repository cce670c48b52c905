"""Receive queues that were written before, for tests without a broker."""

from __future__ import annotations

import random

from receive_queues import transaction

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.spark.ranges import Range, Selection, begin
from lrq_ha.streams.message import Message

Q = "LRQ_Recv_a_b"


class Recorded:
    """A stream that was written before. `trimmed`: how many messages go as soon as it is read."""

    def __init__(self, messages: list[Message], trimmed: int = 0) -> None:
        self.messages, self.trimmed = messages, trimmed

    def first(self, queue: str) -> Message | None:
        return self.messages[self.trimmed] if self.messages else None

    def tail(self, queue: str) -> Message | None:
        return self.messages[-1] if self.messages else None

    def at(self, queue: str, offset: int) -> Message:
        return next(message for message in self.messages if message.offset >= offset)


def chain(rng: random.Random, count: int) -> list[pb.ReceivedTransaction]:
    """Positions as a source has them: sequences with holes (what is for others), epochs that grow now and then."""
    made, sequence, epoch = [], 0, 257
    for _ in range(count):
        sequence += rng.randint(1, 4)
        epoch += 256 * (rng.random() < 0.1)
        made.append(transaction(sequence, epoch=epoch))
    return made


def stream(rng: random.Random, made: list[pb.ReceivedTransaction], rewinds: int, *, whole: bool) -> Recorded:
    """A walk over `made`: forward in batches, and `rewinds` times back. If `whole`, it ends at the end."""
    messages: list[Message] = []
    at = offset = 0
    marks = sorted(rng.randint(0, 2 * len(made)) for _ in range(rewinds))
    steps = 0
    while True:
        if marks and (steps >= marks[0] or at == len(made)):
            marks.pop(0)
            at = rng.randint(0, at)
        if at == len(made) or (not whole and not marks and messages and rng.random() < 0.05):
            return Recorded(messages)
        size = min(rng.choice((1, 1, 2, 5)), len(made) - at)
        previous = made[at - 1].position if at else pb.Position()
        messages.append(Message(offset, pb.ReceivedBatch(previous=previous, transactions=made[at : at + size])))
        at, steps, offset = at + size, steps + size, offset + 1 + (rng.random() < 0.1)


def read(source: Recorded, part: Range) -> list[int]:
    """Sequences that a partition gives."""
    start, same_stream = begin(source, part)
    assert start is not None
    selection = Selection(part, source, strict=True)
    given = []
    for message in source.messages[source.messages.index(start) :]:
        given += [one.position.sequence for one in selection.take(message, same_stream=same_stream).transactions]
        if selection.done(message.offset, same_stream=same_stream):
            return given
    raise AssertionError(f"{part} does not end in the stream")


def read_all(source: Recorded, parts: list[Range]) -> list[int]:
    return [sequence for part in parts for sequence in read(source, part)]


def recorded(*sequences: int, offset: int = 0) -> Recorded:
    """One transaction per message; the first follows the one before it in number."""
    batches = [
        pb.ReceivedBatch(previous=transaction(sequence - 1).position, transactions=[transaction(sequence)])
        for sequence in sequences
    ]
    return Recorded([Message(offset + number, batch) for number, batch in enumerate(batches)])


def chains(*starts: int) -> Recorded:
    """One transaction per message; each of `starts` and the two numbers behind it follow on each other, and a start on nothing."""
    batches = []
    for start in starts:
        batches.append(pb.ReceivedBatch(transactions=[transaction(start)]))
        batches += [message.batch for message in recorded(start + 1, start + 2).messages]
    return Recorded([Message(number, batch) for number, batch in enumerate(batches)])
