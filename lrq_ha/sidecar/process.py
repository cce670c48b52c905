"""The process of one sidecar: door and HTTP for its whole life, one incarnation after the other behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
from typing import Any

import uvloop

from broker_plugin.door import Door
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.events import PromoteRequest, RemoveRequest

from .config import Config
from .http import HttpServer
from .incarnation import Incarnation

log = logging.getLogger("lrq_ha.process")

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0


class Process:
    """See above.

    Args:
        config: The node's configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.door = Door(config)
        self.incarnation: Incarnation | None = None
        self.problem = "starting"
        self._ids = {name: node for node, name in config.names.items()}
        self._http = HttpServer(config.http.listen, self)

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT; returns the exit status."""
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await self.door.start()
        await self._http.start()
        node = self.config.node
        ready = {"node": node.name, "role": "starting", "door": self.config.door.listen, "http": self.config.http.listen, "pid": os.getpid()}
        print("READY", json.dumps(ready), flush=True)
        lives = asyncio.create_task(self._lives())
        await stopped.wait()
        log.info("stopping")
        lives.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lives
        await self.door.close()
        await self._http.close()
        return 0

    async def _lives(self) -> None:
        pause = PAUSE_FIRST_S
        shut_out = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                self.incarnation = incarnation = Incarnation(self.config, self.door, shut_out)
                self.problem = await incarnation.run()
                log.warning("this incarnation is over: %s", self.problem)
            except LrqError as error:
                if str(error) != self.problem:
                    log.error("%s", error)
                self.problem = str(error)
            except Exception as error:
                log.exception("this incarnation failed")
                self.problem = f"an internal error, see the log: {error!r}"
            finally:
                self.incarnation = None
            shut_out = incarnation.streams.shut_out
            if asyncio.get_running_loop().time() - began > 5:
                pause = PAUSE_FIRST_S
            await asyncio.sleep(pause)
            pause = min(PAUSE_MAX_S, pause * 2)

    # ---- http.Source -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What GET /status tells."""
        found: dict[str, Any] = {"node": self.config.node.name, "group": self.config.node.group}
        with open("/proc/self/statm", encoding="ascii") as file:
            found["rss_bytes"] = int(file.read().split()[1]) * resource.getpagesize()
        found["connections"] = len(self.door.relays)
        found["counters"] = dict(self.door.counters)
        if self.incarnation is not None and self.incarnation.ready:
            return found | self.incarnation.status()
        return found | {"role": "standalone", "reason": self.problem, "primary": None, "in_set": False}

    async def promote(self, down: list[str], force: bool, dry_run: bool) -> tuple[bool, str]:
        """The operator's word."""
        unknown = [name for name in down if name not in self._ids]
        if unknown:
            return False, f"{', '.join(unknown)}: no such node in group {self.config.node.group}; known: {', '.join(sorted(self._ids))}"
        if self.incarnation is None:
            return False, f"{self.config.node.name} is not running: {self.problem}"
        return await self.incarnation.ask(PromoteRequest(frozenset(self._ids[name] for name in down), force, dry_run))

    async def remove(self, node: str, dry_run: bool) -> tuple[bool, str]:
        """Takes a node out of the set."""
        if node not in self._ids:
            return False, f"{node}: no such node in group {self.config.node.group}; known: {', '.join(sorted(self._ids))}"
        if self.incarnation is None:
            return False, f"{self.config.node.name} is not running: {self.problem}"
        if dry_run:
            return True, f"would take {node} out of the set; it must not be promoted before it has rejoined"
        return await self.incarnation.ask(RemoveRequest(self._ids[node]))

    def queues(self) -> list[str]:
        """Receive queues on this node."""
        return self.incarnation.queues() if self.incarnation is not None else []


def run(config: Config) -> int:
    """Runs a sidecar in the foreground; returns the exit status. Raises LrqError if an address is in use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Process(config).run())
