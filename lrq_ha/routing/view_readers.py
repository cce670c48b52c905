"""The readers of one view, shared by the sessions that read it. Decides which reader each session follows.

Rules:

- A reader gives every transaction to all sessions that follow it, and keeps the newest ones: its tail, an equal part of `tail_bytes_max`.
- A session that begins, or goes on after a pause, follows a reader whose tail reaches back to its position, and gets the tail from there. If there
  is none, it gets a reader of its own. So a session that is far behind holds up no other, and none waits for it.
- Two readers that meet become one: where a reader has come into the tail of another, its sessions go over to that one, and it ends.
- A session that wants a pause leaves its reader if others follow it; else the reader pauses.
- What readers are to do comes before what sessions are given: a session may call again, because of what it is given, before the rest is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.shares import ViewEntry

TAIL_BYTES_MAX = 4 << 20
S = TypeVar("S")  # a session: any object that can be a key

# ---- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartReader(Generic[S]):
    """Read the view from `from_sequence` (of the log) on. `session`: the one it is for."""

    reader: int
    from_sequence: int
    session: S


@dataclass(frozen=True, slots=True)
class StopReader:
    reader: int


@dataclass(frozen=True, slots=True)
class PauseReader:
    """Enough for now: transactions under way are still taken."""

    reader: int


@dataclass(frozen=True, slots=True)
class ResumeReader:
    reader: int


@dataclass(frozen=True, slots=True)
class Give(Generic[S]):
    """Hand `event` to a session."""

    session: S
    event: m.Event


Effect = StartReader[S] | StopReader | PauseReader | ResumeReader | Give[S]


@dataclass(slots=True, eq=False)
class _Follower(Generic[S]):
    session: S
    client_name: str
    number: int  # of the session's StartRead
    reader: _Reader[S] | None = None
    pauses: bool = False
    through: int = 0  # while it has no reader: it was given everything up to this sequence


@dataclass(slots=True, eq=False)
class _Reader(Generic[S]):
    number: int
    through: Position  # everything up to here was given
    reaches: int  # the tail holds everything behind this sequence
    followers: list[_Follower[S]] = field(default_factory=list)
    tail: deque[ViewEntry] = field(default_factory=deque)
    tail_bytes: int = 0
    paused: bool = False

    def covers(self, sequence: int) -> bool:
        """Whether a session that was given everything up to a sequence can go on here."""
        return self.reaches <= sequence <= self.through.sequence


class ViewReaders(Generic[S]):
    """The readers of one view. Each method returns what is to be done, in order.

    Args:
        tail_bytes_max: Of all tails together, about: a reader that does not read keeps what it has.
    """

    def __init__(self, tail_bytes_max: int = TAIL_BYTES_MAX) -> None:
        self._tail_bytes_max = tail_bytes_max
        self._readers: dict[int, _Reader[S]] = {}
        self._followers: dict[S, _Follower[S]] = {}
        self._newest = 0  # number of the newest reader
        self._orders: list[StartReader[S] | StopReader | PauseReader | ResumeReader] = []  # of the method that was called
        self._gives: list[Give[S]] = []

    def _begin(self) -> None:
        self._orders, self._gives = [], []

    @property
    def _effects(self) -> list[Effect[S]]:
        return [*self._orders, *self._gives]

    def reader_of(self, session: S) -> int | None:
        """The number of the reader that a session follows; None: it has none now."""
        follower = self._followers.get(session)
        return follower.reader.number if follower is not None and follower.reader is not None else None

    def start(self, session: S, client_name: str, number: int, from_sequence: int) -> list[Effect[S]]:
        """A session begins to read, or begins elsewhere.

        Args:
            session: Any name of it.
            client_name: It is given transactions of this client only.
            number: That of its StartRead.
            from_sequence: The first sequence that it wants.
        """
        self.stop(session)
        self._followers[session] = follower = _Follower(session, client_name, number)
        self._follow(follower, from_sequence - 1)
        return self._effects

    def stop(self, session: S) -> list[Effect[S]]:
        """A session reads no more."""
        self._begin()
        follower = self._followers.pop(session, None)
        if follower is not None and follower.reader is not None:
            reader = follower.reader
            reader.followers.remove(follower)
            if not reader.followers:
                self._end(reader)
        return self._effects

    def pause(self, session: S) -> list[Effect[S]]:
        """A session has enough."""
        self._begin()
        follower = self._followers.get(session)
        if follower is not None:
            follower.pauses = True
            if follower.reader is not None and len(follower.reader.followers) > 1:
                self._leave(follower, follower.reader)
            elif follower.reader is not None:
                follower.reader.paused = True
                self._orders.append(PauseReader(follower.reader.number))
        return self._effects

    def resume(self, session: S) -> list[Effect[S]]:
        """A session wants to go on."""
        self._begin()
        follower = self._followers.get(session)
        if follower is not None:
            follower.pauses = False
            if follower.reader is None:
                self._follow(follower, follower.through)
            else:
                self._wake(follower.reader)
        return self._effects

    def take(self, event: m.Read | m.ReadEnd | m.Trimmed | m.Demand, number: int) -> list[Effect[S]]:
        """A reader has given something. Nothing happens if it was stopped."""
        self._begin()
        reader = self._readers.get(number)
        if reader is None:
            return self._effects
        match event:
            case m.Read():
                self._read(reader, event.entries)
            case m.ReadEnd():
                self._advance(reader, event.through)
                self._gives += [Give(of.session, m.ReadEnd(of.number, event.through)) for of in reader.followers]
            case m.Trimmed():
                del self._readers[number]
                for follower in reader.followers:
                    del self._followers[follower.session]
                    self._gives.append(Give(follower.session, m.Trimmed(follower.number, event.first_available)))
            case _:
                self._gives += [Give(of.session, event) for of in reader.followers]
        if number in self._readers:
            self._meet(reader)
        return self._effects

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _read(self, reader: _Reader[S], entries: tuple[ViewEntry, ...]) -> None:
        if not entries:
            return
        through = entries[-1].position
        reader.tail.extend(entries)
        reader.tail_bytes += sum(entry.size for entry in entries)
        while reader.tail_bytes * len(self._readers) > self._tail_bytes_max:
            dropped = reader.tail.popleft()
            reader.tail_bytes -= dropped.size
            reader.reaches = dropped.position.sequence
        self._advance(reader, through)
        self._give(reader.followers, entries, through)

    @staticmethod
    def _advance(reader: _Reader[S], through: Position) -> None:
        reader.through = max(reader.through, through)

    def _give(self, followers: list[_Follower[S]], entries: tuple[ViewEntry, ...], through: Position) -> None:
        """Gives transactions, each to the sessions of its client."""
        of_client: defaultdict[str, list[ViewEntry]] = defaultdict(list)
        for entry in entries:
            of_client[entry.client_name].append(entry)
        own = {client_name: tuple(those) for client_name, those in of_client.items()}
        self._gives += [Give(each.session, m.Read(each.number, own.get(each.client_name, ()), through)) for each in followers]

    def _follow(self, follower: _Follower[S], through: int) -> None:
        """Finds a reader for a session that was given everything up to a sequence."""
        reader = max((each for each in self._readers.values() if each.covers(through)), key=lambda each: each.through, default=None)
        if reader is not None:
            self._join([follower], reader, through)
            return
        self._newest += 1
        self._readers[self._newest] = reader = _Reader(self._newest, Position(0, through), through)
        reader.followers.append(follower)
        follower.reader = reader
        self._orders.append(StartReader(self._newest, through + 1, follower.session))

    def _join(self, followers: list[_Follower[S]], reader: _Reader[S], through: int) -> None:
        """Sessions that were given everything up to a sequence go on at a reader that covers it."""
        if reader.paused:
            for each in list(reader.followers):
                self._leave(each, reader)
            self._wake(reader)
        for each in followers:
            reader.followers.append(each)
            each.reader = reader
        entries = tuple(entry for entry in reader.tail if entry.position.sequence > through)
        if reader.through.sequence > through:
            self._give(followers, entries, reader.through)

    def _meet(self, reader: _Reader[S]) -> None:
        """Ends a reader that has come into the tail of another."""
        through = reader.through.sequence
        other = next((each for each in self._readers.values() if each is not reader and each.covers(through)), None)
        if other is None:
            return
        for follower in [each for each in reader.followers if each.pauses]:
            self._leave(follower, reader)
        followers, reader.followers = reader.followers, []
        self._end(reader)
        if followers:
            self._join(followers, other, through)

    @staticmethod
    def _leave(follower: _Follower[S], reader: _Reader[S]) -> None:
        follower.through, follower.reader = reader.through.sequence, None
        reader.followers.remove(follower)

    def _wake(self, reader: _Reader[S]) -> None:
        reader.paused = False
        self._orders.append(ResumeReader(reader.number))

    def _end(self, reader: _Reader[S]) -> None:
        del self._readers[reader.number]
        self._orders.append(StopReader(reader.number))
