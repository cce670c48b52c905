"""The process of one sidecar: door and HTTP for its whole life, one incarnation after the other behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from broker_plugin.amqp.errors import AuthenticationFailed
from broker_plugin.door.server import Door
from lrq_ha import __version__
from lrq_ha.direct_http import PLAIN, HttpAccess
from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, Target, url_of_listener
from lrq_ha.replication.events import PauseRequest, PromoteRequest, RemoveRequest
from lrq_ha.replication.settings import id_of_unnamed

from .certificates import Expiries
from .config import Config
from .coordination import Coordination
from .counts import Counts
from .http.group_watch import GroupWatch
from .http.metrics import Metrics, Scrape
from .http.server import HttpServer
from .http.shared_answer import SharedAnswer
from .incarnation import Incarnation, Kept
from .open_files import allow_files
from .reload import ConfigFile

log = logging.getLogger("lrq_ha.process")

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0
#: However many pages look at this node, it asks the others, and etcd, no more often.
LOOK_INTERVAL_S = 0.5
_LET_IN_BEFORE = ". It had been let in before: RabbitMQ 4 loses sight of its users when its disk is full; then make room, and start it again"


class Process:
    """The process of one sidecar.

    Args:
        config: The node's configuration.
        file: Its file; None: there is none.
    """

    def __init__(self, config: Config, file: Path | None = None) -> None:
        self._file = ConfigFile(file, config)
        self.door = Door(config.door_settings, allow_files(config.door.connections_max))
        self.incarnation: Incarnation | None = None
        self.problem = "starting"
        self._stands_since = time.time()  # while no incarnation runs: end of the last one, or start of this process
        self._let_in = False  # the broker has taken user and password
        self._counts = Counts()
        self._kept = Kept(counts=self._counts)
        self._coordination = Coordination(config) if config.coordination else None
        self._ids = {name: node for node, name in config.names.items()}
        self._expiries = Expiries(config.own_certificates)
        self._group = SharedAnswer(GroupWatch(self._report, self._others).look, LOOK_INTERVAL_S)
        self._leaders = SharedAnswer(self._read_history, LOOK_INTERVAL_S)
        self._http = HttpServer(
            config.http.listen,
            self,
            metrics=Metrics(self.scrape),
            probes_listen=config.http.probes,
            tokens=config.tokens,
            tls=config.http_tls,
        )

    @property
    def config(self) -> Config:
        """The configuration that the sidecar runs with."""
        return self._file.config

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT; returns the exit status. SIGHUP: as `reload`."""
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        await self.door.start()
        await self._http.start()
        node = self.config.node
        ready = {"node": node.name, "role": "starting", "door": self.config.door.listen, "http": self.config.http.listen, "pid": os.getpid()}
        print("READY", json.dumps(ready), flush=True)
        lives = asyncio.create_task(self._lives())
        lives.add_done_callback(lambda _: stopped.set())  # it ends only on request, or by a fault of its own
        await stopped.wait()
        log.info("stopping")
        await self.door.stop()
        lives.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await lives
        finally:
            await self.door.close()
            await self._http.close()
            if self._coordination:
                await self._coordination.close()
        return 0

    def _reload(self) -> None:
        can_be_used, text = self._read_again()
        log.log(logging.INFO if can_be_used else logging.ERROR, "%s", text)

    def _read_again(self) -> tuple[bool, str]:
        self.door.reload(True)
        self._http.reload()
        found = self._file.look()
        self.door.take_limits(self.config.door)
        return found

    async def _lives(self) -> None:
        pause, counts = PAUSE_FIRST_S, self._counts
        while True:
            began = asyncio.get_running_loop().time()
            try:
                self.incarnation = incarnation = Incarnation(self.config, self.door, self._kept, self._coordination)
                self.problem = await incarnation.run()
                counts.incarnations["ended"] += 1
                self._stands_since = time.time()
                self._let_in = True
                log.warning("this incarnation is over: %s", self.problem)
            except LrqError as error:
                problem = f"{error}{_LET_IN_BEFORE if self._let_in and isinstance(error, AuthenticationFailed) else ''}"
                if problem != self.problem:
                    log.error("%s", problem)
                self.problem = problem
                counts.incarnations["refused"] += 1
            except Exception as error:
                log.exception("this incarnation failed")
                self.problem = f"an internal error, see the log: {error!r}"
                counts.incarnations["failed"] += 1
            finally:
                self.incarnation = None
            self._kept = incarnation.kept
            if self._coordination:
                await self._coordination.incarnation_over(at_once=bool(self._kept.defers_to) or self._kept.paused)
            if asyncio.get_running_loop().time() - began > 5 or self._kept.defers_to:
                pause = PAUSE_FIRST_S
            await asyncio.sleep(pause)
            pause = min(PAUSE_MAX_S, pause * 2)

    # ---- http.Source -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The content of GET /status."""
        node = self.config.node
        found: dict[str, Any] = {"node": node.name, "id": node.id, "group": node.group, "software": __version__, "time": time.time()}
        found["files_max"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found["pending_restart"] = self._file.pending
        found["certificates"] = self._expiries.read()
        found["shared"] = dict(self.config.settings().shared)
        with open("/proc/self/statm", encoding="ascii") as file:
            found["rss_bytes"] = int(file.read().split()[1]) * resource.getpagesize()
        found["connections"] = len(self.door.sessions)
        found["relayed"] = len(self.door.relays)
        found["sockets"] = self.door.connections
        found["counters"] = dict(self.door.counters)
        found["interceptors"] = self.door.interceptors.status()
        if self._coordination:
            found["coordination"] = self._coordination.tell()
        if self.incarnation is not None and self.incarnation.ready:
            return found | self.incarnation.status.tell()
        standing = {"role": "standalone", "reason": self._why_not(), "primary": None, "in_set": False, "paused": self._kept.paused}
        return found | standing | {"since": self._stands_since}

    def scrape(self) -> Scrape:
        """The values of GET /metrics."""
        channels = [channel for session in self.door.sessions for channel in session.channels.values()]
        return Scrape(
            status=self.status(),
            counts=self._counts,
            peers=[peer.name for peer in self.config.peers],
            log_bytes_max=self.config.replication.log_bytes_max,
            expiries=self._expiries.read(),
            channels=len(channels),
            consumers=sum(len(channel.consumers) for channel in channels),
            unfinished_bytes=self.door.unfinished.bytes,
            client_bytes=self.door.waiting_bytes,
        )

    async def look_at_group(self) -> list[Report]:
        """The status of each node of the group, this one first."""
        return await self._group.read()

    def _report(self) -> Report:
        node, http = self.config.node, self.config.http
        return Report(Target(node.name, node.group, url_of_listener(http.listen, tls=bool(http.tls))), self.status())

    def _others(self) -> list[Target]:
        tls, group = self.config.client_tls, self.config.node.group
        access = HttpAccess(tls=tls.context) if tls else PLAIN
        return [Target(peer.name, group, peer.http.rstrip("/"), access=access) for peer in self.config.peers]

    async def history(self) -> list[dict[str, Any]]:
        """The leaders that etcd knows, the newest last."""
        return await self._leaders.read()

    async def _read_history(self) -> list[dict[str, Any]]:
        if self._coordination is None:
            raise LrqError('the history of leaders is kept with replication.coordination = "etcd" only')
        return await self._coordination.register.read_history()

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""
        return self.door.closed_because()

    async def promote(self, down: list[str], force: bool, without_etcd: bool, dry_run: bool) -> tuple[bool, str]:
        """Promotes this node."""
        nodes = frozenset(self._numbers(*down))
        return await self._running().orders.ask(PromoteRequest(nodes, force, dry_run, without_etcd))

    async def remove(self, node: str, dry_run: bool) -> tuple[bool, str]:
        """Takes a node out of the set; a node that is not configured any more is named by its id."""
        number = 0 if node in self._ids else id_of_unnamed(node)
        if not number:
            [number] = self._numbers(node)
        return await self._running().orders.ask(RemoveRequest(number, dry_run))

    async def switchover(self, node: str | None, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Hands over to a backup, in order."""
        [number] = [0] if node is None else self._numbers(node)
        if not dry_run:
            await self._running().definitions.look()  # what an operator has changed a moment ago
        return await self._running().orders.switchover(number, timeout_s, force=force, dry_run=dry_run)

    async def demote(self, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Steps down without a successor."""
        return await self._running().orders.demote(timeout_s, force=force, dry_run=dry_run)

    async def renew(self, timeout_s: float, force: bool, dead_letters_arrived: bool, dry_run: bool) -> tuple[bool, str]:
        """Publishes everything live again, so that a node may join."""
        return await self._running().renewals.renew(timeout_s, force=force, dead_letters_arrived=dead_letters_arrived, dry_run=dry_run)

    async def resync(
        self, client: str, sites: list[str], to_all: bool, source: str | None, reason: str, dry_run: bool
    ) -> tuple[bool, str]:
        """Demands full syncs of a client."""
        return self._running().full_syncs.resync(client, sites, to_all, source, reason, dry_run)

    async def definitions(self) -> dict[str, Any]:
        """The vhosts and users of this node's broker."""
        return await self._running().definitions.names()

    async def compare_definitions(self) -> list[dict[str, str]]:
        """The differences between this node's broker and the log."""
        return await self._running().definitions.compare()

    async def take_definitions(self, dry_run: bool) -> tuple[bool, str]:
        """Makes this node's broker as the log has it."""
        return await self._running().definitions.take(dry_run)

    async def reload(self) -> tuple[bool, str]:
        """Reads certificates and the configuration again, and tells what counts now and what after a restart."""
        return self._read_again()

    async def pause(self, paused: bool) -> tuple[bool, str]:
        """Stops or resumes automatic epochs."""
        return await self._running().orders.ask(PauseRequest(paused))

    async def reinit(self, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Deletes this node's data and lets it follow with an empty log."""
        return await self._running().orders.reinit(force=force, dry_run=dry_run)

    def tail(self) -> AsyncIterator[dict[str, Any]]:
        """The entries that this node refuses to drop while it is diverged."""
        return self._running().orders.tail()

    def _numbers(self, *node_names: str) -> list[int]:
        unknown = [name for name in node_names if name not in self._ids]
        if unknown:
            raise LrqError(f"{', '.join(unknown)}: no such node in group {self.config.node.group}; known: {', '.join(sorted(self._ids))}")
        return [self._ids[name] for name in node_names]

    def _why_not(self) -> str:
        """Why no incarnation is running."""
        return self.door.waits() or self.problem

    def _running(self) -> Incarnation:
        if self.incarnation is None or not self.incarnation.ready:
            raise LrqError(f"{self.config.node.name} is not running: {self._why_not()}", retriable=True)
        return self.incarnation

    def levels(self) -> list[dict[str, str]]:
        """How much of each queue of the log the other nodes get."""
        return self._running().status.levels()

    def queues(self) -> list[str]:
        """Receive queues on this node."""
        return self._running().status.queues()


def run(config: Config, file: Path) -> int:
    """Runs a sidecar in the foreground with the configuration of a file; returns the exit status. Raises LrqError if an address is in use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Process(config, file).run())
