"""The applier's way to one vhost: publishes, what the broker said of them, and what has to be sent again.

Rules:
- Publish tags of a channel are consecutive, so the open messages are a deque, and a tag is an index into it.
- A message that the broker refused (a full reject-publish queue) is parked by its route; what comes later on that route waits behind it, and
  everything else goes on. It is tried again until it is in, or until the log says that nobody needs it.
- A channel that the broker closed over an exchange that takes nothing is opened again and gets what came from there on; what it was sent before is in
  the queues, as a channel is carried out in order. Any other error ends the incarnation: what is sent again needs a new generation (R8).
- A message that the broker will never take (a malformed property) must not end one incarnation after the other. AMQP does not say which it was, so
  the next one sends what is in doubt one by one; a channel that is closed over a message that was alone on it is that one's, and it is passed over.
- Declarations go over a channel of their own: their failures concern no message.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lrq_ha.replication.errors import LrqError

from . import frames
from .channels import QueueKey
from .client import Channel, Connection
from .client_errors import Address, ChannelClosed, ConnectionClosed
from .headers import BODY_SIZE_END, Stamps, position_field, routes_on, stamp
from .replica import Replica

log = logging.getLogger("lrq_ha.applier")

RETRY_S = 0.2
RETRY_MESSAGES_MIN = 16
RETRY_MESSAGES_MAX = 1_024
PASSED_OVER = frozenset({403, 404, 405, 406})  # a declaration that this broker refuses so is counted as done
CONNECTIONS_OVER_A_MESSAGE = frozenset({501, 502, 503, 505, 541})  # a broker may close a connection so over what it cannot take
STRIKES_MAX = 3  # so often such a message is sent alone: this may also be the broker's own trouble

_NO_EXCHANGE = re.compile(r"no exchange '(.*)' in vhost")
_INTERNAL_EXCHANGE = re.compile(r"cannot publish to internal exchange '(.*)' in vhost")
#: What a broker refuses for its own part, and another may have taken: nothing is passed over for that.
_CURABLE = (
    ("user_id property set to", "let the sidecar's user publish for others: rabbitmqctl set_user_tags USER administrator impersonator"),
    ("message size", "let max_message_size be the same on all brokers of the group"),
    ("access to ", "give the sidecar's user all permissions, on topics, too: rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'"),
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Over one of the entries up to `upto` the broker has ended a channel or the connection.

    `alone`: over this one, as nothing else was under way, and `strikes` times; 0: nobody knows.
    """

    upto: int
    alone: int = 0
    strikes: int = 0

    @classmethod
    def over(cls, sequences: list[int], before: Doubt | None) -> Doubt:
        """After these were under way. `before`: what was known."""
        if len(sequences) > 1:
            return cls(max(sequences))
        [alone] = sequences
        upto, strikes = (before.upto, before.strikes if before.alone == alone else 0) if before else (alone, 0)
        return cls(max(upto, alone), alone, strikes + 1)


class Route(NamedTuple):
    """Where a message goes. `queues`: its one queue if it goes to the default exchange, else empty."""

    exchange: str
    routing_key: str
    queues: tuple[QueueKey, ...]


class Message:
    """A message on its way. `header_end`, `stop`: in `blob`, whose frames carry channel `number`; `payload`: its content header's."""

    __slots__ = ("blob", "header_end", "mandatory", "number", "payload", "prefix", "retried", "route", "sequence", "size", "stop")

    def __init__(
        self, sequence: int, route: Route, prefix: bytes, payload: bytes, blob: bytes, number: int, header_end: int, stop: int
    ) -> None:
        self.sequence = sequence
        self.route = route
        self.prefix = prefix
        self.payload = payload
        self.blob = blob
        self.number = number
        self.header_end = header_end
        self.stop = stop
        self.size = len(payload) + stop - header_end
        self.retried = False
        self.mandatory = False  # whether this node is to hear that it is in no queue


@dataclass(slots=True)
class Window:
    """What is unconfirmed over all lanes."""

    messages_max: int
    bytes_max: int
    messages: int = 0
    bytes: int = 0

    @property
    def full(self) -> bool:
        return self.messages >= self.messages_max or self.bytes >= self.bytes_max

    @property
    def roomy(self) -> bool:
        """Whether it pays to go on after it was full: not for one message at a time."""
        return 4 * self.messages < 3 * self.messages_max and 4 * self.bytes < 3 * self.bytes_max


@dataclass(slots=True)
class _Parked:
    """Messages of one route that the broker would not take. `flying`: tried again and not answered yet."""

    waiting: deque[Message] = field(default_factory=deque)
    at: float = 0.0
    batch: int = RETRY_MESSAGES_MIN
    flying: int = 0
    refused: bool = False  # one of this round


class Lane:
    """See above. Made by `open` only.

    Attributes:
        vhost: Its vhost.
        open_messages: Published and not answered, in order of their tags; None where a later one was answered first.
        parked: Refused ones, by route.
        in_doubt: The entries over one of which the broker ended this.
    """

    def __init__(
        self, vhost: str, replica: Replica, window: Window, wake: Callable[[], None], on_full: Callable[[QueueKey | None], None]
    ) -> None:
        self.vhost = vhost
        self.open_messages: deque[Message | None] = deque()
        self.parked: dict[Route, _Parked] = {}
        self.in_doubt: list[int] = []
        self._replica = replica
        self._window = window
        self._wake = wake
        self._on_full = on_full
        self._suffix = b"/%d" % replica.generations.newest
        self._connection: Connection
        self._channel: Channel
        self._control: Channel | None = None
        self._broken: Exception | None = None
        self._tag = 1  # of open_messages[0]
        self._routes: dict[bytes, Route] = {}
        self._stamps = Stamps()

    @classmethod
    async def open(
        cls, address: Address, replica: Replica, window: Window, wake: Callable[[], None], on_full: Callable[[QueueKey | None], None]
    ) -> Lane:
        """Connects to the broker. Raises what `Connection.open` raises."""
        lane = cls(address.vhost, replica, window, wake, on_full)
        lane._connection = await Connection.open(address, frame_max_bytes=frames.FRAME_MAX_ANY_BYTES, on_close=lambda _error: wake())
        try:
            await lane._reopen()
        except BaseException:
            lane._connection.abort()
            raise
        return lane

    async def _reopen(self) -> None:
        self._channel = await self._connection.channel(on_confirm=self._confirmed, on_return=self._returned, on_close=self._closed)
        await self._channel.confirm_select()
        self._tag = 1
        self._broken = None

    def _closed(self, error: Exception | None) -> None:
        self._broken = error
        self._wake()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._connection.abort()

    @property
    def number(self) -> int:
        """The channel number that its frames carry."""
        return self._channel.number

    @property
    def idle(self) -> bool:
        """Whether everything published is confirmed."""
        return not self.open_messages and not self.parked and self._broken is None

    @property
    def settled(self) -> bool:
        """Whether everything published is confirmed, or was refused and is tried again."""
        if not self.parked:
            return self.idle
        return self._broken is None and all(m is None or m.retried for m in self.open_messages)

    def parked_sequences(self) -> Iterator[int]:
        """The entries that the broker has refused and that are tried again."""
        for parked in self.parked.values():
            yield from (m.sequence for m in parked.waiting)
        yield from (m.sequence for m in self.open_messages if m is not None and m.retried)

    # ---- publishing --------------------------------------------------------------------------------------------------

    def route(self, method: bytes) -> Route:
        """The route of a basic.publish, by its frame's payload; remembered."""
        found = self._routes.get(method)
        if found is None:
            if len(self._routes) >= frames.ROUTES_MAX:
                self._routes.clear()
            named = frames.publish_route(method)
            queues = () if named.exchange else ((self.vhost, named.routing_key),)
            found = self._routes[method] = Route(named.exchange, named.routing_key, queues)
        return found

    def publish(self, messages: list[Message]) -> None:
        """Sends messages; those whose route is parked wait behind what is parked there."""
        for message in messages:
            self._window.messages += 1
            self._window.bytes += message.size
        if self.parked:
            free = []
            for message in messages:
                parked = self.parked.get(message.route)
                if parked is None:
                    free.append(message)
                else:
                    parked.waiting.append(message)
            messages = free
        self._send(messages)

    def _send(self, messages: Iterable[Message]) -> None:
        pieces: list[bytes] = []
        open_before = len(self.open_messages)
        number = self._channel.number
        stamps = self._stamps
        route: tuple[Route, bool] | None = None
        method = b""
        for message in messages:
            self.open_messages.append(message)
            if (message.route, message.mandatory) != route:
                route = message.route, message.mandatory
                method = frames.publish_method(number, message.route.exchange, message.route.routing_key, message.mandatory)
            payload, sequence = message.payload, message.sequence
            stamps.renew((message.prefix, self._suffix), sequence)
            known = stamps.get(payload[BODY_SIZE_END:])
            if known is not None:
                before, after, _ = known
                payload = b"%b%b%d%b" % (payload[:BODY_SIZE_END], before, sequence, after)
            else:
                payload = stamp(payload, position_field(b"%b%d%b" % (message.prefix, sequence, self._suffix)))
                stamps.learn(message.payload, payload, sequence)
            if message.stop - message.header_end > self._connection.frame_max_bytes:
                body = frames.body_of(message.blob, message.header_end, message.stop)
                pieces.append(method)
                pieces += frames.content(number, payload, body, self._connection.frame_max_bytes)
                continue
            bodies = message.blob[message.header_end + 1 : message.stop]
            if message.number != number:
                bodies = frames.rechannel(bodies, number)
            pieces += (b"%b%b%b\xce" % (method, frames.header_head(number, len(payload)), payload), bodies)
        count = len(self.open_messages) - open_before
        if count and self._channel.error is None:  # else `tend` sends them
            self._channel.publish_raw(pieces, count)

    async def room(self) -> None:
        """Returns when the connection's write buffer has room."""
        if self._connection.paused:
            await self._connection.drained()

    # ---- what the broker says ----------------------------------------------------------------------------------------

    def _returned(self, _code: int, _text: str, _exchange: str, _key: str, header: bytes, _body: bytes) -> None:
        """It goes nowhere, and its publisher was to be told: as he was not, its ID is free again."""
        stamped = self._replica.stamp_of(header)
        if stamped is not None:
            self._replica.passes_over(stamped[0])

    def _confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        waiting = self.open_messages
        if multiple:
            count = tag - self._tag + 1 if tag else len(waiting)
            settled = [m for m in (waiting.popleft() for _ in range(count)) if m is not None]
            self._tag += count
        elif tag == self._tag:
            settled = [m for m in (waiting.popleft(),) if m is not None]
            self._tag += 1
        else:
            settled = [m for m in (waiting[tag - self._tag],) if m is not None]
            waiting[tag - self._tag] = None
        while waiting and waiting[0] is None:
            waiting.popleft()
            self._tag += 1
        if ok:
            self._finish(settled)
        else:
            for message in settled:
                self._park(message)
        self._wake()

    def _finish(self, messages: Iterable[Message]) -> None:
        """These are in the queues, or need not be."""
        first = last = 0
        for message in messages:
            self._window.messages -= 1
            self._window.bytes -= message.size
            if message.retried:
                self._landed(message)
            if message.sequence == last + 1 and first:
                last += 1
            else:
                if first:
                    self._replica.applied(first, last)
                first = last = message.sequence
        if first:
            self._replica.applied(first, last)

    def _landed(self, message: Message) -> None:
        message.retried = False
        parked = self.parked.get(message.route)
        if parked is not None:
            parked.flying -= 1
            if not parked.flying and not parked.refused:  # the whole round went in: more at once
                parked.batch = min(2 * parked.batch, RETRY_MESSAGES_MAX)
                parked.at = 0.0

    def _park(self, message: Message) -> None:
        parked = self.parked.get(message.route)
        if parked is None:
            log.warning(
                "the broker refuses messages for %s in vhost '%s' (a full queue?): they are tried again until it takes them",
                f"exchange '{message.route.exchange}'" if message.route.exchange else f"queue '{message.route.routing_key}'",
                self.vhost,
            )
            parked = self.parked[message.route] = _Parked()
        if message.retried:
            message.retried = False
            parked.flying -= 1
        disordered = parked.waiting and message.sequence < parked.waiting[-1].sequence
        parked.waiting.append(message)
        if disordered:
            parked.waiting = deque(sorted(parked.waiting, key=lambda m: m.sequence))
        parked.batch = RETRY_MESSAGES_MIN
        parked.refused = True
        parked.at = time.monotonic() + RETRY_S
        self._on_full(message.route.queues[0] if message.route.queues else None)

    # ---- trying again ------------------------------------------------------------------------------------------------

    async def tend(self) -> float:
        """Opens a closed channel again and sends what has to be sent again. Returns the seconds until it should be called next.

        Raises:
            ConnectionClosed: The connection is lost.
            ChannelClosed: The broker closed the channel over one of these messages, and nobody can say which.
        """
        if self._connection.error is not None:
            if self._connection.error.code in CONNECTIONS_OVER_A_MESSAGE:
                self._doubt()
            raise self._connection.error
        if self._broken is not None:
            await self._heal(self._broken)
        if not self.parked:
            return 3600.0
        now = time.monotonic()
        for route, parked in list(self.parked.items()):
            if parked.flying or parked.at > now:
                continue
            if not parked.waiting:
                del self.parked[route]
                continue
            batch = [parked.waiting.popleft() for _ in range(min(parked.batch, len(parked.waiting)))]
            needed = self._needed(batch)
            for message in needed:
                message.retried = True
            parked.flying += len(needed)
            parked.refused = False
            self._on_full(route.queues[0] if route.queues else None)
            self._send(needed)
        return min((p.at - now for p in self.parked.values() if not p.flying), default=3600.0)

    def _needed(self, messages: list[Message]) -> list[Message]:
        """Those that the log still wants in the queues; the others count as applied. Copies of them may be there all the same."""
        skip = self._replica.filter.may_skip
        needless = [m for m in messages if skip(m.route.queues if not routes_on(m.payload) else (), m.sequence)]
        if not needless:
            return messages
        self._finish(needless)
        gone = set(map(id, needless))
        return [m for m in messages if id(m) not in gone]

    def forget_queue(self, queue: str) -> None:
        """The queue is being deleted: what is parked for it alone would go with it."""
        parked = self.parked.get(Route("", queue, ((self.vhost, queue),)))
        if parked is not None:
            dropped = [m for m in parked.waiting if not routes_on(m.payload)]
            parked.waiting = deque(m for m in parked.waiting if routes_on(m.payload))
            self._finish(dropped)

    async def _heal(self, error: Exception) -> None:
        if isinstance(error, ConnectionClosed) or not isinstance(error, ChannelClosed):
            raise error
        unanswered = [m for m in self.open_messages if m is not None]
        match = _NO_EXCHANGE.search(error.text) or _INTERNAL_EXCHANGE.search(error.text)
        first = next((i for i, m in enumerate(unanswered) if match is not None and m.route.exchange == match[1]), None)
        if match is None or first is None:
            await self._over_a_message(unanswered, error)
            return
        self.open_messages.clear()
        # What was sent before has been routed, with or without a confirm: sent again under the same generation, it would be there twice.
        landed, left = unanswered[:first], unanswered[first:]
        if await self._takes_nothing(match[1], error.code):
            passed = [m for m in left if m.route.exchange == match[1]]
            log.warning("%d messages to exchange '%s' in vhost '%s' are passed over: %s", len(passed), match[1], self.vhost, error.text)
            left = [m for m in left if m.route.exchange != match[1]]
            for message in passed:
                self._replica.passes_over(message.sequence)
            landed += passed
        self._finish(landed)
        await self._reopen()
        self._send(self._needed(left))

    async def _over_a_message(self, unanswered: list[Message], error: ChannelClosed) -> None:
        """The broker closed the channel over one of these."""
        todo = next((todo for text, todo in _CURABLE if text in error.text), "")
        if todo:
            raise LrqError(f"the broker does not take a message of the log, vhost '{self.vhost}': {error.code} {error.text}", todo=todo) from error
        if len(unanswered) != 1 or error.code not in PASSED_OVER:
            self._doubt()
            raise error
        self.open_messages.clear()
        self.pass_over(unanswered[0].sequence, f"{error.code} {error.text}")
        self._finish(unanswered)
        await self._reopen()

    def _doubt(self) -> None:
        self.in_doubt = [m.sequence for m in self.open_messages if m is not None]

    def pass_over(self, sequence: int, why: str) -> None:
        """Entry `sequence` is no message that this broker takes."""
        log.error("the message of entry %d, vhost '%s', is passed over, as the broker will not take it: %s", sequence, self.vhost, why)
        self._replica.passes_over(sequence)

    async def _takes_nothing(self, exchange: str, code: int) -> bool:
        """Whether nobody can publish to the exchange: it is internal, or still gone."""
        if code != 404:
            return True
        try:
            await (await self.control()).exchange_declare(exchange, passive=True)
        except ChannelClosed as error:
            if error.code == 404:
                return True
            raise
        return False

    # ---- declarations ------------------------------------------------------------------------------------------------

    async def control(self) -> Channel:
        """The channel for declarations."""
        if self._control is None or self._control.error is not None:
            self._control = await self._connection.channel()
        return self._control

    async def execute(self, payload: bytes) -> None:
        """Carries out a declaration of the log; one that this broker refuses is logged and passed over."""
        method, named, arguments = unconditional(payload)
        try:
            await (await self.control())._call(method, arguments)
        except ChannelClosed as error:
            if error.code not in PASSED_OVER:
                raise
            log.warning("a declaration of the primary is refused here, in vhost '%s', for %s: %s", self.vhost, "/".join(named), error.text)

    async def purge(self, queue: str) -> None:
        """Empties a queue."""
        try:
            await (await self.control()).queue_purge(queue)
        except ChannelClosed as error:
            if error.code not in PASSED_OVER:
                raise
            log.warning("queue '%s' in vhost '%s' cannot be purged here as on the primary: %s", queue, self.vhost, error.text)


_NAMES = {
    frames.EXCHANGE_DECLARE: 2,
    frames.EXCHANGE_DELETE: 1,
    frames.EXCHANGE_BIND: 3,
    frames.EXCHANGE_UNBIND: 3,
    frames.QUEUE_DECLARE: 1,
    frames.QUEUE_BIND: 3,
    frames.QUEUE_DELETE: 1,
    frames.QUEUE_UNBIND: 3,
}
_DECLARES = (frames.EXCHANGE_DECLARE, frames.QUEUE_DECLARE)
_DECLARE_BITS = 0b1110  # neither passive nor no-wait


def unconditional(payload: bytes) -> tuple[int, list[str], bytes]:
    """(method, names, arguments) of a declaration, exact to the octet but for its flags: answered, and without if_unused and if_empty.

    Raises:
        FrameError: It is none, or malformed.
    """
    method = frames.method_id(payload)
    names = []
    at = 6
    try:
        for _ in range(_NAMES[method]):
            end = at + 1 + payload[at]
            names.append(payload[at + 1 : end].decode("utf-8", "replace"))
            at = end
        if method == frames.QUEUE_UNBIND:
            return method, names, payload[4:]
        bits = payload[at] & _DECLARE_BITS if method in _DECLARES else 0
    except (IndexError, KeyError) as error:
        raise frames.FrameError(f"entry with method {method:#010x} is no declaration that can be carried out") from error
    return method, names, b"%b%c%b" % (payload[4:at], bits, payload[at + 1 :])
