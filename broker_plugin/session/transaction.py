"""A channel's transaction (`tx`) and its commit. No I/O."""

from __future__ import annotations

from lrq_ha.proto import lrq_pb2 as pb

from ..amqp.content_assembly import Share


class Commit:
    """A transaction that is in the log and whose commit-ok the broker owes. No publish of it counts as answered before.

    Attributes:
        runs: Its publishes: (sequence of the first, the run).
        repeats: Numbers in the IDs of its publishes that are in the log already: the client is answered when those entries are applied.
        own: The client does not know of this commit: it has the door's own acks.
    """

    __slots__ = ("own", "repeats", "runs")

    def __init__(self, *, own: bool = False) -> None:
        self.runs: list[tuple[int, pb.Run]] = []
        self.repeats: list[int] = []
        self.own = own


class Transaction:
    """The client's publishes and acks since tx.select or the last commit or rollback.

    Args:
        share: The budget that its frames count against; None for none.

    Attributes:
        frames: Its publishes, acks and rejections, whole, in order.
        bytes: Their length.
        methods: Number of publishes, acks and rejections.
        upto, ones: The deliveries that they settle, by tag: all up to `upto`, and those in `ones`.
        gaps: Number of gaps that its replication IDs may leave between themselves and those in the log.
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
        self._shown: dict[int, bytes] = {}  # the replacements of some frames, by index, which the broker gets before the commit

    def keep(self, data: bytes, methods: int = 1) -> None:
        """Adds frames of `methods` methods. Raises FrameError if the connection has to end because of them."""
        self._hold(len(data))
        self.methods += methods
        self.frames.append(data)

    def settle(self, tag: int, multiple: bool) -> None:
        """Adds an ack or rejection of a tag or, with `multiple`, of all up to that tag."""
        if multiple:
            self.upto = max(self.upto, tag)
        else:
            self.ones.add(tag)

    def settles(self, tag: int) -> bool:
        """Whether the transaction has an ack or rejection of this delivery."""
        return tag <= self.upto or tag in self.ones

    def number(self, number: int, *, follows: bool) -> None:
        """Adds the number in a publish's ID. `follows`: the number leaves no gap to those in the log."""
        if number != self._next_number and not follows:
            self.gaps += 1
        self._next_number = number + 1

    def keep_instead(self, data: bytes) -> None:
        """Replaces the last frames by the client's own; the broker still gets the replaced ones before the commit."""
        self._hold(len(data))
        self._shown[len(self.frames) - 1] = self.frames[-1]
        self.frames[-1] = data

    def _hold(self, size: int) -> None:
        if self._share is not None:
            self._share.take(size)
        self.bytes += size

    def over(self) -> Transaction:
        """Ends the transaction, done or dropped. Returns the channel's next one."""
        if self._share is not None:
            self._share.give(self.bytes)
        return Transaction(self._share)

    @property
    def rehearsal(self) -> list[bytes]:
        """The frames that the broker gets before the commit."""
        return [self._shown.get(place, data) for place, data in enumerate(self.frames)] if self._shown else self.frames
