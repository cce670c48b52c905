"""The intercept points of one connection: the events for `lrq_ha.interceptors`. Exists only if the configuration names interceptors.

Rules:
- The points are laid over the door, not built into it. A session with InterceptPoints takes this class's `take`, `acks`, `deliver` and tables instead
  of those of `publish`, `acknowledge`, `deliver` and `method_table`; each calls the original, and reports. In the door itself a few places, none of
  which is passed more than once per run of messages, ask whether there is a `watch`.
- `routing` comes before any handling of a publish, so an interceptor may refuse it there: no part of it is in the log or elsewhere. A publish cannot
  be changed after that: the log must be identical on every node.
- A reported delivery is kept, by its tag, until the client settles it. `rejected` and `dequeue` wait until the log is safe so far.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.interceptors.events import (
    Accept,
    Acquire,
    Cancel,
    Cause,
    Client,
    Consume,
    Delivery,
    Dequeue,
    Enqueue,
    Event,
    Message,
    Outcome,
    Point,
    Reject,
    Rejected,
    Release,
    Routed,
    Routing,
    Step,
    Topology,
    Transaction,
)
from lrq_ha.interceptors.plugins import Interceptors
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import parse_stamp
from lrq_ha.replication.positions import Position

from ..amqp import death_headers, frames
from ..amqp.frames import BASIC_NACK, BASIC_PUBLISH, Item, scan
from ..amqp.reply_codes import ACCESS_REFUSED
from ..log import stamps
from ..methods import acknowledge, closing, consume, declare, permissions, publish, routing_queues
from ..methods import deliver as methods_deliver
from ..session import decisions
from ..session.channel import ClientChannel, Consumer
from ..session.session import ClientSession
from ..session.unacked import Unacked
from . import method_table
from .followed_publishes import FollowedPublishes

_DELIVERIES = frozenset({Point.ACQUIRE, Point.RELEASE, Point.ACCEPT, Point.REJECT, Point.REJECTED, Point.DEQUEUE})
_DECLARATIONS = [method for method, handler in method_table.FROM_CLIENT.items() if handler is declare.declare]
_ANSWERS = [method for method, handler in method_table.FROM_BROKER.items() if handler in (declare.declare_ok, declare.reply)]
_GET_OK = frames.BASIC_GET_OK.to_bytes(4, "big")
_numbers = itertools.count(1)


class InterceptPoints:
    """Reports one connection's events.

    Args:
        session: The connection.
        interceptors: The receivers of the events.
    """

    def __init__(self, session: ClientSession, interceptors: Interceptors) -> None:
        self._session = session
        self._replica = session.replica
        self._interceptors = interceptors
        peer = (session.client.get_extra_info("peername") if session.client is not None else None) or ("", 0)
        address = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
        self._client = Client(session.user, session.vhost, address, session.producer, next(_numbers))
        points = interceptors.points
        self._routes, self._enqueues, self._follows = (point in points for point in (Point.ROUTING, Point.ENQUEUE, Point.ROUTED))
        self._delivers = bool(points & _DELIVERIES)
        self._followed = FollowedPublishes(self._routed)
        self.answered, self.unanswered = self._followed.answered, self._followed.unanswered
        self._held: dict[int, Unacked[Delivery]] = {}  # by channel
        self._consumers: dict[int, dict[bytes, Consumer]] = {}
        self._passed: dict[int, deque[bytes]] = {}  # pending declarations, as channel.passed; empty: one that is not reported
        self._accepted: list[Delivery] = []  # acks that are not in the log yet
        self._until_safe: deque[tuple[int, Point, Event]] = deque()
        self.from_client = method_table.FROM_CLIENT | {
            frames.BASIC_NACK: self._reject,
            frames.BASIC_REJECT: self._reject,
            frames.BASIC_RECOVER: self._recover,
            frames.BASIC_RECOVER_ASYNC: self._recover,
            frames.BASIC_CONSUME: self._consume,
            frames.BASIC_CANCEL: self._cancel,
            frames.TX_COMMIT: self._commit,
            **dict.fromkeys(_DECLARATIONS, self._declare),
        }
        self.from_broker = method_table.FROM_BROKER | {
            frames.BASIC_GET_OK: self._get_ok,
            frames.BASIC_RETURN: self._return,
            frames.BASIC_CONSUME_OK: self._consume_ok,
            frames.BASIC_CANCEL: self._cancelled,
            frames.BASIC_CANCEL_OK: self._cancelled,
            frames.TX_SELECT_OK: self._select_ok,
            frames.TX_COMMIT_OK: self._commit_ok,
            frames.TX_ROLLBACK_OK: self._rollback_ok,
            **dict.fromkeys(_ANSWERS, self._declared),
        }

    def _tell(self, point: Point, event: Event) -> None:
        self._interceptors.tell(point, event)
        if self._interceptors.full:
            self._session.flow.hold_up(True)

    def _when_safe(self, sequence: int, point: Point, event: Event) -> None:
        if sequence <= self._replica.progress.safe and not self._until_safe:
            self._tell(point, event._replace(time=time.time()))
            return
        self._until_safe.append((sequence, point, event))
        self._replica.progress.waiting_safe.add(self)

    def safe_advanced(self) -> None:
        """More of the log is safe than before."""
        waiting, safe = self._until_safe, self._replica.progress.safe
        while waiting and waiting[0][0] <= safe:
            _, point, event = waiting.popleft()
            self._tell(point, event._replace(time=time.time()))
        if waiting:
            self._replica.progress.waiting_safe.add(self)

    # ---- publishes ---------------------------------------------------------------------------------------------------

    def take(self, session: ClientSession, data: bytes, items: list[Item], at: int) -> int:
        """Like publish.take: reports `routing` first, then takes publishes up to the first refusal."""
        number = items[at][1]
        channel = session.channel(number)
        if not self._routes or channel.committing is not None:  # a transaction's publishes were reported when they came
            return publish.take(session, data, items, at)
        end, refusal, total = at, None, len(items)
        malformed: LrqError | None = None
        try:
            while end < total and refusal is None:
                kind, same, start, method_end, header, header_end, stop = items[end]
                if kind != BASIC_PUBLISH or not stop or same != number:
                    break
                method, payload = data[start:method_end], data[header:header_end]
                message = self._published(method, payload)
                if not channel.closing and frames.body_size(payload) <= session.door.config.message_bytes_max:  # else the door itself refuses it
                    if channel.tx is None and permissions.missing(session, method, payload) is not None:
                        session.permission_needed = True
                        break
                    refusal = self._route(number, message, data, header_end, stop)
                end += refusal is None
        except LrqError as error:  # the publishes before it are taken, as without interceptors
            malformed = error
        run, done = items[at:end], 0
        while done < len(run):
            done = publish.take(session, data, run, done)
            if session.closed or session.client is None:
                return total
        if malformed is not None:
            raise malformed
        if refusal is None:
            return end
        if not channel.closing:
            name, reason = refusal
            closing.refuse_publish(session, channel, ACCESS_REFUSED, f"ACCESS_REFUSED - interceptor '{name}': {reason}")
            self._routed(number, message, Outcome.REFUSED, f"{name}: {reason}")
        return end + 1

    def not_allowed(self, number: int, method: bytes, header: bytes, why: str) -> None:
        """The broker has refused a publish when it was asked: the publish was not handled further."""
        message = self._published(method, header)
        if self._routes:
            self._tell(Point.ROUTING, Routing(time.time(), self._client, number, message, None))
        self._routed(number, message, Outcome.REFUSED, why)

    def _route(self, number: int, message: Message, data: bytes, header_end: int, stop: int) -> tuple[str, str] | None:
        event = Routing(time.time(), self._client, number, message, None)
        self._tell(Point.ROUTING, event)
        if not self._interceptors.refuse:
            return None
        return self._interceptors.ask(event._replace(body=frames.body_of(data, header_end, stop)))

    def _published(self, method: bytes, header: bytes, sequence: int = 0) -> Message:
        route = frames.publish_route(method)
        raw = stamps.replication_id(header) if self._session.producer and b"x-lrq-id" in header else None
        known = raw.decode("ascii", "replace") if raw is not None and raw.startswith(self._session.id_prefix) else ""
        position = Position(self._replica.node.leading, sequence) if sequence else None
        return Message(route.exchange, route.routing_key, known, position, int.from_bytes(header[4:12], "big"), death_headers.restore(header))

    def enqueued(self, number: int, first: int, run: pb.Run) -> None:
        """A run of publishes is in the log, as the entries from `first` on."""
        if not (self._enqueues or self._follows):
            return
        blob, now = run.enqueues.frames, time.time()
        items, _ = scan(blob, 0, frames.FRAME_MAX_ANY_BYTES, len(blob) + 1)
        for sequence, item in enumerate(items, first):
            _, _, start, end, header, header_end, _ = item
            message = self._published(blob[start:end], blob[header:header_end], sequence)
            if self._enqueues:
                self._tell(Point.ENQUEUE, Enqueue(now, self._client, number, message, _plain(message)))
            if self._follows:
                self._followed.follow(number, sequence, message)

    def repeated(self, number: int, method: bytes, header: bytes) -> None:
        """A publish whose ID is in the log already."""
        self._routed(number, self._published(method, header), Outcome.REPEAT)

    def elsewhere(
        self, session: ClientSession, channel: ClientChannel, decision: decisions.Decision, method: bytes, header: bytes, body: bytes, blob: bytes
    ) -> None:
        """Like routing_queues.take: a publish that ends at the door, or bypasses the log."""
        replica = self._replica
        before, repeats = replica.end, session.door.counters["repeats"]
        routing_queues.take(session, channel, decision, method, header, body, blob)
        message, number = self._published(method, header), channel.number
        if channel.closing:
            refused: Any = frames.decode_method(channel.refusal[7:-1])
            self._routed(number, message, Outcome.REFUSED, refused.reply_text)
        elif decision is decisions.Decision.PASSED:
            self._tell(Point.ENQUEUE, Enqueue(time.time(), self._client, number, message, _plain(message)))
            self._routed(number, message, Outcome.PASSED)
        elif replica.end > before:
            message = message._replace(position=Position(replica.node.leading, replica.end))
            self._tell(Point.ENQUEUE, Enqueue(time.time(), self._client, number, message, _plain(message)))
            accepted = Routed(0.0, self._client, number, message, _plain(message), Outcome.ACCEPTED, "")
            self._when_safe(replica.end, Point.ROUTED, accepted)
        elif decision is decisions.Decision.TRANSMIT and repeats == session.door.counters["repeats"]:
            self._routed(number, message, Outcome.UNROUTABLE)
        else:
            self._routed(number, message, Outcome.REPEAT)

    def _routed(self, number: int, message: Message, outcome: Outcome, reason: str = "") -> None:
        self._tell(Point.ROUTED, Routed(time.time(), self._client, number, message, _plain(message), outcome, reason))

    def _return(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        position = _position(data[item[4] : item[5]])
        if position is not None:
            self._followed.returned(number, position.sequence)
        return methods_deliver.returned(session, number, data, item)

    # ---- deliveries --------------------------------------------------------------------------------------------------

    def deliver(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        """Like `methods.deliver.deliver`."""
        replaced = methods_deliver.deliver(session, number, data, item)
        if self._delivers and replaced != b"":
            consumer_tag, tag, origin = frames.deliver_arguments(_as_given(data, item, replaced))
            channel = session.channel(number)
            name = consumer_tag.decode("utf-8", "surrogateescape")
            self._given(channel, channel.consumers.get(consumer_tag), name, tag, origin, data[item[4] : item[5]])
        return replaced

    def _get_ok(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        channel = session.channel(number)
        asked = channel.gets[0][0] if channel.gets else None
        replaced = methods_deliver.get_ok(session, number, data, item)
        if self._delivers and (replaced is None or replaced[7:11] == _GET_OK):
            tag, origin = frames.get_ok_arguments(_as_given(data, item, replaced))
            self._given(channel, asked, "", tag, origin, data[item[4] : item[5]])
        return replaced

    def _given(self, channel: ClientChannel, consumer: Consumer | None, name: str, tag: int, origin: frames.Origin, header: bytes) -> None:
        if channel.closing or consumer is None:
            return  # the client does not count it as delivered
        try:
            raw = stamps.replication_id(header) if b"x-lrq-id" in header else None
        except LrqError:
            raw = None
        known = raw.decode("ascii", "replace") if raw is not None else ""
        size = int.from_bytes(header[4:12], "big")
        message = Message(origin.exchange, origin.routing_key, known, _position(header), size, death_headers.restore(header))
        delivery = Delivery(self._client, channel.number, message, consumer.queue[1], name, tag, origin.redelivered)
        now = time.time()
        self._tell(Point.ACQUIRE, Acquire(now, delivery))
        if not consumer.no_ack:
            self._held.setdefault(channel.number, Unacked())[tag] = delivery
            if channel.recovers:
                self._release(channel.number, Cause.RECOVER)
            return
        self._tell(Point.ACCEPT, Accept(now, delivery, True))
        if consumer.automatic:
            self._accepted.append(delivery)
            if not self._session.ack_frames:
                self.logged()
        else:
            self._tell(Point.DEQUEUE, Dequeue(now, delivery))

    def acks(self, session: ClientSession, data: bytes, items: list[Item], at: int) -> int:
        """Like acknowledge.acks, but one at a time."""
        _, number, start, end, _, _, _ = items[at]
        channel = session.channel(number)
        if not channel.closing:
            self._ack(session, channel, data[start:end])
        return at + 1

    def _ack(self, session: ClientSession, channel: ClientChannel, payload: bytes) -> None:
        acknowledge.ack(session, channel, payload)
        if channel.tx is not None:
            return  # an ack has no effect before the commit
        tag, bits = frames.tag_and_bits(payload)
        now = time.time()
        for delivery in self._let_go(channel.number, tag, bool(bits & 1)):
            self._tell(Point.ACCEPT, Accept(now, delivery, False))
            self._accepted.append(delivery)

    def logged(self) -> None:
        """The taken acks are in the log."""
        accepted, self._accepted = self._accepted, []
        for delivery in accepted:
            self._when_safe(self._replica.last_operation, Point.DEQUEUE, Dequeue(0.0, delivery))

    def _reject(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        acknowledge.reject(session, channel, kind, payload)
        if channel.tx is not None:
            return
        tag, bits = frames.tag_and_bits(payload)
        multiple, requeue = (bool(bits & 1), bool(bits & 2)) if kind == BASIC_NACK else (False, bool(bits & 1))
        now = time.time()
        for delivery in self._let_go(channel.number, tag, multiple):
            if requeue:
                self._tell(Point.RELEASE, Release(now, delivery, Cause.CLIENT))
                continue
            self._tell(Point.REJECT, Reject(now, delivery))
            self._when_safe(self._replica.last_operation, Point.REJECTED, Rejected(0.0, delivery))
            self._when_safe(self._replica.last_operation, Point.DEQUEUE, Dequeue(0.0, delivery))

    def _recover(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        acknowledge.recover(session, channel, kind, payload)
        self._release(channel.number, Cause.RECOVER)

    def _let_go(self, number: int, tag: int, multiple: bool) -> list[Delivery]:
        held = self._held.get(number)
        if not held or (tag and tag not in held):
            return []  # the ack is refused, and all deliveries go back
        return held.settle(tag, multiple)

    def _release(self, number: int, cause: Cause) -> None:
        now = time.time()
        for delivery in self._held.pop(number, Unacked[Delivery]()).values():
            self._tell(Point.RELEASE, Release(now, delivery, cause))

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def _consume(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        before = set(channel.consumers)
        consume.consume(session, channel, kind, payload)
        for tag in set(channel.consumers) - before:  # nowait: there will be no answer
            self._consuming(channel, tag)

    def _consume_ok(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        replaced = consume.consume_ok(session, number, data, item)
        if replaced is None:
            self._consuming(session.channel(number), _tag(data, item))
        return replaced

    def _consuming(self, channel: ClientChannel, tag: bytes) -> None:
        consumer = channel.consumers.get(tag)
        if consumer is None or channel.closing:
            return
        self._consumers.setdefault(channel.number, {})[tag] = consumer
        name = tag.decode("utf-8", "surrogateescape")
        self._tell(Point.CONSUME, Consume(time.time(), self._client, channel.number, consumer.queue[1], name, consumer.no_ack))

    def _cancel(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        consume.cancel(session, channel, kind, payload)
        at = 5 + payload[4]
        if payload[at]:  # nowait
            self._cancelling(channel.number, payload[5:at], Cause.CLIENT)

    def _cancelled(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        replaced = consume.cancelled(session, number, data, item)
        if replaced is None:
            self._cancelling(number, _tag(data, item), Cause.BROKER if item[0] == frames.BASIC_CANCEL else Cause.CLIENT)
        return replaced

    def _cancelling(self, number: int, tag: bytes, cause: Cause) -> None:
        consumer = self._consumers.get(number, {}).pop(tag, None)
        if consumer is not None:
            name = tag.decode("utf-8", "surrogateescape")
            self._tell(Point.CANCEL, Cancel(time.time(), self._client, number, consumer.queue[1], name, cause))

    # ---- topology ----------------------------------------------------------------------------------------------------

    def _declare(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        method: Any = frames.decode_method(payload)
        waiting = len(channel.passed)
        method_table.FROM_CLIENT[kind](session, channel, kind, payload)
        told = b"" if getattr(method, "passive", False) else payload
        if len(channel.passed) > waiting:
            self._passed.setdefault(channel.number, deque()).append(told)
        elif told and getattr(method, "nowait", False) and not session.from_client.stalled and not channel.closing:
            self.declared(channel.number, payload, False)  # there will be no answer

    def _declared(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        mine = session.channel(number).passed
        replaced = method_table.FROM_BROKER[item[0]](session, number, data, item)
        passed = self._passed.get(number)
        if passed and len(passed) > len(mine) and (method := passed.popleft()):
            self.declared(number, method, False)
        return replaced

    def declared(self, number: int, method: bytes, replicated: bool) -> None:
        """The broker has carried out a declaration; `method`: the method frame's payload."""
        operation = method_table.name_of(frames.method_id(method))
        self._tell(Point.TOPOLOGY, Topology(time.time(), self._client, number, operation, method, replicated))

    # ---- transactions ------------------------------------------------------------------------------------------------

    def _step(self, number: int, step: Step) -> None:
        self._tell(Point.TRANSACTION, Transaction(time.time(), self._client, number, step))

    def _select_ok(self, _session: ClientSession, number: int, _data: bytes, _item: Item) -> None:
        self._step(number, Step.SELECT)

    def _commit(self, session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
        if channel.tx is not None:
            self._step(channel.number, Step.COMMIT)
        method_table.FROM_CLIENT[kind](session, channel, kind, payload)

    def _commit_ok(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        commits = session.channel(number).commits
        of_client = bool(commits) and not commits[0].own
        replaced = method_table.FROM_BROKER[item[0]](session, number, data, item)
        if of_client:
            self._step(number, Step.COMMITTED)
        return replaced

    def _rollback_ok(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
        rollbacks = session.channel(number).rollbacks
        if rollbacks and rollbacks[0]:
            self._step(number, Step.ROLLED_BACK)
        return method_table.FROM_BROKER[item[0]](session, number, data, item)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def channel_ended(self, number: int, cause: Cause = Cause.CHANNEL) -> None:
        """No more frames are taken from or given to this channel."""
        self._passed.pop(number, None)
        self._release(number, cause)
        for tag in list(self._consumers.get(number, ())):
            self._cancelling(number, tag, cause)
        self._consumers.pop(number, None)

    def client_gone(self) -> None:
        """The client is gone."""
        for number in sorted({*self._held, *self._consumers}):
            self.channel_ended(number, Cause.CONNECTION)


def _plain(message: Message) -> str:
    """The queue of a publish to the default exchange; else empty."""
    return "" if message.exchange else message.routing_key


def _tag(data: bytes, item: Item) -> bytes:
    """The consumer tag at the beginning of a method of the broker."""
    at = item[2] + 4
    return bytes(data[at + 1 : at + 1 + data[at]])


def _as_given(data: bytes, item: Item, replaced: bytes | None) -> bytes:
    """The method of a delivery as the client gets it: the door may set another redelivered flag than the broker."""
    return data[item[2] : item[3]] if replaced is None else replaced[7 : 7 + item[3] - item[2]]


def _position(header: bytes) -> Position | None:
    """A message's position in the log."""
    if b"x-lrq-pos" not in header:
        return None
    try:
        raw = stamps.position(header)
        epoch, sequence, _ = parse_stamp(raw) if raw is not None else (0, 0, 0)
    except LrqError:
        return None
    return Position(epoch, sequence) if sequence else None
