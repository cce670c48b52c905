"""A relay of an outbox in SQLite, killed behind each of its steps: the log has each transaction once, whole, in commit order."""

from __future__ import annotations

import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from outbox_rig import FakePublisher, Idle, Killed, Log, Rig, Steps
from unconnected import unconnected, until

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.publisher import FencedError, InvalidArgument, NackedError, NoPrimary, PublisherClosed
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.outbox import NoOutbox, OutboxRelay, OutboxRestored, RelayFenced, RelayState
from lrq_ha.publisher.outbox.batch import BATCH_BYTES_MAX, BATCH_TRANSACTIONS_MAX, Stored, find_end, group_entries, split_batch
from lrq_ha.publisher.outbox.states import TRANSITIONS, require_legal
from lrq_ha.publisher.window import NumberedWindow

pytestmark = pytest.mark.proves("outbox")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "app.db")


def finish(rig: Rig, **options: Any) -> OutboxRelay:
    """A relay transmits what is left."""
    relay = rig.relay(**options)
    relay._work()
    assert relay._failure is None, relay._failure
    return relay


def assert_once(rig: Rig) -> None:
    assert rig.log.payloads == rig.written
    assert rig.rows() == []


def test_transactions_arrive_whole_and_in_order(rig: Rig) -> None:
    names = rig.write(2, 1, 3)
    relay = finish(rig)
    assert rig.log.entries == [(names[0], (b"0", b"1")), (names[1], (b"2",)), (names[2], (b"3", b"4", b"5"))]
    assert_once(rig)
    status = relay.status()
    assert (status.state, status.problem, status.transmitted, status.waiting) == (RelayState.STOPPED, "", 3, 0)


def test_a_relay_is_killed_behind_each_step(tmp_path: Path) -> None:
    """The steps: the last moment before each commit, the first one behind it, and each transmission."""
    for last in range(1, 1000):
        folder = tmp_path / str(last)
        folder.mkdir()
        rig = Rig(folder / "app.db")
        rig.write(2, 1, 1)
        rig.write(1, to=("south",))
        steps = Steps(last)
        try:
            rig.relay(steps)._work()
        except Killed:
            rig.write(1)
            finish(rig)
            assert_once(rig)
        else:
            assert_once(rig)
            break
    assert last == 11, "two steps for each of three commits, one for each of four transmissions"
    assert steps.count == last - 1


@pytest.mark.parametrize("seed", range(20))
def test_relays_are_killed_at_random(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    rig = Rig(tmp_path / "app.db")
    for _ in range(25):
        sites = random_.choice([("west",), ("south", "west"), ("north",)])
        rig.write(*(random_.randint(1, 3) for _ in range(random_.randint(0, 4))), to=sites)
        rig.write(1, commit=False)
        try:
            rig.relay(Steps(random_.randint(1, 12)), keep=random_.choice([0, 2]))._work()
        except Killed:
            pass
    finish(rig)
    assert_once(rig)


def test_a_kill_between_the_confirm_and_its_record_repeats_what_the_log_drops(rig: Rig) -> None:
    rig.write(1)
    with pytest.raises(Killed):
        rig.relay(Steps(6))._work()  # take over, sent, transmission: two steps for each commit
    assert rig.rows() == [(1,)]
    assert rig.log.payloads == [b"0"]
    finish(rig)
    assert_once(rig)
    assert rig.log.repeats == 1


def test_two_relays_the_first_ends(rig: Rig) -> None:
    """The first one is in the middle of a batch, and its commits change nothing any more."""
    rig.write(1, 1)
    first = rig.relay()
    first._awake = threading.Event()
    first.start()
    until(lambda: rig.rows() == [])
    rig.write(1)
    finish(rig)
    with pytest.raises(RelayFenced, match="Run one relay for each outbox"):
        first.run()
    assert first.status().state is RelayState.FAILED
    rig.write(1)
    finish(rig)
    assert_once(rig)


def test_a_relay_that_finds_numbers_of_another_relay_in_the_log_is_told_so(rig: Rig) -> None:
    """Its connection is made again, before it looks at the database again."""
    rig.write(1)
    publisher = FakePublisher(rig.log, Steps())
    given: Any = publisher
    first = OutboxRelay(rig.connect, lambda: given, rig.outbox)

    def idle() -> None:
        rig.write(1)
        finish(rig)
        publisher.producers[0].log_in(1)

    first._awake = Idle(idle)
    first._work()
    assert isinstance(first._failure, RelayFenced)
    assert_once(rig)


@pytest.mark.parametrize("last", range(2, 8))
def test_a_second_relay_transmits_while_the_first_stands_still(tmp_path: Path, last: int) -> None:
    rig = Rig(tmp_path / "app.db")
    rig.write(1, 1, 1)

    class Stalled(Steps):
        """Behind one step, another relay does all the work."""

        def take(self, locked: bool = False) -> None:
            self.count += 1
            if not locked and self.count >= self.last:
                self.last = 1000
                finish(rig)
                rig.write(1)
                finish(rig)

    first = rig.relay(Stalled(last))
    first._work()
    assert isinstance(first._failure, RelayFenced)
    assert_once(rig)


def test_a_relay_is_stopped_and_started(rig: Rig) -> None:
    publisher: Any = FakePublisher(rig.log, Steps())
    with OutboxRelay(rig.connect, lambda: publisher, rig.outbox, poll_s=60) as relay:
        for _ in range(3):
            relay.start()
            relay.start()
            rig.write(1)
            relay.wake()
            until(lambda: rig.rows() == [])
            until(lambda: relay.status().waiting == 0)
            assert relay.status().state is RelayState.TRANSMITTING
            assert relay.stop(10)
            assert relay.status().state is RelayState.STOPPED
    assert_once(rig)


def test_transmitted_rows_are_kept_on_demand(rig: Rig) -> None:
    rig.write(1, 1, 1, 1)
    finish(rig, keep=2)
    assert [number for (number,) in rig.rows()] == [3, 4]
    rig.write(1)
    finish(rig, keep=1)
    assert [number for (number,) in rig.rows()] == [5]
    assert rig.log.payloads == rig.written
    assert rig.log.repeats == 0


def test_a_refused_transaction_holds_up_those_behind_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination that nothing has proven is tried alone, so nothing overtakes."""
    monkeypatch.setattr("lrq_ha.publisher.outbox.relay.RETRY_MIN_S", 0.01)
    rig.write(1)
    rig.write(1, to=("far",))
    rig.write(1)
    publisher: Any = FakePublisher(rig.log, Steps())
    with OutboxRelay(rig.connect, lambda: publisher, rig.outbox) as relay:
        relay.start()
        until(lambda: relay.status().state is RelayState.REFUSED)
        assert "transaction 2 was refused" in relay.status().problem
        assert "destination 'far' is not known" in relay.status().problem
        assert rig.log.payloads == [b"0"]
        rig.log.sites = {"west", "far"}
        until(lambda: rig.rows() == [])
        until(lambda: relay.status().state is RelayState.TRANSMITTING)
    assert_once(rig)


def test_the_database_fails_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrq_ha.publisher.outbox.relay.RETRY_MIN_S", 0.01)
    fails, publisher = [True], FakePublisher(rig.log, Steps())

    def connect() -> sqlite3.Connection:
        if fails:
            raise sqlite3.OperationalError("the disk is away")
        return rig.connect()

    given: Any = publisher
    with OutboxRelay(connect, lambda: given, rig.outbox) as relay:
        relay.start()
        until(lambda: relay.status().state is RelayState.WAITING)
        assert relay.status().problem == "OperationalError: the disk is away"
        rig.write(1)
        fails.clear()
        until(lambda: relay.status().state is RelayState.TRANSMITTING)
        until(lambda: rig.rows() == [])
    assert_once(rig)


def test_no_node_takes_the_publisher_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrq_ha.publisher.outbox.relay.RETRY_MIN_S", 0.01)
    errors: list[LrqError] = [NoPrimary("lrq", {"h:1": "refused"}), PublisherClosed("gone")]

    def open_publisher() -> Any:
        if errors:
            raise errors.pop()
        return FakePublisher(rig.log, Steps())

    rig.write(1)
    with OutboxRelay(rig.connect, open_publisher, rig.outbox) as relay:
        relay.start()
        until(lambda: rig.rows() == [])
    assert_once(rig)


def test_a_relay_stops_while_no_confirm_comes(rig: Rig) -> None:
    rig.write(1)
    with unconnected() as publisher:
        relay = OutboxRelay(rig.connect, lambda: publisher, rig.outbox)
        relay.start()
        until(lambda: relay.status().state is RelayState.WAITING)
        assert "No node takes publishes" in relay.status().problem
        assert relay.status().waiting == 1
        assert relay.stop(30)
    finish(rig)
    assert_once(rig)


def test_a_database_that_was_restored_is_noticed_before_anything_is_sent(rig: Rig) -> None:
    """Its next numbers would be taken for repeats, and the transactions would be lost without a word."""
    rig.write(1)
    finish(rig)
    backup = rig.path.read_bytes()
    rig.write(1, 1)
    finish(rig)
    rig.path.write_bytes(backup)
    rig.write(1, 1, 1)
    for _ in range(2):  # the second start notices, too
        relay = rig.relay()
        with pytest.raises(OutboxRestored, match=r"call Outbox\.renew") as failure:
            relay.run()
    assert (failure.value.known, failure.value.sent) == (3, 1)
    connection = rig.connect()
    rig.outbox.renew(connection.cursor())
    connection.commit()
    finish(rig)
    assert rig.rows() == []
    assert rig.log.payloads == rig.written[:3] + rig.written[3:]


def test_a_database_that_was_restored_under_a_relay_is_noticed(rig: Rig) -> None:
    rig.write(1)
    relay = rig.relay()
    backups: list[bytes] = []

    def idle() -> None:
        if not backups:
            backups.append(rig.path.read_bytes())
            rig.write(1)
        else:
            relay._awake = Idle(lambda: None)
            rig.path.write_bytes(backups[0])

    relay._awake = Idle(idle)
    relay._work()
    assert isinstance(relay._failure, OutboxRestored)


def test_a_relay_that_runs_is_told_of_a_renewal(rig: Rig) -> None:
    relay = rig.relay()
    relay._awake = threading.Event()
    relay.start()
    until(lambda: relay.status().state is RelayState.TRANSMITTING)
    connection = rig.connect()
    rig.outbox.renew(connection.cursor())
    connection.commit()
    with pytest.raises(RelayFenced):
        relay.run()


def test_an_outbox_that_was_not_created(rig: Rig) -> None:
    connection = rig.connect()
    connection.execute("DELETE FROM lrq_outbox_counter")
    connection.commit()
    relay = rig.relay()
    with pytest.raises(NoOutbox):
        relay.run()
    connection.execute("DELETE FROM lrq_outbox_relay")
    connection.commit()
    with pytest.raises(NoOutbox):
        relay.run()
    assert relay.stop()


def test_an_answer_that_is_lost_does_not_stop_a_relay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrq_ha.publisher.outbox.relay.RETRY_MIN_S", 0.01)
    lost = iter([False, True, False, True, False])

    class LosesAnswers(sqlite3.Connection):
        def commit(self) -> None:
            wrote = self.in_transaction
            super().commit()
            if wrote and next(lost, False):
                raise sqlite3.OperationalError("the connection is lost")

    publisher: Any = FakePublisher(rig.log, Steps())
    rig.write(1, 1)
    with OutboxRelay(lambda: rig.connect(factory=LosesAnswers), lambda: publisher, rig.outbox) as relay:
        relay.start()
        until(lambda: rig.rows() == [])
    assert_once(rig)


@pytest.mark.parametrize("options", [{"keep": -1}, {"poll_s": 0}])
def test_bad_options(rig: Rig, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        rig.relay(**options)


def test_a_batch_has_bounds() -> None:
    assert find_end([]) == 0
    assert find_end([(4, 1), (5, 1)]) == 5
    assert find_end([(n, 0) for n in range(1, 2000)]) == BATCH_TRANSACTIONS_MAX
    assert find_end([(1, BATCH_BYTES_MAX + 1), (2, 1)]) == 1, "a large one goes alone"
    assert find_end([(1, BATCH_BYTES_MAX - 1), (3, 1), (4, 1)]) == 3


def stored(number: int, *destinations: str) -> Stored:
    return Stored(number, LogEntries(((b"x", destinations),)))


def test_a_destination_that_is_not_proven_is_sent_to_alone() -> None:
    batch = [stored(1, "a"), stored(2, "a"), stored(3, "a", "b"), stored(4, "a"), stored(5, "b"), stored(6, "c")]
    proven: set[str] = set()
    runs = []
    for run in split_batch(batch, proven):
        runs.append([each.number for each in run])
        proven |= {site for each in run for site in each.destinations}
    assert runs == [[1], [2], [3], [4, 5], [6]]


def test_entries_are_grouped_by_their_number() -> None:
    found = group_entries([(1, b"a", ["w"]), (1, b"b", ["w", "s"]), (3, b"c", ["s"])])
    assert [(each.number, each.entries.entries) for each in found] == [
        (1, ((b"a", ("w",)), (b"b", ("w", "s")))),
        (3, ((b"c", ("s",)),)),
    ]


def test_each_state_with_each() -> None:
    for old in RelayState:
        for new in RelayState:
            if new in TRANSITIONS[old]:
                require_legal(old, new)
            else:
                with pytest.raises(IllegalEvent, match=f"from {old.value} to {new.value}"):
                    require_legal(old, new)


# ---- the publisher's part


def test_a_window_with_numbers_of_the_caller() -> None:
    window = NumberedWindow[str]("p", 10, 1000, sent=7)
    window.learn(7)
    for number in (6, 7, 8):
        window.add(1, f"{number}", number)
    assert [window.id_of(entry) for entry in window.take(1 << 20)] == ["p/6", "p/7", "p/8"]
    window.returned(7, 312, "no")
    errors = [each.error for each in window.acked(3, True)]
    assert isinstance(errors[1], NackedError)
    assert (errors[0], errors[2]) == (None, None)
    window.add(1, "again", 7)
    assert [window.id_of(entry) for entry in window.take(1 << 20)] == ["p/7"]
    window.learn(8)
    with pytest.raises(FencedError, match="the server knows sequence 9, this process has sent none above 8"):
        window.learn(9)
    window.expect(9)
    window.learn(9)


def test_a_number_that_is_on_its_way_is_not_sent_twice() -> None:
    with unconnected() as publisher:
        producer = publisher.open_producer("outbox-1", 5)
        assert publisher.open_producer("outbox-1", 6) is producer
        entries = LogEntries.checked([(b"x", ["west"])])
        first, second = producer.transmit(3, entries), producer.transmit(4, entries)
        assert (first.replication_id, second.replication_id) == ("outbox-1/3", "outbox-1/4")
        assert producer.transmit(3, entries) is first
        assert len(producer.window) == 2
        window = producer.window
        window.take(1 << 20)
        publisher._settle(lambda: window.acked(1, False))
        assert first.done
        again = producer.transmit(3, entries)
        assert again is not first
        assert len(producer.window) == 2
        with pytest.raises(InvalidArgument, match="Numbers begin with 1"):
            producer.transmit(0, entries)
        with pytest.raises(InvalidArgument, match="producer is"):
            publisher.open_producer("a b", 0)


def test_numbers_that_were_never_sent_end_this_producer_only() -> None:
    with unconnected() as publisher:
        producer = publisher.open_producer("outbox-1", 5)
        entries = LogEntries.checked([(b"x", ["west"])])
        confirm = producer.transmit(5, entries)
        publisher._links[producer.lane]._learned(producer.window, 9)
        assert isinstance(confirm.error, FencedError)
        assert producer.failure is confirm.error
        with pytest.raises(FencedError):
            producer.transmit(6, entries)
        publisher.transmit_log_entry_message(b"x", ["west"])
        assert publisher.open_producer("outbox-1", 9) is not producer
    with pytest.raises(PublisherClosed):
        publisher.open_producer("outbox-2", 0)


def test_a_log_with_its_own_numbers_is_a_log(tmp_path: Path) -> None:
    log = Log()
    entries = LogEntries.checked([(b"x", ["west"])])
    assert log.take("p", 1, entries) is None
    assert log.take("p", 1, entries) is None
    assert (log.payloads, log.repeats) == ([b"x"], 1)
