"""The sessions with other sites, as long as this node is its group's primary: one per configured site and known client.

Rules:

- The pure `Session` decides; this module carries out its effects, in order, at once. Each session takes one
  event after the other; a failure in it (no longer primary, an illegal event) ends all sessions, and with them the incarnation.
- One connection per site, to the door of its primary (the other nodes refuse); one channel per session, a new one
  each time the sink is asked for its state, so that no answer to an earlier batch can be taken for one to a later batch.
- One connection to the own broker per site, for its readers; if it is lost, the incarnation ends. A reader that gets no channel on it affects
  its session alone.
- Bounded: `QueueLimits` per session, PREFETCH_MESSAGES and WAITING_BYTES_MAX per reader, a session per site for each client that `Statuses` knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from broker_plugin.amqp.connection import Address, Channel, Connection, ConnectionClosed
from broker_plugin.log.replica import Replica
from broker_plugin.log.streams import Streams
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import names
from lrq_ha.routing.chain import START
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.names import ROUTING_VHOST, SINK_QUESTION
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.session import Session
from lrq_ha.routing.tables import Reason

from ..config import Config
from .view_reader import View, ViewReader

log = logging.getLogger("lrq_ha.sites")

TICK_S = 0.25
HEARTBEAT_S = 5
CONNECT_TIMEOUT_S = 5.0
BACKOFF_FIRST_S = 0.1  # after all doors of a site were tried; doubles each time
BACKOFF_MAX_S = 2.0
STEADY_S = 10.0  # more than CONNECT_TIMEOUT_S; a link that stood that long resets the back-off
_LEVELS = {Reason.SNAPSHOT_TRIMMED_AGAIN: logging.ERROR, Reason.SNAPSHOT_UNSUPPLIED: logging.WARNING}  # the others are INFO


class _Lane:
    """A session's channel to the sink, from one question to the next."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self.channel: Channel | None = None
        self.ready = False  # the sink has answered
        self._closing = False
        self._sent: deque[tuple[int, Position]] = deque()  # publish tag and last position of each batch without ack

    async def ask(self, connection: Connection, queue: str) -> str:
        """Opens the channel and asks the sink for its state; returns the answer."""
        self.channel = await connection.channel(on_confirm=self._confirmed, on_close=self._closed)
        await self.channel.confirm_select()
        answer, _, _ = await self.channel.queue_declare(SINK_QUESTION + queue, passive=True)
        self.ready = True
        return answer

    def send(self, effect: m.Send) -> bool:
        """Returns whether the batch went out."""
        if self.channel is None or self.channel.error is not None:
            return False
        tag = self.channel.publish("", effect.queue, effect.body)
        self._sent.append((tag, effect.last))
        return True

    async def close(self) -> None:
        if self.channel is not None and self.channel.error is None and not self._closing:
            self._closing = True
            await self.channel.close()

    def _confirmed(self, _tag: int, _multiple: bool, ok: bool) -> None:
        if self._driver.lane is not self or self.channel is None:
            return
        if not ok:
            self._driver.lane_lost("the sink refused a batch")
            return
        upto = START
        while self._sent and self._sent[0][0] <= self.channel.answered_to:
            upto = self._sent.popleft()[1]
        if upto != START:
            self._driver.feed(m.Acked(upto))

    def _closed(self, error: LrqError | None) -> None:
        if error is not None and self.ready and self._driver.lane is self and not isinstance(error, ConnectionClosed):
            self._driver.lane_lost(str(error))


class _Driver:
    """Runs one session."""

    def __init__(self, sites: Sites, site: _Site, client_name: str) -> None:
        self._sites = sites
        self._site = site
        self.client_name = client_name
        self.name = f"{client_name} to {site.remote_id}"
        route = Route(sites.group, client_name, site.remote_id)
        self.session = Session(route, sites.log_end(), asyncio.get_running_loop().time(), site.limits)
        self.lane: _Lane | None = None
        self.problem = ""  # of the last question or batch
        self._connected = False
        self._inbox: deque[m.Event] = deque()
        self._busy = False
        self._readers: dict[Stream, tuple[ViewReader, asyncio.Task[None]]] = {}

    def feed(self, event: m.Event) -> None:
        """Hands an event to the session and carries out its effects. Never raises: a failure ends all sessions."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                for effect in self.session.handle(self._inbox.popleft()):
                    self._carry_out(effect)
        except Exception as error:
            self._inbox.clear()
            self._sites.fail(error)
        finally:
            self._busy = False

    def link_up(self) -> None:
        self._connected = True
        self.feed(m.Connected())

    def link_lost(self) -> None:
        if self._connected:
            self._connected = False
            self.lane = None  # its channel is gone with the connection
            self.feed(m.Disconnected())

    def lane_lost(self, problem: str) -> None:
        """The sink refused a batch or closed the channel."""
        self.problem = problem
        log.warning("%s: %s", self.name, problem)
        self._leave_lane()
        self.feed(m.Refused())

    def status(self) -> dict[str, Any]:
        session = self.session
        return {
            "state": session.state.name.lower(),
            "reason": session.reason.value,
            "acked": str(session.acked),
            "sent": str(session.sent),
            "in_flight_bytes": session.batches.in_flight_bytes,
            "problem": self.problem or next((reader.problem for reader, _ in self._readers.values() if reader.problem), session.trouble),
        }

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: m.Effect) -> None:
        match effect:
            case m.AskSink():
                self._leave_lane()
                if self._site.connection is not None:
                    self.lane = _Lane(self)
                    self._sites.spawn(self._ask(self.lane, self._site.connection, effect.queue))
            case m.LeaveDoor():
                if self._site.connection is not None:
                    log.warning("%s: %s does not ack what it gets: the next door is tried", self.name, self._site.door)
                    self._site.connection.abort()
            case m.StartRead():
                self._start_read(effect)
            case m.StopRead():
                self._stop_read(effect.stream)
            case m.PauseRead() | m.ResumeRead():
                if effect.stream in self._readers:
                    reader, _ = self._readers[effect.stream]
                    if isinstance(effect, m.PauseRead):
                        reader.pause()
                    else:
                        reader.resume()
            case m.Send():
                if self.lane is None or not self.lane.send(effect):
                    self._leave_lane()
                    self._inbox.append(m.Refused())
            case m.AppendStatus():
                body = effect.status.SerializeToString()
                self._sites.replica.append(pb.Run(status=pb.StatusEntry(body=body)), 1, len(body))
            case m.Report():
                log.log(_LEVELS.get(effect.reason, logging.INFO), "%s: %s: %s", self.name, effect.state.name.lower(), effect.reason.value)

    async def _ask(self, lane: _Lane, connection: Connection, queue: str) -> None:
        """Asks the sink. Without an answer nothing happens: the session asks again after a while."""
        try:
            answer = await lane.ask(connection, queue)
            if self.lane is lane:
                report = self._report(answer)
                self.problem = ""
                self.feed(report)
        except LrqError as error:
            if self.lane is lane:
                self.lane = None
                self.problem = str(error)
                log.warning("%s: asking the sink: %s", self.name, error)
        finally:
            if self.lane is not lane:
                await lane.close()

    def _report(self, answer: str) -> m.SinkReport:
        """Reads `/<epoch>.<sequence>/<0, 1: it is complete, 2: none ever was>/<request id>`."""
        try:
            _, last, holds, request = answer.split("/", 3)
            epoch, sequence = last.split(".")
            position = Position(int(epoch), int(sequence))
        except ValueError as error:
            raise MalformedInput(f"the sink {self._site.remote_id} answered {answer!r}", todo="Run one version on both sides.") from error
        ours = self._sites.replica.node.log
        in_history = position == START or (position.sequence <= ours.end and ours.epoch_at(position.sequence) == position.epoch)
        return m.SinkReport(position, request, holds == "1", in_history, holds == "2")

    def _leave_lane(self) -> None:
        lane, self.lane = self.lane, None
        if lane is not None and lane.ready:
            self._sites.spawn(lane.close())

    def _start_read(self, effect: m.StartRead) -> None:
        self._stop_read(effect.stream)
        if self._site.broker is None:
            raise LrqError("the sessions have ended", retriable=True)
        reader = self._sites.reader(self._site.broker, effect, self.feed)
        self._readers[effect.stream] = reader, self._sites.spawn(reader.run())

    def _stop_read(self, stream: Stream) -> None:
        if stream in self._readers:
            self._readers.pop(stream)[1].cancel()


class _Site:
    """The link to one site, and its sessions by client name."""

    def __init__(self, remote_id: str, addresses: list[Address], limits: Limits) -> None:
        self.remote_id = remote_id
        self.limits = limits
        self.drivers: dict[str, _Driver] = {}
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
                await lost.wait()
            self._note(address, connection.error)
        finally:
            self.connection = self.door = None
            for driver in list(self.drivers.values()):
                driver.link_lost()
            connection.abort()  # not in order: a hanging sink must not block this node, and the sink reports its state at the next connection

    def _note(self, address: Address, error: LrqError | None) -> None:
        self._problem = f"{address}: {error}"
        if self._problems.get(address) != self._problem:
            self._problems[address] = self._problem
            log.info("no link to %s: %s", self.remote_id, self._problem)

    def add(self, driver: _Driver) -> None:
        self.drivers[driver.client_name] = driver

    def status(self) -> dict[str, Any]:
        return {
            "connected": self.connection is not None,
            "door": str(self.door) if self.door else None,
            "problem": self._problem,
            "clients": {name: driver.status() for name, driver in self.drivers.items()},
        }


class Sites:
    """The sessions with all sites. `status_entry` may be called before `run`.

    Args:
        config: The node's configuration.
        replica: This node's log.
        streams: Of the own broker.
    """

    def __init__(self, config: Config, replica: Replica, streams: Streams) -> None:
        self.group = config.node.group
        self.replica = replica
        self._streams = streams
        self._address = config.broker_address(ROUTING_VHOST)
        self._sites = [
            _Site(
                table.remote_id,
                [config.door_address(door, ROUTING_VHOST) for door in table.doors],
                Limits(snapshot_timeout_s=table.snapshot_timeout_s),
            )
            for table in config.sites
        ]
        self._views = {stream: View(stream.value) for stream in Stream}
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

    def status_entry(self, position: Position, status: pb.Status) -> None:
        """A status entry of the log is safe; called in log order, perhaps more than once."""
        if status.HasField("client"):
            self._know(status.client.client_name)
        if self._serving:
            for site in self._sites:
                for driver in _concerned(site, status):
                    driver.feed(m.StatusEntry(position, status))

    def view_written(self, queue: str, sequence: int) -> None:
        """Entry `sequence` goes to the view `queue` now; called before it is written. Makes the readers' ends exact."""
        for view in self._views.values():
            if view.queue == queue:
                view.tail = max(view.tail, sequence)

    def status(self) -> dict[str, Any]:
        """Per destination: the link, and per client state, reason, positions and bytes in flight."""
        return {site.remote_id: site.status() for site in self._sites}

    # ---- for the sessions --------------------------------------------------------------------------------------------

    def at(self, sequence: int) -> Position:
        """Position of an entry of the log."""
        return Position(self.replica.node.log.epoch_at(sequence), sequence)

    def log_end(self) -> Position:
        return self.at(self.replica.node.log.end)

    def written_to(self) -> Position:
        """The views have, or are about to get, every entry up to here, even if entries wait for room in full queues."""
        return self.at(min(self.replica.reached(), self.replica.progress.safe))

    def reader(self, broker: Connection, effect: m.StartRead, give: Callable[[m.Event], None]) -> ViewReader:
        begins = self.replica.begins_at
        return ViewReader(broker, self._views[effect.stream], effect.from_sequence, effect.reader, self.written_to, give, begins=begins)

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
            driver = _Driver(self, site, client_name)
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
            for site in self._sites:
                for driver in list(site.drivers.values()):
                    driver.feed(tick)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self.fail(error)

    def _broker_lost(self, error: ConnectionClosed | None) -> None:
        if error is not None:
            self.fail(LrqError(f"the sessions' connection to the broker is lost: {error}", retriable=True))


def _concerned(site: _Site, status: pb.Status) -> list[_Driver]:
    """The sessions with `site` that a status concerns: at most one."""
    about_client = status.HasField("client")
    if not about_client and status.full_sync.destination != site.remote_id:
        return []
    driver = site.drivers.get(status.client.client_name if about_client else status.full_sync.client_name)
    return [] if driver is None else [driver]
