"""When a backup stops taking the log and goes on, whom it still hears, and that it says so to nobody by hanging up."""

from __future__ import annotations

import asyncio
import logging
import socket
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest
from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.door.peer import PUSH_CHANNEL, PeerConnection
from broker_plugin.door.server import Door
from broker_plugin.log import codec
from broker_plugin.log.replica import Entry
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Heartbeat, Lead, Opened, OwnConfirmed, PeerConnected, PeerMessage, Prepare, Send, WriteFence
from lrq_ha.replication.log import LogState
from lrq_ha.replication.positions import epoch_number
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.peers.peer_server import FULL_LIMITS

HEARTBEAT_S = 2
LIMIT = 1 << 20
DELAYED = 2_000  # entries


class Socket:
    """A transport that only tells what was done to it."""

    def __init__(self) -> None:
        self.reads = True
        self.aborted = False
        self.written = b""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, _name: str) -> None: ...


class Backup:
    """Node 1 of three, which follows primary 2 and is pushed the log; `end` is where that ends."""

    def __init__(self) -> None:
        values = tomllib.loads(configuration.sample())
        values["replication"]["apply_lag_bytes_max"] = LIMIT
        values["peers"].append({"name": "e3", "id": 3, "door": "amqp://lrq:SECRET@192.0.2.3:5673", "http": "http://192.0.2.3:8080"})
        config = configuration.Config.model_validate(values)
        self.door = Door(config.door_settings)
        self.incarnation = incarnation = Incarnation(config, self.door)
        incarnation._effects[WriteFence] = lambda _effect: None
        self.core = incarnation._core
        self.receiving = incarnation._receiving
        self.replica = self.core.replica
        self.applier = incarnation._applier
        self.primary = self.connect()
        self.end = 0
        self.core.ready = True
        self.core.feed(Opened(0, False))
        self.core.feed(PeerConnected(2))
        self.follow()

    def connect(self, peer: int = 2) -> Socket:
        """A node, the primary if none is named, connects, anew."""
        socket = Socket()
        self.peer_end = PeerConnection(self.door, self.receiving, cast(asyncio.Transport, socket), peer, heartbeat_s=HEARTBEAT_S)
        self.receiving._ends[peer] = self.peer_end
        return socket

    def follow(self) -> None:
        """The primary calls, and the own stream takes the promise."""
        self.core.feed(PeerMessage(2, Lead(epoch_number(1, 2), True, LogState())))
        self.core.feed(OwnConfirmed(1))
        assert self.core.node.following
        self.core.node.log.in_set = True

    def pushed(self, size: int, *, safe: bool = True, run: pb.Run | None = None) -> None:
        """What a push leads to. Without `run`, nothing is to be done for it at the broker."""
        self.end += 1
        self.replica.to_apply.append(Entry(self.end, 1, run or pb.Run(), size, 0.0))
        self.replica.to_apply_bytes += size
        if safe:
            self.replica.progress.safe = self.end
        self.core.node.log.end = self.end
        self.receiving._consider_pausing()

    def applies(self) -> None:
        self.replica.to_apply_bytes -= self.replica.to_apply.popleft().size
        self.receiving.applied()


class Hears(asyncio.Protocol):
    """What comes from the primary, as the door would hand it on."""

    def __init__(self, backup: Backup) -> None:
        self._end = backup.peer_end

    def data_received(self, data: bytes) -> None:
        self._end.client_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._end.client_lost()
        self._end.host.peer_gone(self._end)


class Slow:
    """A view stream to which nothing can be written until `goes_on`."""

    def __init__(self) -> None:
        self.met = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def append(self, queue: str, body: bytes, sequence: int, epoch: int) -> None:
        self.met.set()
        await self.goes_on.wait()


def run(check: Callable[[Backup], None]) -> None:
    async def go() -> None:
        check(Backup())

    asyncio.run(go())


def live(check: Callable[[Backup, Slow], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `check` while the backup's applier and ticks run."""

    async def go() -> None:
        backup, slow = Backup(), Slow()
        monkeypatch.setattr(backup.applier, "_views", slow)
        monkeypatch.setattr(backup.core.node.log, "epoch_at", lambda _sequence: epoch_number(1, 2))
        life = backup.incarnation._life
        try:
            async with asyncio.timeout(60):
                await check(backup, slow)
            assert not life.over, life.reason
        finally:
            await life.stop()

    asyncio.run(go())


def start(backup: Backup) -> None:
    backup.incarnation._life.spawn(backup.incarnation._ticks())
    backup.incarnation._life.spawn(backup.applier.run())


async def until_it_reads(socket: Socket) -> None:
    while not socket.reads:
        await asyncio.sleep(0.01)


VIEW = pb.Run(transmission=pb.Transmission(queue="LRQ_Send_LogEntries"))


def test_more_than_it_may_hold_is_not_taken() -> None:
    def check(backup: Backup) -> None:
        backup.pushed(LIMIT)
        assert backup.primary.reads
        backup.pushed(LIMIT // 4)
        assert not backup.primary.reads
        backup.applies()
        assert backup.primary.reads

    run(check)


def test_it_says_that_it_slows_publishers_and_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody told which node it was: publishers became slow."""
    slows = "its queues are {} MiB behind the log: it takes no more of it for the time being, which slows publishers"
    now = 1_000.0
    monkeypatch.setattr("lrq_ha.sidecar.peers.peer_server.time.monotonic", lambda: now)

    def check(backup: Backup) -> None:
        nonlocal now

        def told() -> str:
            return str(backup.incarnation.status.tell()["reason"])

        backup.pushed(LIMIT)
        assert "slows publishers" not in told()
        backup.pushed(LIMIT)
        assert told().endswith(slows.format(2))
        assert [record.getMessage() for record in caplog.records if "slows" in record.getMessage()] == [slows.format(2)]
        caplog.clear()
        now += 600.0
        backup.receiving.applied()
        assert told().endswith(slows.format(2)), "as long as it does"
        for _ in range(3):
            backup.applies()
            backup.applies()
            assert backup.primary.reads
            assert told().endswith(slows.format(1)), "it may do it again at once"
            backup.pushed(LIMIT)
            backup.pushed(LIMIT)
        assert len([record for record in caplog.records if "slows" in record.getMessage()]) == 1, "said again after a while, and not each time"
        backup.applies()
        backup.applies()
        now += 10.0
        assert "slows publishers" not in told()

    with caplog.at_level(logging.WARNING, "lrq_ha.node"):
        run(check)


def test_it_goes_on_before_its_primary_leaves_it_behind() -> None:
    def check(backup: Backup) -> None:
        for _ in range(33):
            backup.pushed(LIMIT // 32)
        assert not backup.primary.reads
        for _ in range(3):
            backup.applies()
        assert backup.primary.reads

    run(check)


def test_who_is_not_listened_to_is_not_silent() -> None:
    """The connection was ended after two heartbeats, and its successor was not held back: what waited grew without a limit."""

    def check(backup: Backup) -> None:
        backup.pushed(2 * LIMIT)
        for second in range(60):
            backup.peer_end.tick(float(second))
        assert not backup.primary.aborted
        assert backup.primary.written, "heartbeats go out"
        backup.door._now = 60.0
        backup.applies()
        backup.peer_end.tick(61.0)
        assert not backup.primary.aborted
        backup.peer_end.tick(66.0)
        assert backup.primary.aborted, "and now it is"

    run(check)


def test_a_primary_that_connects_meanwhile_is_held_back_too() -> None:
    def check(backup: Backup) -> None:
        backup.pushed(2 * LIMIT)
        successor = backup.connect()
        assert successor.reads, "it has to say who it is"
        backup.pushed(1)
        assert not successor.reads
        backup.applies()
        assert successor.reads

    run(check)


def test_what_full_queues_refuse_holds_it_back_later() -> None:
    """What makes room in them comes with the log. But it was taken without any limit."""

    def check(backup: Backup) -> None:
        backup.replica.progress.parked.add(1)
        backup.replica.progress.parked_bytes = LIMIT
        backup.pushed(2 * LIMIT)
        assert backup.primary.reads
        backup.pushed(FULL_LIMITS * LIMIT)
        assert not backup.primary.reads
        backup.applies()
        backup.applies()
        assert backup.primary.reads
        backup.replica.progress.parked_bytes = 2 * FULL_LIMITS * LIMIT
        backup.pushed(1)
        backup.applies()
        assert not backup.primary.reads, "also where it waits for room only"
        backup.replica.progress.parked_bytes = 0
        backup.receiving.applied()
        assert backup.primary.reads

    run(check)


def test_what_waits_for_more_of_the_log_does_not_hold_it_back() -> None:
    def check(backup: Backup) -> None:
        backup.pushed(2 * LIMIT, safe=False)
        assert backup.primary.reads, "what is safe, only the primary can say"
        backup.replica.progress.safe = backup.end
        backup.pushed(1)
        assert not backup.primary.reads

    run(check)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, to be set."""
    now = [1_000.0]
    monkeypatch.setattr("lrq_ha.sidecar.peers.peer_server.time.monotonic", lambda: now[0])
    return now


def learns(backup: Backup, clock: list[float], per_s: int) -> None:
    """A second goes by in which there is too much to write all the time, and so much is written, and comes."""
    for _ in range(10):
        for _ in range(per_s // 10):
            backup.pushed(10)
            backup.replica.to_apply_bytes -= backup.replica.to_apply.popleft().size
        clock[0] += 0.1
        backup.receiving.applied()


def test_more_than_a_promotion_can_write_in_time_is_not_taken(clock: list[float]) -> None:
    """However little it is: a promotion took seconds, after a minute in which its broker had not quite followed."""

    def check(backup: Backup) -> None:
        for _ in range(DELAYED + 10):
            backup.pushed(10)
        learns(backup, clock, 8_000)
        assert backup.primary.reads
        for _ in range(1_985):
            backup.pushed(10)
        assert backup.primary.reads
        for _ in range(20):
            backup.pushed(10)
        assert not backup.primary.reads
        said = str(backup.incarnation.status.tell()["reason"])
        assert "entries behind the log: it takes no more of it for the time being, which slows publishers" in said
        for _ in range(200):
            backup.applies()
        assert backup.primary.reads

    run(check)


def test_who_is_not_in_the_set_is_held_back_by_what_it_can_hold_alone(clock: list[float]) -> None:
    """No confirm waits for it: it came back later, and where the log grew as fast as it wrote, never."""

    def check(backup: Backup) -> None:
        backup.core.node.log.in_set = False
        for _ in range(DELAYED + 10):
            backup.pushed(10)
        learns(backup, clock, 8_000)
        for _ in range(20_000):
            backup.pushed(10)
        assert backup.primary.reads
        backup.pushed(LIMIT)
        assert not backup.primary.reads
        assert str(backup.incarnation.status.tell()["reason"]).endswith("it takes no more of it for the time being")

    run(check)


def test_what_waits_for_a_sweeper_holds_back_nobody(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a purge or a declaration, for two minutes at most: that is not its broker's pace."""
    monkeypatch.setattr("broker_plugin.apply.applier.time.monotonic", lambda: clock[0])

    def check(backup: Backup) -> None:
        for _ in range(2 * DELAYED):
            backup.pushed(10)
        with backup.applier._waits.counted():
            clock[0] += 0.1
            assert backup.applier.overdue() == DELAYED
            clock[0] += 0.2
            assert backup.applier.overdue() == 0
            assert backup.applier.waited_s() == pytest.approx(0.3)

    run(check)


@pytest.mark.parametrize(
    ("run_of", "waits"),
    [
        (pb.Run(purge=pb.Purge(vhost="/", queue="q")), ["wait_moved", "write_record"]),
        (
            pb.Run(topology=pb.Topology(vhost="/", method=encode.method_frame(1, commands.Queue.Declare(queue="q"))[7:-1])),
            ["wait_moved", "settle_record", "settle_deletion"],
        ),
        (
            pb.Run(topology=pb.Topology(vhost="/", method=encode.method_frame(1, commands.Queue.Delete(queue="q"))[7:-1])),
            ["wait_moved", "settle_record", "forget_parked"],
        ),
    ],
    ids=["purge", "declaration", "deletion"],
)
def test_what_is_waited_for(run_of: pb.Run, waits: list[str], clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweeper and a record are; the broker's confirms of what was published before are its pace, which came out many times too high."""
    monkeypatch.setattr("broker_plugin.apply.applier.time.monotonic", lambda: clock[0])

    def check(backup: Backup) -> None:
        applier = backup.applier
        barrier = applier._replica.barrier
        declarer = SimpleNamespace(execute=AsyncMock(), purge=AsyncMock())
        lane = SimpleNamespace(settled=False, open_messages=[1], parked=SimpleNamespace(places={}), declarer=declarer)

        async def takes_a_moment(*_: object) -> None:
            clock[0] += 1.0

        for part, name in ((applier._waits, "until"), (applier._rejected, "wait_moved"), (applier._rejected, "forget_parked")):
            monkeypatch.setattr(part, name, takes_a_moment)
        for name in ("settle_record", "settle_deletion", "write_record"):
            monkeypatch.setattr(barrier, name, takes_a_moment)
        monkeypatch.setattr(applier, "_lane", AsyncMock(return_value=lane))
        monkeypatch.setattr(applier, "_is_superseded", lambda *_: False)
        applying = applier._apply(Entry(1, 1, run_of, 10, 0.0))
        with pytest.raises(StopIteration):
            applying.send(None)
        assert applier.waited_s() == len(waits)
        assert clock[0] > len(waits), "and its broker took its time, too"

    run(check)


def test_what_waits_for_its_delay_is_not_behind(clock: list[float]) -> None:
    def check(backup: Backup) -> None:
        for _ in range(DELAYED):
            backup.pushed(10)
        assert backup.applier.overdue() == 0
        backup.pushed(10)
        assert backup.applier.overdue() == 1
        backup.pushed(10, safe=False)
        assert backup.applier.overdue() == 1, "it cannot be written yet"
        backup.replica.applying = 100
        backup.replica.to_apply = deque([*backup.replica.to_apply][100:])
        assert backup.applier.overdue() == 0

    run(check)


def test_large_messages_wait_for_no_delay(clock: list[float]) -> None:
    """Of 64 KiB, 2,000 are more than a second's work."""

    def check(backup: Backup) -> None:
        delayed = backup.incarnation._config.replication.apply_delay_bytes_max
        backup.replica.to_apply.extend(Entry(n, 1, pb.Run(), delayed // 100, 0.0) for n in range(1, 101))
        backup.replica.to_apply_bytes = delayed
        backup.replica.progress.safe = 200
        assert backup.applier.overdue() == 0
        assert not backup.applier._too_much_waits()
        backup.replica.to_apply.extend(Entry(n, 1, pb.Run(), delayed // 100, 0.0) for n in range(101, 201))
        backup.replica.to_apply_bytes *= 2
        assert backup.applier.overdue() == 100
        assert backup.applier._too_much_waits()

    run(check)


# ---- by itself, as its applier and its ticks go on -----------------------------------------------------------------------


def test_it_goes_on_while_its_applier_is_still_at_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked before all that is safe was applied: with a large backlog, its primary left it behind meanwhile."""

    async def check(backup: Backup, slow: Slow) -> None:
        for _ in range(3):
            backup.pushed(LIMIT // 32)
        backup.pushed(LIMIT // 2, run=VIEW)
        backup.pushed(LIMIT // 2)
        assert not backup.primary.reads
        start(backup)
        await slow.met.wait()
        assert backup.replica.to_apply, "it has not applied all of it"
        await until_it_reads(backup.primary)
        assert not slow.goes_on.is_set()

    live(check, monkeypatch)


def test_what_came_meanwhile_and_is_not_safe_does_not_stop_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much had come as was applied. What was left waited for what its primary says is safe, and that was not read."""

    async def check(backup: Backup, slow: Slow) -> None:
        backup.pushed(LIMIT // 2, run=VIEW)
        start(backup)
        await slow.met.wait()
        backup.pushed(2 * LIMIT)
        assert not backup.primary.reads
        backup.pushed(2 * LIMIT, safe=False)
        assert not backup.primary.reads
        slow.goes_on.set()
        await until_it_reads(backup.primary)
        assert backup.replica.to_apply_bytes == 2 * LIMIT

    live(check, monkeypatch)


def test_a_primary_that_is_killed_while_it_is_not_read_is_not_heard_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end was noticed with the next read: until then nobody could be promoted over it, as it seemed to be alive."""

    async def check(backup: Backup, _slow: Slow) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: Hears(backup), *server.getsockname())
            primary, _ = server.accept()
        backup.peer_end.transport = transport
        start(backup)
        backup.pushed(LIMIT, run=VIEW)
        backup.pushed(LIMIT)
        assert not transport.is_reading()
        primary.sendall(frames.HEARTBEAT_FRAME * 1_000)
        await asyncio.sleep(0.2)
        assert backup.receiving.hears(2)
        primary.close()
        while backup.receiving.hears(2):
            await asyncio.sleep(0.01)
        assert backup.replica.to_apply_bytes >= LIMIT, "it is as far behind as it was"

    live(check, monkeypatch)


# ---- what arrives over a slow link ---------------------------------------------------------------------------------------


def test_the_primary_is_told_how_much_of_a_large_batch_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a backup over a slow link made no progress for as long as the batch takes, and was taken out."""
    whole = encode.publish_method(PUSH_CHANNEL, "", "log") + b"".join(
        encode.content(PUSH_CHANNEL, content_header.header_payload(1 << 20), bytes(1 << 20), 1 << 17)
    )

    async def check(backup: Backup, _slow: Slow) -> None:
        told: list[int] = []

        def send(effect: Send) -> None:
            if isinstance(effect.message, Heartbeat):
                told.append(effect.message.arriving)

        backup.incarnation._effects[Send] = send
        start(backup)
        backup.peer_end.client_data(whole[: 300 << 10])
        assert backup.receiving.arriving_bytes() in range(290 << 10, 301 << 10)
        while not told or not told[-1]:
            await asyncio.sleep(0.01)
        assert told[-1] == backup.receiving.arriving_bytes()
        backup.core.node._follower.stop()
        assert backup.receiving.arriving_bytes() == 0, "it follows nobody"

    live(check, monkeypatch)


# ---- whom it still hears -------------------------------------------------------------------------------------------------


def test_who_is_not_its_primary_is_heard() -> None:
    """With three nodes, no other could be promoted: what it asked was not read."""

    def check(backup: Backup) -> None:
        other = backup.connect(3)
        backup.pushed(2 * LIMIT)
        assert (backup.primary.reads, other.reads) == (False, True)
        backup.core.feed(PeerConnected(3))
        backup.receiving.control(backup.peer_end, codec.encode_control(3, "east", Prepare(epoch_number(2, 3))))
        backup.receiving.applied()
        assert backup.primary.reads, "it follows nobody: nothing can be pushed, and what a former primary asks is heard"

    run(check)


def test_a_primary_that_is_not_followed_yet_is_heard() -> None:
    """It has to call first."""

    def check(backup: Backup) -> None:
        backup.pushed(2 * LIMIT)
        backup.core.node._follower.connected_anew(2)
        successor = backup.connect()
        backup.receiving.applied()
        assert successor.reads
        backup.follow()
        backup.pushed(1)
        assert not successor.reads

    run(check)
