"""The link to one site: a connection to the door of its primary (the other nodes refuse), kept up, with the sessions that use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from broker_plugin.amqp.connection import Address, Connection
from lrq_ha.errors import LrqError
from lrq_ha.routing.names import DEMANDS_QUESTION, SINK_QUESTION
from lrq_ha.routing.route import Limits

from .session_driver import SessionDriver

log = logging.getLogger("lrq_ha.sites")

HEARTBEAT_S = 5
CONNECT_TIMEOUT_S = 5.0
BACKOFF_FIRST_S = 0.1  # after all doors of a site were tried; doubles each time
BACKOFF_MAX_S = 2.0
DEMANDS_S = 1.0  # between two questions whether the site demands full syncs
STEADY_S = 10.0  # more than CONNECT_TIMEOUT_S; a link that stood that long resets the back-off


class SiteLink:
    """The link to one site, and its sessions by client name."""

    def __init__(self, remote_id: str, addresses: list[Address], limits: Limits) -> None:
        self.remote_id = remote_id
        self.limits = limits
        self.drivers: dict[str, SessionDriver] = {}
        self.connection: Connection | None = None
        self.broker: Connection | None = None  # the own broker's connection, for its readers
        self._addresses = addresses
        self.door: Address | None = None  # the link's door
        self._problem = "not connected yet"
        self._problems: dict[Address, str] = {}  # the last one of each door since it was connected

    async def run(self, group: str) -> None:
        """Keeps the link up until cancelled: to the first door that takes it, in turn."""
        loop = asyncio.get_running_loop()
        pause_s = BACKOFF_FIRST_S
        while True:
            for address in self._addresses:
                began = loop.time()
                await self._serve(address, group)
                if loop.time() - began >= STEADY_S:
                    pause_s = BACKOFF_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(BACKOFF_MAX_S, 2 * pause_s)

    async def _serve(self, address: Address, group: str) -> None:
        """Connects, and returns when the link is lost or could not be made."""
        lost = asyncio.Event()
        try:
            connection = await Connection.open(
                address,
                client_properties={"lrq_site": group},
                heartbeat_s=HEARTBEAT_S,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                on_close=lambda _error: lost.set(),
            )
        except LrqError as error:
            self._note(address, error)
            return
        try:
            if connection.error is None:
                self.connection, self.door, self._problem = connection, address, ""
                self._problems.pop(address, None)
                log.info("connected to %s at %s", self.remote_id, address)
                for driver in list(self.drivers.values()):
                    driver.link_up()
                await self._serve_demands(connection, lost)
            self._note(address, connection.error)
        finally:
            self.connection = self.door = None
            for driver in list(self.drivers.values()):
                driver.link_lost()
            connection.abort()  # not in order: a hanging sink must not block this node, and the sink reports its state at the next connection

    async def _serve_demands(self, connection: Connection, lost: asyncio.Event) -> None:
        """Asks for demands of full syncs until the link is lost."""
        taken = 0
        while not lost.is_set():
            try:
                channel = await connection.channel()
                _, newest, _ = await channel.queue_declare(DEMANDS_QUESTION, passive=True)
                if newest not in (0, taken):
                    questions = [(driver, SINK_QUESTION + driver.session.route.queue) for driver in self.drivers.values()]
                    refused = [d for d, question in questions if not d.take_demand((await channel.queue_declare(question, passive=True))[1])]
                    taken = 0 if refused else newest
                await channel.close()
            except LrqError as error:
                log.info("%s: asking for demands: %s", self.remote_id, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEMANDS_S):  # wait_for of Python 3.11 may pass over a cancellation
                    await lost.wait()

    def _note(self, address: Address, error: LrqError | None) -> None:
        self._problem = f"{address}: {error}"
        if self._problems.get(address) != self._problem:
            self._problems[address] = self._problem
            log.info("no link to %s: %s", self.remote_id, self._problem)

    def add(self, driver: SessionDriver) -> None:
        self.drivers[driver.client_name] = driver

    def status(self) -> dict[str, Any]:
        return {
            "connected": self.connection is not None,
            "door": str(self.door) if self.door else None,
            "problem": self._problem,
            "clients": {name: driver.status() for name, driver in self.drivers.items()},
        }
