"""The window of unconfirmed messages of one producer: pure, no I/O, no clock, no locks (its driver serialises the calls).

Rules:

 - A message has its replication ID before it is enqueued, and keeps it on every resend.
 - The number of a message that the broker nacked or returned is free on every node by then; the next message gets it. Otherwise it would be a
   permanent gap in the servers' memory of the producer.
 - Messages are sent, and sent again, in the order in which they were added. On one channel the delivery tags 1, 2, … follow that order.
 - A message leaves the window by an ack, a nack, or a refusal; a lost connection only makes it wait to be sent again.
 - The broker does not say which message made it close a channel. So the messages in doubt are then sent one at a time (probing)
   until the culprit is the only one in flight when it happens again.
 - A sequence that was learned from the server only moves the next one up, never down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.publisher.errors import FencedError, NackedError, Unconfirmed

T = TypeVar("T")

CONNECTION_STRIKES_MAX = 3
"""A lone message that was in flight this often when the broker closed the connection for an error is refused. (One close can
have another cause in the broker; a channel close names the message, so one is enough.)"""


@dataclass(slots=True)
class Entry(Generic[T]):
    """One unconfirmed message; `item` is the driver's own (its bytes and its Confirm).

    Attributes:
        sequence: Its place in the order: 1 for the first that this process has added.
        number: The number in its ID.
    """

    sequence: int
    number: int
    size_bytes: int
    item: T
    strikes: int = 0
    returned: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Settled(Generic[T]):
    """A message that left the window. `error` is None if it was confirmed."""

    entry: Entry[T]
    error: LrqError | None = None


class Window(Generic[T]):
    """Unconfirmed messages of one producer, at most `messages_max` of them and `bytes_max` bytes.

    Args:
        producer: Producer name, the part of the replication IDs before the slash.
        messages_max: Most messages that wait for a confirm, >= 1.
        bytes_max: Most bytes of these messages; a single message larger than this still passes when it is alone.
    """

    def __init__(self, producer: str, messages_max: int, bytes_max: int) -> None:
        self.producer = producer
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.assigned = 0  # the highest number given or learned; never goes down
        self.added = 0  # the last message's sequence
        self._free: deque[int] = deque()  # numbers below `assigned` to be given next; never more than were unconfirmed at a time
        self._known = 0  # the highest number sent or learned: the server can know none above it
        self._waiting: deque[Entry[T]] = deque()  # to be sent, by sequence; all above the ones in flight
        self._flight: dict[int, Entry[T]] = {}  # delivery tag -> entry, both ascending
        self._numbered: dict[int, Entry[T]] = {}  # the entries of `_flight`, by number
        self._tag = 0  # the last delivery tag used on this channel
        self._acked = 0  # every tag up to this one is settled
        self._probe_to = 0  # messages up to this sequence are sent one at a time
        self._head = (0, 0.0)  # (sequence, since when in seconds) of the oldest message in flight, when last looked at

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flight)

    def fits(self, size_bytes: int) -> bool:
        """Whether a message of this size may be added now."""
        count = len(self)
        return count == 0 or (count < self.messages_max and self.bytes + size_bytes <= self.bytes_max)

    @property
    def in_flight(self) -> int:
        """Number of messages that were sent on this channel and are not settled."""
        return len(self._flight)

    @property
    def oldest(self) -> int:
        """The sequence of the oldest unconfirmed message; that of the next one if there is none."""
        if self._flight:
            return next(iter(self._flight.values())).sequence
        return self._waiting[0].sequence if self._waiting else self.added + 1

    def learn(self, last: int) -> None:
        """Takes the producer's last number from the server (0: unknown).

        Raises:
            FencedError: The number is beyond this process's last one: another process uses the name. Nothing was changed.
        """
        if last > self._known and self.added:
            raise FencedError(self.producer, last, self._known)
        self._known = max(self._known, last)
        self.assigned = max(self.assigned, last)

    def next_id(self) -> str:
        """The replication ID that the next `add` will give."""
        return f"{self.producer}/{self._free[0] if self._free else self.assigned + 1}"

    def id_of(self, entry: Entry[T]) -> str:
        return f"{self.producer}/{entry.number}"

    def add(self, size_bytes: int, item: T, number: int = 0) -> Entry[T]:
        """Gives the next replication ID and queues the message. The caller has asked `fits`, or knows that it need not.

        Args:
            size_bytes: Of the message.
            item: The driver's own.
            number: The number in its ID, if the caller keeps the numbers (`NumberedWindow`); 0: the next one.
        """
        if number:
            self.assigned = max(self.assigned, number)
        elif self._free:
            number = self._free.popleft()
        else:
            number = self.assigned = self.assigned + 1
        self.added += 1
        entry = Entry(self.added, number, size_bytes, item)
        self._waiting.append(entry)
        self.bytes += size_bytes
        return entry

    def take(self, bytes_max: int) -> list[Entry[T]]:
        """The next messages to write to the open channel, at least one if any may go, about `bytes_max` bytes of them."""
        taken: list[Entry[T]] = []
        size = 0
        waiting, flight, numbered = self._waiting, self._flight, self._numbered
        if flight and next(iter(flight.values())).sequence <= self._probe_to:
            return taken  # a message in doubt is sent alone
        while waiting and size < bytes_max:
            entry = waiting.popleft()
            self._tag += 1
            flight[self._tag] = numbered[entry.number] = entry
            taken.append(entry)
            size += entry.size_bytes
            if entry.number > self._known:
                self._known = entry.number
            if entry.sequence <= self._probe_to:
                break
        return taken

    def acked(self, tag: int, multiple: bool, *, nack: bool = False) -> list[Settled[T]]:
        """A basic.ack or basic.nack. A message that was returned before its ack is not stored anywhere: refused.

        Raises:
            IllegalEvent: A tag that was never sent.
        """
        if tag > self._tag:
            raise IllegalEvent(f"Confirm for delivery tag {tag} of producer {self.producer}, but only {self._tag} were sent")
        if multiple:
            tags = range(self._acked + 1, (tag or self._tag) + 1)
            self._acked = max(self._acked, tags.stop - 1)
        else:
            tags = range(tag, tag + 1)
        settled = []
        for each in tags:
            entry = self._flight.pop(each, None)
            if entry is not None:
                del self._numbered[entry.number]
                self.bytes -= entry.size_bytes
                settled.append(Settled(entry, self._refusal(entry, nack)))
        return settled

    def _refusal(self, entry: Entry[T], nack: bool) -> LrqError | None:
        if entry.returned is None and not nack:
            return None
        self._free.append(entry.number)
        return NackedError(self.id_of(entry), *(entry.returned or (0, "")))

    def returned(self, number: int, code: int, text: str) -> None:
        """A basic.return: the message's ack follows, and then settles it as refused."""
        entry = self._numbered.get(number)
        if entry is not None:
            entry.returned = (code, text)

    def channel_refused(self, code: int, text: str) -> list[Settled[T]]:
        """The broker closed the channel because of a message in flight. All others are sent again on the next channel."""
        return self._blame(1, code, text)

    def connection_refused(self, code: int, text: str) -> list[Settled[T]]:
        """The broker closed the connection with an error that a message may have caused (a malformed one, say)."""
        return self._blame(CONNECTION_STRIKES_MAX, code, text)

    def _blame(self, strikes_max: int, code: int, text: str) -> list[Settled[T]]:
        settled = []
        if len(self._flight) == 1:
            ((tag, entry),) = self._flight.items()
            entry.strikes += 1
            if entry.strikes >= strikes_max:
                del self._flight[tag]
                self.bytes -= entry.size_bytes
                settled.append(Settled(entry, NackedError(self.id_of(entry), code, text)))
        if self._flight:
            self._probe_to = max(self._probe_to, next(reversed(self._flight.values())).sequence)
        self.disconnected()
        return settled

    def disconnected(self) -> None:
        """The channel is gone: everything in flight is in line again, in its order; the next channel counts tags from 1."""
        for entry in self._flight.values():
            entry.returned = None
        self._waiting.extendleft(reversed(self._flight.values()))
        self._flight.clear()
        self._numbered.clear()
        self._tag = self._acked = 0
        self._head = (0, 0.0)

    def overdue_s(self, now_s: float) -> float:
        """Seconds since the first look at the message that is now the oldest in flight. So a slow broker that goes on confirming is not
        overdue, however old its messages are; a broker that leaves a message out is.
        """
        if not self._flight:
            return 0.0
        sequence = next(iter(self._flight.values())).sequence
        if self._head[0] != sequence:
            self._head = (sequence, now_s)
        return now_s - self._head[1]

    def not_late(self) -> None:
        """No message in flight counts as late by now: the broker has said that it blocks us."""
        self._head = (0, 0.0)

    def fail_all(self, error: LrqError | None = None) -> list[Settled[T]]:
        """Empties the window. Each message gets `error`; without one, an Unconfirmed of its own."""
        entries = [*self._flight.values(), *self._waiting]
        self.disconnected()
        self._waiting.clear()
        self.bytes = 0
        return [Settled(entry, error or Unconfirmed(self.id_of(entry))) for entry in entries]


class NumberedWindow(Window[T]):
    """A window whose messages have their numbers from the caller, who keeps them durably and may add a message again under its number.

    Args:
        producer, messages_max, bytes_max: As for Window.
        sent: The highest number that any process may have sent.
    """

    def __init__(self, producer: str, messages_max: int, bytes_max: int, sent: int) -> None:
        super().__init__(producer, messages_max, bytes_max)
        self.learned = False  # whether the server has told the producer's last number
        self.expect(sent)

    def expect(self, sent: int) -> None:
        """Any process may have sent the numbers up to `sent`."""
        self._known = max(self._known, sent)

    def learn(self, last: int) -> None:
        """Takes the producer's last number from the server.

        Raises:
            FencedError: The number is beyond all that were sent, as far as the caller has kept it.
        """
        if last > self._known:
            raise FencedError(self.producer, last, self._known)
        self.learned = True

    def _refusal(self, entry: Entry[T], nack: bool) -> LrqError | None:
        error = super()._refusal(entry, nack)
        self._free.clear()  # the number stays that of its message
        return error
