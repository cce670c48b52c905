"""Publishes whose IDs are in the log already (R6): each gets the answer of the first publish with its ID, once that is known.

Rules:
- A repeat is not appended. Its confirm waits until the first one's entry is applied, or, with local completion, until the own stream has that entry.
  If the first one was refused, its ID is free again, and the repeat is refused, too.
- The answer to a commit with repeats waits in that way, too. If the first publish of a repeat was refused, the channel is closed, as by a broker
  that has refused a publish of a transaction. A channel's commits are answered in their order.
- Thousands may wait while every ack of the broker applies some entry: each repeat is looked at when its own entry is applied, not before.
"""

from __future__ import annotations

from ..amqp import frames, reply_codes
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from . import closing, publisher_confirms

GAPS = "PRECONDITION_FAILED - this producer's IDs lie too far apart (door.id_bytes_max): number consecutively, and use refused IDs again"
PARTIAL = "PRECONDITION_FAILED - partial tx completion"  # RabbitMQ's text
REFUSED: tuple[bytes, list[int]] = (b"", [])  # stands for a refused commit, so that no later one is taken for its answer


class DuplicatePublishes:
    """The repeats of one connection.

    Attributes:
        waiting: Number of items that wait for their entries: publishes; commits, and the repeats in them.
    """

    __slots__ = ("_by_entry", "_session", "waiting")

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        # (channel, client's tag, number in the ID); tag 0: the channel's commits
        self._by_entry: dict[int, list[tuple[ClientChannel, int, int]]] = {}
        self.waiting = 0

    def take(self, channel: ClientChannel, number: int, *, early: bool) -> None:
        """Handles a publish with an ID that is in the log. `early`: its confirm need not wait for the broker's."""
        session = self._session
        session.door.counters["repeats"] += 1
        if channel.committing is not None:
            channel.committing.repeats.append(number)
            return
        tag = channel.confirms.ended_here()
        if not tag:
            return
        sequence = self._open_entry(number)
        if not sequence:
            publisher_confirms.confirm(session, channel, tag)
        elif early and sequence in session.replica.progress.early:
            publisher_confirms.until_durable(session, channel, tag, 1, sequence, 0)
            publisher_confirms.durable_advanced(session)
        else:
            self._wait(sequence, channel, tag, number)

    def are_in(self, numbers: list[int]) -> bool:
        """Whether the messages with these numbers are in the queues."""
        return all(self._seen(number) and not self._open_entry(number) for number in numbers)

    def answer_commit(self, channel: ClientChannel, frame: bytes, numbers: list[int]) -> None:
        """The broker has committed a transaction: the client gets this frame after earlier commits, if the repeats in it are in the queues."""
        if channel.commit_oks and channel.commit_oks[0] is REFUSED:
            return
        channel.commit_oks.append((frame, numbers))
        self.waiting += 1 + len(numbers)
        if len(channel.commit_oks) == 1:
            self._answer_commits(channel)

    def applied_advanced(self, sequence: int) -> None:
        """An entry is applied, or refused: answers its repeats."""
        session = self._session
        for channel, tag, number in self._by_entry.pop(sequence, ()):
            self.waiting -= 1
            if not tag:
                self._answer_commits(channel)
            elif later := self._open_entry(number):  # the first one was refused, and a third publish has taken its place
                self._wait(later, channel, tag, number)
            else:
                publisher_confirms.confirm(session, channel, tag, self._seen(number))
        session.flow.consider_pausing()

    def forget(self) -> None:
        """The connection is at its end: drops all waiting repeats."""
        for sequence in self._by_entry:
            self._session.replica.progress.applied_no_matter(sequence, self)
        self._by_entry.clear()
        self.waiting = 0

    def _answer_commits(self, channel: ClientChannel) -> None:
        session = self._session
        while channel.commit_oks:
            if not channel.speaks or session.channels.get(channel.number) is not channel:
                self._forget_commits(channel)
                return
            frame, numbers = channel.commit_oks[0]
            while numbers:
                sequence = self._open_entry(numbers[-1])
                if sequence:
                    self._wait(sequence, channel, 0, 0)
                    return
                self.waiting -= 1
                if not self._seen(numbers.pop()):
                    self._forget_commits(channel)
                    channel.commit_oks.append(REFUSED)
                    closing.refuse(session, channel, reply_codes.PRECONDITION_FAILED, PARTIAL, frames.TX_COMMIT)
                    return
            channel.commit_oks.popleft()
            self.waiting -= 1
            session.confirm(channel, frame)

    def _forget_commits(self, channel: ClientChannel) -> None:
        self.waiting -= sum(1 + len(numbers) for _, numbers in channel.commit_oks)
        channel.commit_oks.clear()

    def _wait(self, sequence: int, channel: ClientChannel, tag: int, number: int) -> None:
        self._by_entry.setdefault(sequence, []).append((channel, tag, number))
        self.waiting += 1
        self._session.replica.progress.when_applied(sequence, self)

    def _open_entry(self, number: int) -> int:
        """The entry with this ID, if it is not applied yet; else 0."""
        sequence = self._session.replica.index.dedup.position_of(self._session.producer_key, number)
        return 0 if sequence is None or self._session.replica.progress.tracker.is_applied(sequence) else sequence

    def _seen(self, number: int) -> bool:
        return self._session.replica.index.dedup.seen(self._session.producer_key, number)


def may_number(session: ClientSession, number: int) -> bool:
    """Whether a number of the announced producer, which is not in the log, keeps the number of gaps there within the limit (`GAPS`)."""
    first = number - skipped_before(session, number)
    return session.replica.index.dedup.may_add(session.producer_key, first, session.door.config.id_bytes_max)


def skipped_before(session: ClientSession, number: int) -> int:
    """Number of numbers before this one that the producer will not use, as far as the log does not know them; 0 if it is not ascending."""
    return session.replica.index.dedup.skips(session.producer_key, number) if session.ascending else 0
