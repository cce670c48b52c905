"""The common part of both publishers: arguments and limits, IDs, routes, failures. No I/O, and no waiting here.

Rules:

 - Two producers, since the door knows IDs per producer: `<producer>` on the connection to the client's vhost (opened by the first
   publish) and `<producer>.lrq` on the one to vhost lrq, which every publisher has, as on it the server is asked for
   both producers' last sequences before the first ID is given. Each has its lane.
 - A lane sends nothing to a node before it has asked that node, on that connection, for the producer's last sequence. A node that gave the answer
   before may have lost the primary role: publishes of a former process at the new primary would be taken for duplicates of new ones, and confirmed.
 - A message is checked before it gets an ID (`Draft`), and has one from the moment it is in the window (`_take`). A caller of
   `_take`, `_settled` or a method that reads a window excludes concurrent calls.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from uuid import uuid4

import pika

from lrq_ha import urls
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import messages
from lrq_ha.publisher.confirm import BaseConfirm
from lrq_ha.publisher.errors import InvalidArgument, NoPrimary, WaitTimeout, WindowFull, anew, forked
from lrq_ha.publisher.messages import ID_SEPARATOR, LOG_PRODUCER_SUFFIX, MESSAGE_BYTES_MAX, LogEntries
from lrq_ha.publisher.nodes import Addresses
from lrq_ha.publisher.window import Settled, Window
from lrq_ha.publisher.wire import Outgoing, message_frames
from lrq_ha.routing import names
from lrq_ha.routing.chain import TRANSMISSION_BYTES_MAX

_LOG = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseConfirm)

HEADER_BYTES_MAX: Final = 120 * 1024  # method and header frame; RabbitMQ closes the connection above its frame_max of 128 KiB
FAILURES_KEPT: Final = 1000  # failed confirms whose result was not requested, kept for flush()
LOGOUT_S: Final = 2.0


class Lane(Generic[C]):
    """The way to one vhost: its unconfirmed messages, and its addresses.

    Attributes:
        ascending: Whether the producer skips numbers: the log takes none of those that it has skipped.
        ready: Whether a node takes publishes now. Its link sets it.
        failure: Why no further publish is possible on this lane.
        properties: Client properties of its connections. Those of one publisher share an `lrq_instance`: a connection that asks for the producer's
            last sequence ends all others of that name, whose messages a door may not have read yet.
    """

    def __init__(self, window: Window[Outgoing[C]], addresses: Addresses, instance: str, *, ascending: bool = False) -> None:
        producer = window.producer
        self.properties = {"lrq_producer": producer, "lrq_instance": instance, "connection_name": f"lrq publisher {producer}"}
        self.ascending = ascending
        if ascending:
            self.properties["lrq_ids"] = names.ASCENDING
        self.window = window
        self.addresses = addresses
        self.ready = False
        self.failure: LrqError | None = None

    def no_primary(self) -> NoPrimary | None:
        return None if self.ready else self.addresses.no_primary()


@dataclass(frozen=True, slots=True)
class Draft(Generic[C]):
    """A checked message without an ID. `body` makes its body, once the ID is known; `size_bytes` is about that body's size.

    `number` is the number in its ID, if the lane's window has its numbers from the caller.
    """

    lane: Lane[C]
    exchange: str
    routing_key: str
    body: Callable[[str], bytes]
    size_bytes: int
    properties: pika.BasicProperties | None = None
    mandatory: bool = True
    number: int = 0


class BasePublisher(ABC, Generic[C]):
    """The base of `Publisher` and `AsyncPublisher`."""

    def __init__(
        self,
        nodes: Sequence[str],
        producer: str,
        client_name: str = "",
        *,
        vhost: str = "/",
        window: int = 10_000,
        window_bytes: int = 64 * 1024 * 1024,
        confirm_timeout_s: float = 30.0,
        connect_timeout_s: float = 30.0,
        login_timeout_s: float = 5.0,
        publish_timeout_s: float = 60.0,
        heartbeat_s: int = 10,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Makes a publisher; the sync one is connected then, the async one when it is entered.

        Args:
            nodes: Addresses of the group's doors: amqp:// or amqps:// URLs with credentials; a virtual host in them must be `vhost`.
            producer: Name of this process as a producer, 1 to 64 characters of A-Z a-z 0-9 _ . - ; one process at a time may use it,
                and after a restart it continues the sequence of its replication IDs.
            client_name: Name of the log replication client (as `producer`, without _); needed for log entries only.
            vhost: The vhost of `publish`.
            window: Most unconfirmed messages, per vhost.
            window_bytes: Most bytes of unconfirmed messages, per vhost.
            confirm_timeout_s: Seconds without a confirm after which the node counts as lost.
            connect_timeout_s: Seconds to wait for a primary at the start.
            login_timeout_s: Seconds that one address may take to log us in.
            publish_timeout_s: Seconds that a publish waits for room in the window.
            heartbeat_s: AMQP heartbeat interval in seconds.
            message_bytes_max: Largest body; not more than the brokers' `max_message_size`.
            tls: For amqps:// addresses, as `ssl.create_default_context(cafile=…)` makes it; None for the system's trusted CAs.

        Raises:
            InvalidArgument: A name, the list of nodes, or a limit.
            NoPrimary: (sync) No node took us within `connect_timeout_s`; it lists each node's answer.
        """
        self.producer = messages.checked_producer(producer)
        self.client_name = messages.checked_client_name(client_name) if client_name else ""
        if isinstance(nodes, str) or not nodes:
            raise InvalidArgument(f"nodes is {nodes!r}", todo="It must be a non-empty list of amqp:// URLs")
        limits = {"window": window, "window_bytes": window_bytes, "confirm_timeout_s": confirm_timeout_s}
        for name, value in {**limits, "login_timeout_s": login_timeout_s, "message_bytes_max": message_bytes_max}.items():
            if value <= 0:
                raise InvalidArgument(f"{name} is {value}", todo="It must be greater than 0")
        self._nodes = tuple(nodes)
        self._confirm_timeout_s = confirm_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._login_timeout_s = login_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._heartbeat_s = heartbeat_s
        self._tls = tls
        self._message_bytes_max = message_bytes_max
        self._failure: LrqError | None = None  # why no further publish is possible
        self._failed: deque[C] = deque(maxlen=FAILURES_KEPT)
        self._announced: bool | None = None  # the last ClientStatus sent: whether there is a full sync provider
        self._process = os.getpid()
        self._instance = uuid4().hex
        self._window_limits = (window, window_bytes)
        self._node_names = [address(node, vhost) for node in nodes]
        self._own = self._new_lane(vhost, Window(self.producer, window, window_bytes))
        self._log = self._new_lane(messages.VHOST, Window(self.producer + LOG_PRODUCER_SUFFIX, window, window_bytes))
        self._lanes: tuple[Lane[C], ...] = (self._log, self._own)
        self._begin()

    def _new_lane(self, vhost: str, window: Window[Outgoing[C]], *, ascending: bool = False) -> Lane[C]:
        return Lane(window, Addresses(vhost, self._node_names), self._instance, ascending=ascending)

    @abstractmethod
    def _begin(self) -> None:
        """The rest of making a publisher."""

    def __repr__(self) -> str:
        state = "closed" if self._failure is not None else "ready" if self._log.ready else "without a primary"
        unconfirmed = sum(len(lane.window) for lane in self._lanes)
        return f"<{type(self).__name__} {self.producer}: {state}, {unconfirmed} unconfirmed>"

    # ---- what is sent

    def _draft_publish(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties | None, mandatory: bool
    ) -> Draft[C]:
        messages.checked_short_string("exchange", exchange)
        messages.checked_short_string("routing_key", routing_key)
        content = messages.checked_bytes("body", body)
        return self._checked(Draft(self._own, exchange, routing_key, lambda _: content, len(content), properties, mandatory))

    def _draft_entries(self, queue: str, entries: LogEntries) -> Draft[C]:
        self._require_client_name("Log entries")
        timestamp_us = time.time_ns() // 1000
        # The distinct payloads' bytes dominate; ID and table are small. The exact size is checked once it is known.
        size = sum(map(len, {id(payload): payload for payload, _ in entries.entries}.values()))
        messages.checked_shares(entries)
        return self._checked(Draft(self._log, "", queue, lambda i: entries.to_bytes(self.client_name, i, timestamp_us), size))

    def _draft_request(self, destination: str, reason: str) -> Draft[C]:
        """The status that asks for a full sync of this client."""
        self._require_client_name("Full syncs")
        (site,) = messages.checked_destinations([destination])
        request_id = f"{self.producer}@{uuid4().hex}"
        words = messages.checked_reason(reason)
        return self._draft_status(messages.full_sync_status(self.client_name, site, request_id, words, pb.FullSyncRequest.REQUESTED))

    def _draft_status(self, body: bytes) -> Draft[C]:
        return self._checked(Draft(self._log, "", names.STATUS, lambda _: body, len(body)))

    def _checked(self, draft: Draft[C]) -> Draft[C]:
        self._check_process()
        messages.checked_size("The message", draft.size_bytes, self._bytes_max(draft))
        return draft

    def _check_process(self) -> None:
        """Called before any lock: in a forked process there is no I/O thread or loop, and a lock may be held without end."""
        if os.getpid() != self._process:
            raise forked(f"Publisher {self.producer}")

    def _bytes_max(self, draft: Draft[C]) -> int:
        to_log = draft.lane.addresses.vhost == messages.VHOST
        return min(self._message_bytes_max, TRANSMISSION_BYTES_MAX) if to_log else self._message_bytes_max

    def _require_client_name(self, what: str) -> None:
        if not self.client_name:
            raise InvalidArgument("The publisher has no client_name", todo=f"{what} need one: {type(self).__name__}(…, client_name=…)")

    def _has_room(self, draft: Draft[C]) -> bool:
        """Whether `_take` may be called: it gives an ID, or raises the reason why there will be none."""
        return self._failure is not None or draft.lane.failure is not None or draft.lane.window.fits(draft.size_bytes)

    def _no_room(self, draft: Draft[C]) -> LrqError:
        window = draft.lane.window
        return draft.lane.no_primary() or WindowFull(
            f"The window of producer {window.producer} stayed full for {self._publish_timeout_s} s"
            f" ({len(window)} messages, {window.bytes} bytes unconfirmed)",
            todo="Publish slower, or make the window larger",
        )

    def _take(self, draft: Draft[C]) -> C:
        """Gives the next replication ID of the lane's producer, and queues the message."""
        lane = draft.lane
        if failure := self._failure or lane.failure:
            raise anew(failure)
        replication_id = f"{lane.window.producer}{ID_SEPARATOR}{draft.number}" if draft.number else lane.window.next_id()
        content = draft.body(replication_id)
        messages.checked_size("The message", len(content), self._bytes_max(draft))
        frames = message_frames(
            draft.exchange, draft.routing_key, len(content), draft.properties, replication_id, mandatory=draft.mandatory
        )
        messages.checked_size("The message's header", len(frames), HEADER_BYTES_MAX)
        outgoing = Outgoing(frames, content, self._new_confirm(replication_id, lane.no_primary))
        lane.window.add(outgoing.size_bytes, outgoing, draft.number)
        return outgoing.confirm

    @abstractmethod
    def _new_confirm(self, replication_id: str, explain: Callable[[], LrqError | None]) -> C: ...

    def _announcement(self, provides: bool) -> Draft[C] | None:
        """Tells the servers whether this client supplies full syncs: once, and again when it begins to."""
        if self._announced or self._announced is provides:
            return None
        self._announced = provides
        return self._draft_status(messages.client_status(self.client_name, provides))

    # ---- what became of it

    def _settled(self, settled: Sequence[Settled[Outgoing[C]]]) -> list[C]:
        """Settles the Confirms of messages that left a window. Returns those with callbacks."""
        to_call = [each.entry.item.confirm for each in settled if each.entry.item.confirm.settle(each.error)]
        self._failed.extend(each.entry.item.confirm for each in settled if each.error is not None)
        return to_call

    def _fail_all(self, error: LrqError | None) -> list[Settled[Outgoing[C]]]:
        return [each for lane in self._lanes for each in lane.window.fail_all(error)]

    def _marks(self) -> list[int]:
        """The published messages so far, for `_behind`."""
        return [lane.window.added for lane in self._lanes]

    def _behind(self, marks: list[int]) -> list[Lane[C]]:
        """The lanes with unsettled messages of those published at `marks`."""
        return [lane for lane, mark in zip(self._lanes, marks) if lane.window.oldest <= mark]

    def _not_flushed(self, late: list[Lane[C]], timeout_s: float | None) -> LrqError:
        left = sum(len(lane.window) for lane in late)
        return late[0].no_primary() or WaitTimeout(f"{left} messages were not confirmed within {timeout_s} s")

    def _unseen_failure(self) -> LrqError | None:
        """The first failure since the last call whose Confirm was not asked for a result."""
        unseen = [confirm for confirm in self._failed if not confirm.observed]
        self._failed.clear()
        if not unseen:
            return None
        first = unseen[0].error
        _LOG.error("%d publishes failed since the last flush; the first: %s", len(unseen), first)
        return first


def address(url: str, vhost: str = "/") -> str:
    """host:port of an AMQP URL, for people.

    Raises:
        InvalidArgument: It is another kind of URL, or has a part that would not be used, such as another virtual host than `vhost`. The URL is
            not shown, since it may hold a password.
    """
    if fault := urls.amqp_fault(url, vhost):
        todo = f"Give amqp://user:password@host:port; the virtual host, heartbeats, timeouts and TLS are arguments (vhost is {vhost!r})"
        if fault == urls.NOT_AMQP:
            todo = f"Give amqp://user:password@host:port or amqps://…; {urls.PASSWORD_RULE}"
        raise InvalidArgument(f"An address in nodes {fault}", todo=todo)
    host, port = urls.endpoint(url)
    return f"{host}:{port}"
