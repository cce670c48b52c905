"""Drives one session: carries out the effects of the pure `Session`, in order, at once.

Rules:

- A session takes one event after the other; a failure in it (no longer primary, an illegal event) ends all sessions.
- One channel per session, a new one each time the sink is asked for its state, so that no answer to an earlier batch can be taken for one to a
  later batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Channel, Connection, ConnectionClosed
from broker_plugin.log.replica import Replica
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.chain import START
from lrq_ha.routing.log_identity import is_other_log, other_log
from lrq_ha.routing.names import SINK_QUESTION
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.session import Session
from lrq_ha.routing.shares import Packing
from lrq_ha.routing.snapshot_progress import SnapshotProgress
from lrq_ha.routing.tables import SENDING, Reason

from .shared_views import SharedViews
from .site_lag import SiteLag

log = logging.getLogger("lrq_ha.sites")

_LEVELS = {Reason.SNAPSHOT_TRIMMED_AGAIN: logging.ERROR, Reason.SNAPSHOT_UNSUPPLIED: logging.WARNING}  # the others are INFO


class Host(Protocol):
    """The sessions of this node (`sessions.Sites`)."""

    group: str
    replica: Replica
    lag: SiteLag
    packing: Packing
    views: SharedViews

    def log_end(self) -> Position: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def fail(self, error: BaseException) -> None: ...


class Link(Protocol):
    """The link to the session's site (`site_link.SiteLink`)."""

    remote_id: str
    limits: Limits
    connection: Connection | None
    broker: Connection | None
    door: Address | None


class Lane:
    """A session's channel to the sink, from one question to the next."""

    def __init__(self, driver: SessionDriver) -> None:
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


class SessionDriver:
    """Runs one session."""

    def __init__(self, host: Host, site: Link, client_name: str) -> None:
        self._host = host
        self._site = site
        self.client_name = client_name
        self.name = f"{client_name} to {site.remote_id}"
        route = Route(host.group, client_name, site.remote_id, host.replica.index.log_id)
        self.session = Session(route, host.log_end(), asyncio.get_running_loop().time(), site.limits, host.packing)
        self.lane: Lane | None = None
        self.problem = ""  # of the last question or batch
        self.danger = ""  # of entries that it needs
        self.demand = 0  # the number of the site's demand that the session was told of
        self._connected = False
        self._inbox: deque[m.Event] = deque()
        self._busy = False

    @property
    def broker(self) -> Connection | None:
        """The connection to the own broker for the readers that begin for this session."""
        return self._site.broker

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
            self._host.fail(error)
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

    def take_demand(self, number: int) -> bool:
        """Takes the site's open demand (0: none). False: not yet, as the session does not send."""
        if number in (0, self.demand):
            return True
        if self.session.state not in SENDING:
            return False
        self.demand = number
        self.feed(m.Demand(Reason.SITE_DEMANDS))
        return True

    def lane_lost(self, problem: str) -> None:
        """The sink refused a batch or closed the channel."""
        self.problem = problem
        log.warning("%s: %s", self.name, problem)
        self._leave_lane()
        self.feed(m.Refused())

    def look_for_danger(self) -> None:
        """Looks whether entries that it needs may be dropped. A danger is warned of once."""
        before, self.danger = self.danger, self._host.lag.trouble(self.session)
        if self.danger and self.danger.partition(":")[0] != before.partition(":")[0]:
            log.warning("%s", self.danger)

    def status(self) -> dict[str, Any]:
        session, now = self.session, asyncio.get_running_loop().time()
        return {
            "state": session.state.name.lower(),
            "reason": session.reason.value,
            "acked": str(session.acked),
            "sent": str(session.sent),
            "in_flight_bytes": session.batches.in_flight_bytes,
            **self._host.lag.tell(session, now),
            "snapshot": _tell_snapshot(session.snapshot, now),
            "problem": self.problem or self._host.views.problem(self) or session.trouble or self.danger,
        }

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: m.Effect) -> None:
        match effect:
            case m.AskSink():
                self._leave_lane()
                if self._site.connection is not None:
                    self.lane = Lane(self)
                    self._host.spawn(self._ask(self.lane, self._site.connection, effect.queue))
            case m.LeaveDoor():
                if self._site.connection is not None:
                    log.warning("%s: %s does not ack what it gets: the next door is tried", self.name, self._site.door)
                    self._site.connection.abort()
            case m.StartRead():
                self._host.views.start(self, effect)
            case m.StopRead():
                self._host.views.stop(self, effect.stream)
            case m.PauseRead():
                self._host.views.pause(self, effect.stream)
            case m.ResumeRead():
                self._host.views.resume(self, effect.stream)
            case m.Send():
                if self.lane is None or not self.lane.send(effect):
                    self._leave_lane()
                    self._inbox.append(m.Refused())
            case m.AppendStatus():
                body = effect.status.SerializeToString()
                self._host.replica.append(pb.Run(status=pb.StatusEntry(body=body)), 1, len(body))
            case m.Report():
                log.log(_LEVELS.get(effect.reason, logging.INFO), "%s: %s: %s", self.name, effect.state.name.lower(), effect.reason.value)

    async def _ask(self, lane: Lane, connection: Connection, queue: str) -> None:
        """Asks the sink. Without an answer nothing happens: the session asks again after a while."""
        try:
            answer = await lane.ask(connection, queue)
            if self.lane is lane:
                report = self._report(answer)
                known, ours = report.log_id, self.session.route.log_id
                self.problem = str(other_log(self._host.group, known, ours)) if is_other_log(known, ours) else ""
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
        """Reads `/<epoch>.<sequence>/<0, 1: it is complete, 2: none ever was>/<log id>/<request id>`."""
        try:
            _, last, holds, log_id, request = answer.split("/", 4)
            epoch, sequence = last.split(".")
            position, theirs = Position(int(epoch), int(sequence)), bytes.fromhex(log_id)
        except ValueError as error:
            raise MalformedInput(f"the sink {self._site.remote_id} answered {answer!r}", todo="Run one version on both sides.") from error
        ours = self._host.replica.node.log
        in_history = position == START or (position.sequence <= ours.end and ours.epoch_at(position.sequence) == position.epoch)
        return m.SinkReport(position, request, holds == "1", in_history, holds == "2", theirs)

    def _leave_lane(self) -> None:
        lane, self.lane = self.lane, None
        if lane is not None and lane.ready:
            self._host.spawn(lane.close())


def _tell_snapshot(snapshot: SnapshotProgress, now: float) -> dict[str, Any] | None:
    """For the status. `now`: by the clock of `snapshot`."""
    if not snapshot.request:
        return None
    return {
        "request": snapshot.request,
        "since": round(time.time() - (now - snapshot.since), 1),
        "rows": snapshot.rows,
        "bytes": snapshot.sent_bytes,
        "attempts": snapshot.attempts,
    }
