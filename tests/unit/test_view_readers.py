"""Sessions that share the readers of a view: each is given all that is its client's, in order, however slow another is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import view_readers as v
from lrq_ha.routing.shares import ViewEntry
from lrq_ha.routing.tables import Reason

TAIL = 5  # entries, of one byte each


def at(sequence: int) -> Position:
    return Position(257, sequence)


def entry(sequence: int, client_name: str = "orders") -> ViewEntry:
    return ViewEntry(at(sequence), pb.Transaction(client_name=client_name), 1)


def read(*sequences: int) -> m.Read:
    return m.Read(0, tuple(entry(sequence) for sequence in sequences), at(sequences[-1]))


def given(effects: list[v.Effect[str]]) -> dict[str, list[int]]:
    """What each session is given."""
    found: dict[str, list[int]] = {}
    for effect in effects:
        if isinstance(effect, v.Give) and isinstance(effect.event, m.Read):
            found.setdefault(effect.session, []).extend(each.position.sequence for each in effect.event.entries)
    return found


def following(*sessions: str) -> v.ViewReaders[str]:
    """Sessions that follow reader 1, which has given up to 10."""
    readers: v.ViewReaders[str] = v.ViewReaders(TAIL)
    assert readers.start(sessions[0], "orders", 7, 1) == [v.StartReader(1, 1, sessions[0])]
    for session in sessions[1:]:
        assert readers.start(session, "orders", 7, 1) == []
    assert given(readers.take(read(*range(1, 11)), 1)) == {session: list(range(1, 11)) for session in sessions}
    return readers


def test_sessions_that_begin_in_the_tail_of_a_reader_follow_it() -> None:
    readers = following("west", "south")
    assert given(readers.start("north", "orders", 1, 9)) == {"north": [9, 10]}
    assert readers.start("up", "orders", 1, 11) == []
    assert readers.start("late", "orders", 1, 5) == [v.StartReader(2, 5, "late")]
    assert readers.start("early", "orders", 1, 12) == [v.StartReader(3, 12, "early")]
    assert {each: readers.reader_of(each) for each in ("north", "up", "late", "early", "none")} == {
        "north": 1, "up": 1, "late": 2, "early": 3, "none": None
    }  # fmt: skip


def test_a_session_that_pauses_holds_up_no_other() -> None:
    readers = following("west", "south")
    assert readers.pause("south") == []
    assert given(readers.take(read(11, 12), 1)) == {"west": [11, 12]}
    assert given(readers.resume("south")) == {"south": [11, 12]}, "from the tail"
    assert readers.pause("south") == []
    readers.take(read(*range(13, 20)), 1)
    assert readers.resume("south") == [v.StartReader(2, 13, "south")]


def test_a_reader_that_has_come_into_the_tail_of_another_ends() -> None:
    readers = following("west", "south")
    readers.pause("south")
    readers.take(read(*range(11, 30)), 1)
    readers.resume("south")
    assert [type(effect) for effect in readers.take(read(11, 12), 2)] == [v.Give]
    effects = readers.take(read(*range(13, 28)), 2)
    assert v.StopReader(2) in effects
    assert given(effects) == {"south": list(range(13, 30))}
    assert given(readers.take(read(30), 1)) == {"west": [30], "south": [30]}
    assert readers.take(read(28), 2) == [], "what it had under way"


def test_a_reader_without_another_session_pauses() -> None:
    readers = following("west")
    assert readers.pause("west") == [v.PauseReader(1)]
    assert readers.resume("west") == [v.ResumeReader(1)]
    assert readers.pause("west") == [v.PauseReader(1)]
    effects = readers.start("south", "orders", 1, 9)
    assert v.ResumeReader(1) in effects, "who comes does not wait"
    assert given(effects) == {"south": [9, 10]}
    assert given(readers.take(read(11), 1)) == {"south": [11]}
    assert given(readers.resume("west")) == {"west": [11]}


def test_a_session_that_pauses_as_its_reader_ends() -> None:
    readers = following("west")
    readers.start("south", "orders", 1, 12)
    assert readers.pause("west") == [v.PauseReader(1)]
    effects = readers.take(read(11), 1)
    assert (effects[0], given(effects)) == (v.StopReader(1), {"west": [11]}), "under way"
    assert readers.reader_of("west") is None
    assert given(readers.take(read(12), 2)) == {"south": [12]}
    assert given(readers.resume("west")) == {"west": [12]}


def test_sessions_are_given_their_clients_transactions_and_all_know_how_far_it_went() -> None:
    readers = following("west")
    readers.start("bills", "bills", 3, 11)
    effects = readers.take(m.Read(0, (entry(11, "bills"), entry(12)), at(12)), 1)
    assert given(effects) == {"west": [12], "bills": [11]}
    assert {effect.event.through for effect in effects if isinstance(effect, v.Give) and isinstance(effect.event, m.Read)} == {at(12)}
    assert readers.take(m.Read(0, (), at(12)), 1) == []


def test_the_end_a_demand_and_a_trim_go_to_all_that_follow() -> None:
    readers = following("west", "south")
    demand = m.Demand(Reason.READ_TOO_LATE)
    assert readers.take(m.ReadEnd(0, at(15)), 1) == [v.Give("west", m.ReadEnd(7, at(15))), v.Give("south", m.ReadEnd(7, at(15)))]
    assert readers.take(demand, 1) == [v.Give("west", demand), v.Give("south", demand)]
    assert readers.take(m.Trimmed(0, 20), 1) == [v.Give("west", m.Trimmed(7, 20)), v.Give("south", m.Trimmed(7, 20))]
    assert readers.stop("west") == readers.pause("west") == readers.resume("west") == []


def test_a_reader_ends_with_its_last_session() -> None:
    readers = following("west", "south")
    assert readers.stop("west") == []
    assert readers.stop("south") == [v.StopReader(1)]
    readers = following("west", "south")
    readers.pause("west")
    assert readers.pause("west") == readers.stop("west") == [], "it has no reader"
    assert readers.start("south", "orders", 8, 1) == [v.StopReader(1), v.StartReader(2, 1, "south")]


@dataclass
class Taken:
    """What a session was given since it began."""

    client_name: str
    first: int
    number: int
    sequences: list[int] = field(default_factory=list)
    through: int = 0
    pauses: bool = False


class World:
    """Sessions begin, pause, go on and end; readers read at any speed; what each session is given is checked after each step."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.readers: v.ViewReaders[str] = v.ViewReaders(TAIL)
        self.view: list[ViewEntry] = []
        self.running: dict[int, int] = {}  # the next index of each reader
        self.paused: set[int] = set()
        self.taken: dict[str, Taken] = {}
        self.newest = 0  # number of a session's StartRead

    def carry_out(self, effects: list[v.Effect[str]]) -> None:
        for effect in effects:
            match effect:
                case v.StartReader():
                    assert effect.session in self.taken
                    self.running[effect.reader] = effect.from_sequence - 1
                case v.StopReader():
                    del self.running[effect.reader]
                    self.paused.discard(effect.reader)
                case v.PauseReader():
                    assert effect.reader in self.running
                    self.paused.add(effect.reader)
                case v.ResumeReader():
                    assert effect.reader in self.running
                    self.paused.remove(effect.reader)
                case v.Give():
                    self.take(effect.session, effect.event)

    def take(self, session: str, event: m.Event) -> None:
        """A session may pause, go on, begin elsewhere or end because of what it is given."""
        taken = self.taken.get(session)
        assert isinstance(event, (m.Read, m.ReadEnd))
        if taken is None or event.reader != taken.number:
            return  # it has begun elsewhere since
        self.note(taken, event)
        match self.chance.choices(("nothing", "turn", "start", "stop"), (10, 2, 0.5, 0.2))[0]:
            case "turn":
                self.turn(session, not taken.pauses)
            case "start":
                self.start(session)
            case "stop":
                self.stop(session)

    @staticmethod
    def note(taken: Taken, event: m.Read | m.ReadEnd) -> None:
        if isinstance(event, m.Read):
            taken.sequences += [each.position.sequence for each in event.entries if each.position.sequence > taken.through]
        taken.through = max(taken.through, event.through.sequence)

    def step(self) -> None:
        session = self.chance.choice("abcd")
        match self.chance.choices(("write", "start", "stop", "turn", "read"), (2, 1, 0.2, 2, 5))[0]:
            case "write":
                client_name = self.chance.choice(["orders", "orders", "bills"])
                self.view += [entry(len(self.view) + n, client_name) for n in range(1, self.chance.randrange(2, 9))]
            case "start":
                self.start(session)
            case "stop":
                self.stop(session)
            case "turn" if session in self.taken:
                self.turn(session, not self.taken[session].pauses)
            case "read" if self.running:
                self.read_on(self.chance.choice(list(self.running)), self.chance.randrange(1, 8))
        self.check()

    def start(self, session: str) -> None:
        first = max(1, len(self.view) + 2 - self.chance.randrange(15))
        self.newest += 1
        self.taken[session] = Taken("bills" if session == "d" else "orders", first, self.newest, through=first - 1)
        self.carry_out(self.readers.start(session, self.taken[session].client_name, self.newest, first))

    def stop(self, session: str) -> None:
        self.taken.pop(session, None)
        self.carry_out(self.readers.stop(session))

    def turn(self, session: str, pauses: bool) -> None:
        self.taken[session].pauses = pauses
        self.carry_out(self.readers.pause(session) if pauses else self.readers.resume(session))

    def read_on(self, number: int, count: int) -> None:
        start = self.running[number]
        part = tuple(self.view[start : start + count])
        if part:
            self.running[number] += len(part)
            self.carry_out(self.readers.take(m.Read(0, part, part[-1].position), number))
        elif start == len(self.view):
            self.carry_out(self.readers.take(m.ReadEnd(0, at(len(self.view))), number))

    def check(self) -> None:
        for session, taken in self.taken.items():
            own = [each.position.sequence for each in self.view[taken.first - 1 : taken.through] if each.client_name == taken.client_name]
            assert taken.sequences == own, session
            assert taken.through <= max(len(self.view), taken.first - 1)
            number = self.readers.reader_of(session)
            assert taken.pauses or (number in self.running and number not in self.paused), "nothing is read for it"
        for number in set(self.running) - self.paused:
            assert any(self.readers.reader_of(session) == number and not taken.pauses for session, taken in self.taken.items()), "for none"

    def come_to_rest(self) -> None:
        """All come to the end, and follow one reader."""
        self.chance.choices = lambda _choices, _weights: ["nothing"]  # type: ignore[method-assign, assignment]
        self.view += [entry(len(self.view) + 1), entry(len(self.view) + 2)]
        for session, taken in self.taken.items():
            if taken.pauses:
                self.turn(session, False)
        for _ in range(len(self.view)):
            for number in list(self.running):
                if number in self.running:
                    self.read_on(number, 3)
        self.check()
        assert all(taken.through >= len(self.view) for taken in self.taken.values())
        assert len(self.running) <= 1


def test_any_sessions_at_any_speed() -> None:
    for seed in range(100):
        world = World(seed)
        for _ in range(80):
            world.step()
        world.come_to_rest()
