"""The sessions with other sites, as long as this node is its group's primary: one per configured site and known client.

Rules:

- The pure `Session` decides, a `SessionDriver` carries out its effects, and a `SiteLink` has the connection that the sessions of a site share. A
  failure in a session ends all sessions, and with them the incarnation.
- One connection to the own broker per site, for its readers; if it is lost, the incarnation ends. A reader that gets no channel on it affects
  its session alone.
- Bounded: `QueueLimits` per session, PREFETCH_MESSAGES and WAITING_BYTES_MAX per reader, a session per site for each client that `Statuses` knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from broker_plugin.amqp.connection import Connection, ConnectionClosed
from broker_plugin.log.replica import Replica
from broker_plugin.log.streams import Streams
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import names
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.routing.route import Limits
from lrq_ha.routing.shares import Packing
from lrq_ha.routing.tables import Reason

from ..config import Config
from .session_driver import SessionDriver
from .shared_views import SharedViews
from .site_lag import SiteLag
from .site_link import SiteLink
from .view_reader import View

log = logging.getLogger("lrq_ha.sites")

TICK_S = 0.25
WATCH_INTERVAL_S = 5.0
TROUBLES_SHOWN_MAX = 3


class Sites:
    """The sessions with all sites. `status_entry` may be called before `run`.

    Args:
        config: The node's configuration.
        replica: This node's log.
        streams: Of the own broker.

    Attributes:
        lag: How far the sessions are behind.
        packing: Makes their batches.
        views: Reads the views for them.
    """

    def __init__(self, config: Config, replica: Replica, streams: Streams) -> None:
        self.group = config.node.group
        self.replica = replica
        self._streams = streams
        self._address = config.broker_address(ROUTING_VHOST)
        self._sites = [
            SiteLink(
                table.remote_id,
                [config.door_address(door, ROUTING_VHOST) for door in table.doors],
                Limits(snapshot_timeout_s=table.snapshot_timeout_s),
            )
            for table in config.sites
        ]
        self._views = {stream: View(stream.value) for stream in Stream}
        self.lag = SiteLag(self._views, config.replication.log_bytes_max)
        self.packing = Packing()
        self.views = SharedViews(self, self._views)
        self._clients: dict[str, None] = {}
        self._serving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Serves the other sites until cancelled.

        Raises:
            LrqError: The own broker is lost, or this node is no longer primary.
        """
        if not self._sites:
            return
        self._failed = asyncio.get_running_loop().create_future()
        try:
            for site in self._sites:
                site.broker = await Connection.open(self._address, on_close=self._broker_lost)
            for view in self._views.values():
                await view.probe(self._streams)
            self._serving = True
            for client in list(self._clients):
                self._add(client)
                await asyncio.sleep(0)  # a thousand clients and ten sites take a second
            for site in self._sites:
                self.spawn(site.run(self.group))
            self.spawn(self._ticks())
            self.spawn(self._watch())
            await self._failed
        finally:
            self._failed, self._serving = None, False
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            for site in self._sites:
                if site.broker is not None:
                    await site.broker.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            for site in self._sites:
                site.drivers.clear()
                site.broker = None
            self.views = SharedViews(self, self._views)

    def status_entry(self, position: Position, status: pb.Status) -> None:
        """A status entry of the log is safe; called in log order, perhaps more than once."""
        if status.HasField("client"):
            self._know(status.client.client_name)
        if self._serving:
            for site in self._sites:
                for driver in _concerned(site, status):
                    driver.feed(m.StatusEntry(position, status))

    def view_written(self, queue: str, sequence: int, size_bytes: int) -> None:
        """Entry `sequence` goes to the view `queue` now; called before it is written. Makes the readers' ends exact."""
        for stream, view in self._views.items():
            if view.queue == queue:
                view.tail = max(view.tail, sequence)
                self.lag.add_entry(stream, sequence, size_bytes)

    def demand(self, client_name: str, remote_ids: Sequence[str], note: str) -> None:
        """Demands full syncs of a client for sites, for an operator. They are checked (`check_demand`).

        Args:
            client_name: The client.
            remote_ids: The sites.
            note: The operator's reason, which the requests tell; may be empty.
        """
        log.info("an operator demands a full sync of %s for %s: %s", client_name, ", ".join(remote_ids), note or "no reason given")
        for site in self._sites:
            if site.remote_id in remote_ids:
                site.drivers[client_name].feed(m.Demand(Reason.OPERATOR_DEMANDS, note))

    def check_demand(self, client_name: str, remote_ids: Sequence[str]) -> None:
        """Checks that there are sessions of a client with these sites, and that full syncs may be asked of it.

        Raises:
            LrqError: No such client or site is known, the sessions have not begun, or the client has no full sync provider.
        """
        known = self.remote_ids
        if unknown := [remote_id for remote_id in remote_ids if remote_id not in known]:
            named = ", ".join(known) or "it has none"
            raise LrqError(f"group {self.group} sends nothing to {', '.join(unknown)}", todo=f"Name one of its sites: {named}")
        drivers = [site.drivers.get(client_name) for site in self._sites if site.remote_id in remote_ids]
        if not self._serving or (client_name in self._clients and None in drivers):
            raise LrqError("the sessions with other sites have not begun yet", todo="Try again in a second", retriable=True)
        if client_name not in self._clients:
            named = ", ".join(sorted(self._clients)) or "none"
            raise LrqError(f"no client '{client_name}' has announced itself to group {self.group}", todo=f"Name one of its clients: {named}")
        if any(driver is not None and driver.session.provider is False for driver in drivers):
            todo = "Start it with on_full_sync, then demand the full sync again; at the sink group, a demand waits for a provider"
            raise LrqError(f"client '{client_name}' has no full sync provider", todo=todo)

    @property
    def remote_ids(self) -> list[str]:
        """The configured sites."""
        return [site.remote_id for site in self._sites]

    def status(self) -> dict[str, Any]:
        """Per destination: the link, and per client state, reason, positions and lag."""
        return {site.remote_id: site.status() for site in self._sites}

    def trouble(self) -> str:
        """Text: the sessions whose next entries may be dropped; empty if there are none."""
        found = [driver.danger for site in self._sites for driver in site.drivers.values() if driver.danger]
        more = len(found) - TROUBLES_SHOWN_MAX
        return "; ".join([*found[:TROUBLES_SHOWN_MAX], *([f"and {more} more sessions"] if more > 0 else [])])

    # ---- for the sessions --------------------------------------------------------------------------------------------

    def at(self, sequence: int) -> Position:
        """Position of an entry of the log."""
        return Position(self.replica.node.log.epoch_at(sequence), sequence)

    def log_end(self) -> Position:
        return self.at(self.replica.node.log.end)

    def written_to(self) -> Position:
        """The views have, or are about to get, every entry up to here, even if entries wait for room in full queues."""
        return self.at(min(self.replica.reached(), self.replica.progress.safe))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `coroutine` as long as the sessions run; if it fails they all end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def fail(self, error: BaseException) -> None:
        """Ends all sessions."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _know(self, client_name: str) -> None:
        if client_name in self._clients:
            return
        if not names.is_name(client_name):
            log.warning("a client calls itself %r, which is no name: it is ignored", client_name)
        else:
            self._clients[client_name] = None
            if self._serving:
                self._add(client_name)

    def _add(self, client_name: str) -> None:
        """Starts the sessions of a client with every known status of it."""
        for site in self._sites:
            if client_name in site.drivers:
                continue
            driver = SessionDriver(self, site, client_name)
            site.add(driver)
            for sequence, status in self.replica.index.statuses.of(client_name, site.remote_id):
                driver.feed(m.StatusEntry(self.at(sequence), status))
            if site.connection is not None:
                driver.link_up()

    async def _ticks(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            tick = m.Tick(loop.time())
            self.lag.tick(tick.now)
            for site in self._sites:
                for driver in list(site.drivers.values()):
                    driver.feed(tick)

    async def _watch(self) -> None:
        """Looks for sessions whose next entries may be dropped."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for site in self._sites:
                for driver in list(site.drivers.values()):
                    driver.look_for_danger()
                    await asyncio.sleep(0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self.fail(error)

    def _broker_lost(self, error: ConnectionClosed | None) -> None:
        if error is not None:
            self.fail(LrqError(f"the sessions' connection to the broker is lost: {error}", retriable=True))


def _concerned(site: SiteLink, status: pb.Status) -> list[SessionDriver]:
    """The sessions with `site` that a status concerns: at most one."""
    about_client = status.HasField("client")
    if not about_client and status.full_sync.destination != site.remote_id:
        return []
    driver = site.drivers.get(status.client.client_name if about_client else status.full_sync.client_name)
    return [] if driver is None else [driver]
