"""When a backup stops taking the log, and that it says so to nobody by hanging up."""

from __future__ import annotations

import asyncio
import tomllib
from typing import Any, cast

from broker_plugin.door import Door
from broker_plugin.peers import PeerEnd
from broker_plugin.replica import Entry
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.core import Core
from lrq_ha.sidecar.life import Life
from lrq_ha.sidecar.receiving import FULL_LIMITS, Receiving
from lrq_ha.sidecar.turning_away import TurningAway

HEARTBEAT_S = 2
LIMIT = 1 << 20


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


class Backup:
    """A node that is pushed the log; `end` is its primary's connection."""

    def __init__(self) -> None:
        values = tomllib.loads(configuration.sample())
        values["replication"]["apply_lag_bytes_max"] = LIMIT
        config = configuration.Config.model_validate(values)
        self.door = Door(config)
        core = Core(Node(config.settings()), Levels(config.replication.replicate), Life(), lambda _effect: None)
        self.receiving = Receiving(config, core, TurningAway(self.door, core))
        self.replica = core.replica
        self.primary = self.connect()
        self.end = 0

    def connect(self) -> Socket:
        """The primary connects, anew."""
        socket = Socket()
        self.peer_end = PeerEnd(self.door, self.receiving, cast(asyncio.Transport, socket), 2, heartbeat_s=HEARTBEAT_S)
        self.receiving._ends[2] = self.peer_end
        return socket

    def pushed(self, size: int, *, safe: bool = True) -> None:
        """What a push leads to."""
        self.end += 1
        self.replica.to_apply.append(Entry(self.end, 1, pb.Run(), size, 0.0))
        self.replica.to_apply_bytes += size
        if safe:
            self.replica.progress.safe = self.end
        self.receiving._consider_pausing()

    def applies(self) -> None:
        self.replica.to_apply_bytes -= self.replica.to_apply.popleft().size
        self.receiving.applied()


def run(check: Any) -> None:
    async def go() -> None:
        check(Backup())

    asyncio.run(go())


def test_more_than_it_may_hold_is_not_taken() -> None:
    def check(backup: Backup) -> None:
        backup.pushed(LIMIT)
        assert backup.primary.reads
        backup.pushed(LIMIT // 4)
        assert not backup.primary.reads
        backup.applies()
        assert backup.primary.reads

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
