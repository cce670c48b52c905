"""A channel's transaction (`tx`) and its commit. No I/O."""

from __future__ import annotations

from lrq_ha.proto import lrq_pb2 as pb

from ..amqp.content_assembly import Share


class Commit:
    """A transaction that is in the log and whose commit-ok the broker owes. No publish of it counts as answered before.

    Attributes:
        runs: Its publishes: (sequence of the first, the run).
        repeats: Numbers in the IDs of its publishes that are not logged, as others with these IDs are: the client is answered when those are applied.
        own: The client knows nothing of it: acks of the door's own.
    """

    __slots__ = ("own", "repeats", "runs")

    def __init__(self, *, own: bool = False) -> None:
        self.runs: list[tuple[int, pb.Run]] = []
        self.repeats: list[int] = []
        self.own = own


class Transaction:
    """What a client has done since tx.select or the last commit or rollback.

    Args:
        share: What its frames count as; None for nothing.

    Attributes:
        frames: Its publishes, acks and rejections, whole, in order.
        bytes: Their length.
        methods: How many publishes, acks and rejections.
        upto, ones: The deliveries that they settle, by tag: all up to this one, and these.
        gaps: How many gaps its replication IDs may leave between themselves and those in the log.
    """

    __slots__ = ("_next_number", "_share", "_shown", "bytes", "frames", "gaps", "methods", "ones", "upto")

    def __init__(self, share: Share | None = None) -> None:
        self._share = share
        self.frames: list[bytes] = []
        self.bytes = 0
        self.methods = 0
        self.upto = 0
        self.ones: set[int] = set()
        self.gaps = 0
        self._next_number = 0
        self._shown: dict[int, bytes] = {}  # what the broker gets for some of the frames, by their place, before the commit

    def keep(self, data: bytes, methods: int = 1) -> None:
        """These frames of so many methods are part of it. Raises FrameError if the connection is to end over it."""
        self._hold(len(data))
        self.methods += methods
        self.frames.append(data)

    def settle(self, tag: int, multiple: bool) -> None:
        """An ack or rejection is part of it, of a tag or, with `multiple`, of all up to that."""
        if multiple:
            self.upto = max(self.upto, tag)
        else:
            self.ones.add(tag)

    def settles(self, tag: int) -> bool:
        """Whether there is one of this delivery."""
        return tag <= self.upto or tag in self.ones

    def number(self, number: int, *, follows: bool) -> None:
        """A publish in it has this number in its ID. `follows`: that leaves no gap to those in the log."""
        if number != self._next_number and not follows:
            self.gaps += 1
        self._next_number = number + 1

    def keep_instead(self, data: bytes) -> None:
        """What was kept last is what the broker is shown of it; what the client sent is this."""
        self._hold(len(data))
        self._shown[len(self.frames) - 1] = self.frames[-1]
        self.frames[-1] = data

    def _hold(self, size: int) -> None:
        if self._share is not None:
            self._share.take(size)
        self.bytes += size

    def over(self) -> Transaction:
        """It is done, or dropped. Returns the channel's next one."""
        if self._share is not None:
            self._share.give(self.bytes)
        return Transaction(self._share)

    @property
    def rehearsal(self) -> list[bytes]:
        """What the broker gets before the commit."""
        return [self._shown.get(place, data) for place, data in enumerate(self.frames)] if self._shown else self.frames
