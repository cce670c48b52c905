"""Writes the log's messages to one vhost: publishes them, and handles the broker's answers.

Rules:
- Publish tags of a channel are consecutive, so the open messages are a deque, and a tag is an index into it.
- Where the broker closes a channel, an unanswered message may be in its queue, or a full queue was about to refuse
  it. A resend needs a new generation (R8), so this ends the incarnation. A missing exchange is seldom the reason: the
  broker is asked for an exchange before any message goes there.
- The channel of a direct reply-to has gone with its broker, or with this broker's sidecar. So a request gets an
  address where no client hears the answer, and an answer that is in the log, for the sake of further queues that it
  names, goes there.
- A message that the broker will never take (a malformed property, an internal exchange) must not end one incarnation
  after the other. AMQP does not name the message, so the next incarnation sends the suspect entries one by one. A
  message that was alone on a closed channel caused the closing, and is passed over.
- A follower is told of a message for a queue that is not here. Before the queue is declared, that is as on the
  primary. So the return counts only once all entries are carried out that the log had then, and if the log still
  declares the queue: then the queue was deleted here, around the door.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb

from ..amqp import direct_reply, encode, frames
from ..amqp.address import Address
from ..amqp.connection import Channel, Connection
from ..amqp.content_header import BODY_SIZE_END, asked_by_nobody, routes_on
from ..amqp.errors import BrokerRefuses, ChannelClosed, grant, impersonate
from ..amqp.vhosts import open_vhost
from ..log.replica import Replica
from ..log.shortfall import reinit
from ..log.stamps import StampCache, find_stamp, position_field, stamp
from .declarer import LACKS_RIGHTS, PASSED_OVER, Declarer
from .parked_messages import ParkedMessages
from .parking_lot import Message, OnFull, Route
from .waits import Waits

log = logging.getLogger("lrq_ha.applier")

DOUBTFUL_MAX = 1_000  # queues
CONNECTIONS_OVER_A_MESSAGE = frozenset({501, 502, 503, 505, 541})  # close codes of a broker that cannot take a message
STRIKES_MAX = 3  # a suspect message is sent alone so often, as the broker itself may be the cause

# Refusals for a reason of this broker alone, which another broker may lack, and the remedy: no message is passed over
# for them.
_CURABLE: tuple[tuple[str, Callable[[Address], str]], ...] = (
    ("user_id property set to", lambda address: impersonate(address.user)),
    ("message size", lambda _address: "set one max_message_size on all brokers of the group"),
    (LACKS_RIGHTS, lambda address: f"{grant(address.vhost, address.user)}, and then set_topic_permissions where there are any"),
)


@dataclass(frozen=True, slots=True)
class SuspectEntries:
    """The broker ended a channel or the connection over one of the entries up to `upto`.

    `alone`: the entry that was alone under way, `strikes` times in all; 0: which entry it was is unknown.
    """

    upto: int
    alone: int = 0
    strikes: int = 0

    @classmethod
    def over(cls, sequences: list[int], before: SuspectEntries | None) -> SuspectEntries:
        """After these entries were under way. `before`: the suspects known until then."""
        if len(sequences) > 1:
            return cls(max(sequences))
        [alone] = sequences
        upto, strikes = (before.upto, before.strikes if before.alone == alone else 0) if before else (alone, 0)
        return cls(max(upto, alone), alone, strikes + 1)


@dataclass(slots=True)
class Window:
    """The unconfirmed messages of all VhostWriters, without the parked ones."""

    messages_max: int
    bytes_max: int
    messages: int = 0
    bytes: int = 0

    @property
    def full(self) -> bool:
        return self.messages >= self.messages_max or self.bytes >= self.bytes_max

    @property
    def roomy(self) -> bool:
        """Whether a full window has enough room again for more than one message at a time."""
        return 4 * self.messages < 3 * self.messages_max and 4 * self.bytes < 3 * self.bytes_max

    def remove(self, message: Message) -> None:
        self.messages -= 1
        self.bytes -= message.size


class VhostWriter:
    """Writes to one vhost. Made by `open` only.

    Attributes:
        vhost: The vhost.
        open_messages: Published and not answered, in order of their tags; None where a later one was answered first.
        parked: Refused messages, and those behind them.
        in_doubt: The entries over one of which the broker closed the channel or connection.
        declarer: Carries out declarations, over this connection.
    """

    def __init__(
        self, address: Address, connection: Connection, declarer: Declarer, replica: Replica, window: Window, waits: Waits, on_full: OnFull
    ) -> None:
        self.vhost = address.vhost
        self.declarer = declarer
        self.open_messages: deque[Message | None] = deque()
        self.parked = ParkedMessages(self.vhost, replica, declarer, self._send_parked, self._finish, on_full)
        self.in_doubt: list[int] = []
        self._address = address
        self._connection = connection
        self._replica = replica
        self._window = window
        self._waits = waits
        self._suffix = b"/%d" % replica.index.generations.newest
        self._me = replica.node.name(replica.node.me)
        self._channel: Channel
        self._broken: Exception | None = None
        self._tag = 1  # of open_messages[0]
        self._routes: dict[bytes, Route] = {}
        self._stamps = StampCache()
        self._doubtful: dict[str, int] = {}  # queues that a message did not find, and the end of the log then

    @classmethod
    async def open(cls, address: Address, replica: Replica, window: Window, waits: Waits, on_full: OnFull) -> VhostWriter:
        """Connects to the broker. Raises the errors of `open_vhost`."""
        connection = await open_vhost(address, address.vhost, frame_max_bytes=frames.FRAME_MAX_ANY_BYTES, on_close=lambda _error: waits.wake())
        declarer = Declarer(address, connection, replica.node.name(replica.node.me), replica.shortfall)
        lane = cls(address, connection, declarer, replica, window, waits, on_full)
        try:
            await lane._reopen()
        except BaseException:
            connection.abort()
            raise
        return lane

    async def _reopen(self) -> None:
        self._channel = await self._connection.channel(on_confirm=self._confirmed, on_return=self._returned, on_close=self._closed)
        await self._channel.confirm_select()
        self._tag = 1
        self._broken = None

    def _closed(self, error: Exception | None) -> None:
        self._broken = error
        self._waits.wake()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._connection.abort()
        self.declarer.abort()

    @property
    def settled(self) -> bool:
        """Whether everything published is confirmed, or was refused and is tried again."""
        return self._broken is None and all(m is None or m.retried for m in self.open_messages)

    # ---- publishing --------------------------------------------------------------------------------------------------

    async def write(self, run: pb.Enqueues, first: int, doubt: SuspectEntries | None) -> None:
        """Publishes the messages of the entries from `first` on, but for those that are not needed. `doubt`: the suspect entries."""
        replica, window = self._replica, self._window
        blob = run.frames
        items, used = frames.scan(blob, 0, frames.FRAME_MAX_ANY_BYTES)
        if used != len(blob) or len(items) != len(run.lengths):
            raise MalformedInput(f"entry {first} holds {len(items)} messages in {used} of {len(blob)} bytes, not {len(run.lengths)}")
        number = self._channel.number
        if run.channel != number:
            blob = encode.rechannel(blob, number)
        prefix = b"%d." % replica.node.log.epoch_at(first)
        leads = not replica.follows
        may_skip = replica.index.filter.may_skip
        applied = replica.progress.tracker.applied
        skipped_first = skipped_last = 0
        takes = {"": True}  # by exchange: whether it exists
        batch: list[Message] = []
        for offset, (kind, _, start, end, header, header_end, stop) in enumerate(items):
            sequence = first + offset
            if sequence <= applied:
                continue
            if kind != frames.BASIC_PUBLISH or not stop:
                raise MalformedInput(f"entry {sequence} is no whole publish")
            route = self._route(blob[start:end])
            payload = blob[header:header_end]
            if route.queues and routes_on(payload):
                route = route._replace(queues=())
            if may_skip(route.queues, sequence):
                if route.queues:
                    replica.index.filter.queue(route.queues[0]).skipped(sequence, sequence)
                if sequence != skipped_last + 1:
                    if skipped_first:
                        replica.progress.applied(skipped_first, skipped_last)
                    skipped_first = sequence
                skipped_last = sequence
                continue
            if route.exchange not in takes:
                takes[route.exchange] = await self._has_exchange(route.exchange, sequence)
            if not takes[route.exchange]:
                replica.passes_over(sequence)
                replica.progress.applied(sequence, sequence)
                continue
            message = Message(sequence, route, prefix, payload, blob, number, header_end, stop)
            if not leads:
                message.mandatory = not route.exchange and route.routing_key != direct_reply.NOBODY
            elif run.producer:
                message.mandatory = frames.publish_route(blob[start:end]).mandatory
            if doubt is not None and sequence <= doubt.upto:
                await self._write_alone(message, doubt)
                continue
            batch.append(message)
            if window.messages + len(batch) >= window.messages_max or window.full:
                self.publish(batch)
                batch = []
                await self._room()
                await self._waits.until(lambda: window.roomy)
        if skipped_first:
            replica.progress.applied(skipped_first, skipped_last)
        if batch:
            self.publish(batch)
            await self._room()
            if window.full:
                await self._waits.until(lambda: window.roomy)

    async def _write_alone(self, message: Message, doubt: SuspectEntries) -> None:
        """Publishes a suspect message with nothing else under way."""
        if message.sequence == doubt.alone and doubt.strikes >= STRIKES_MAX:
            self._pass_over(message.sequence, f"it has ended the connection {doubt.strikes} times over it")
            self._replica.progress.applied(message.sequence, message.sequence)
            return
        await self._waits.until(lambda: self.settled)
        self.publish([message])
        await self._waits.until(lambda: self.settled)

    def _route(self, method: bytes) -> Route:
        """The route of a basic.publish, by its frame's payload; cached."""
        found = self._routes.get(method)
        if found is None:
            if len(self._routes) >= frames.ROUTES_MAX:
                self._routes.clear()
            named = frames.publish_route(method)
            key = direct_reply.NOBODY if direct_reply.is_answer(method) else named.routing_key
            queues = () if named.exchange else ((self.vhost, key),)
            found = self._routes[method] = Route(named.exchange, key, queues)
        return found

    async def _has_exchange(self, exchange: str, sequence: int) -> bool:
        """Whether the exchange exists; else the log's messages for it from entry `sequence` on are to be passed over."""
        found = await self.declarer.has_exchange(exchange)
        if not found:
            log.warning("messages from entry %d on are passed over: there is no exchange '%s' in vhost '%s' here", sequence, exchange, self.vhost)
            declared = self._replica.declared
            if declared.definitions.exchange(self.vhost, exchange) and (self.vhost, exchange) not in declared.auto_delete_exchanges:
                self._note_missing("exchange", exchange, sequence)
        return found

    def publish(self, messages: list[Message]) -> None:
        """Sends messages, but for those that wait behind parked ones."""
        if self.parked.places:
            messages = self.parked.let_wait(messages)
        for message in messages:
            self._window.messages += 1
            self._window.bytes += message.size
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
                method = encode.publish_method(number, message.route.exchange, message.route.routing_key, message.mandatory)
            payload, sequence = message.payload, message.sequence
            stamps.renew((message.prefix, self._suffix), sequence)
            known = stamps.get(payload[BODY_SIZE_END:])
            if known is not None:
                before, after, _ = known
                payload = b"%b%b%d%b" % (payload[:BODY_SIZE_END], before, sequence, after)
            else:
                payload = stamp(asked_by_nobody(payload), position_field(b"%b%d%b" % (message.prefix, sequence, self._suffix)))
                stamps.learn(message.payload, payload, sequence)
            if message.stop - message.header_end > self._connection.frame_max_bytes:
                body = frames.body_of(message.blob, message.header_end, message.stop)
                pieces.append(method)
                pieces += encode.content(number, payload, body, self._connection.frame_max_bytes)
                continue
            bodies = message.blob[message.header_end + 1 : message.stop]
            if message.number != number:
                bodies = encode.rechannel(bodies, number)
            pieces += (b"%b%b%b\xce" % (method, encode.header_head(number, len(payload)), payload), bodies)
        count = len(self.open_messages) - open_before
        if count and self._channel.error is None:  # else they are among the suspect entries
            self._channel.publish_raw(pieces, count)

    async def _room(self) -> None:
        """Returns when the connection's write buffer has room."""
        if self._connection.paused:
            await self._connection.drained()

    async def _send_parked(self, messages: list[Message]) -> None:
        self._send(messages)
        await self._room()

    # ---- the broker's answers ----------------------------------------------------------------------------------------

    def _returned(self, _code: int, _text: str, exchange: str, key: str, header: bytes, _body: bytes) -> None:
        """Handles a message that reached no queue. On a primary the message's ID is free again, as its publisher
        was not told. On a follower a queue may be missing.
        """
        stamped = find_stamp(header)
        if stamped is None:
            return
        if not self._replica.follows:
            self._replica.passes_over(stamped[0])
        elif not exchange:
            self._not_found(key, stamped[0])

    def _not_found(self, queue: str, sequence: int) -> None:
        declared, key = self._replica.declared, (self.vhost, queue)
        if declared.queues.get(key, 1) or not declared.replicates(key):
            return
        if sequence <= self._doubtful.setdefault(queue, self._replica.node.log.end):
            if len(self._doubtful) > DOUBTFUL_MAX:
                del self._doubtful[next(iter(self._doubtful))]
            return
        self._note_missing("queue", queue, sequence)

    def _note_missing(self, kind: str, name: str, sequence: int) -> None:
        """Notes that messages from entry `sequence` on for this queue or exchange are not on this node."""
        text = f"{kind} '{name}' in vhost '{self.vhost}' is not on this node, and what is published to it not either: run {reinit(self._me)}"
        if self._replica.shortfall.note_gap((kind, self.vhost, name), text):
            log.error("%s (from entry %d on)", text, sequence)

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
                if not message.parked:
                    self._window.remove(message)
                self.parked.park(message)
        self._waits.wake()

    def _finish(self, messages: Iterable[Message]) -> None:
        """Marks messages as applied: they are in the queues, or not needed there."""
        first = last = 0
        room = False
        for message in messages:
            if message.parked:
                room = True
                self.parked.leave(message)
            else:
                self._window.remove(message)
            if message.sequence == last + 1 and first:
                last += 1
            else:
                if first:
                    self._replica.progress.applied(first, last)
                first = last = message.sequence
        if first:
            self._replica.progress.applied(first, last)
        if room:
            self._replica.progress.on_wake()  # peers that were held up may push again

    # ---- trying again ------------------------------------------------------------------------------------------------

    async def tend(self) -> float:
        """Opens a closed channel again and sends what has to be sent again. Returns the seconds until the next
        call is due.

        Raises:
            ConnectionClosed: The connection is lost.
            ChannelClosed: The broker closed the channel over one of these messages, and which one is unknown.
        """
        if self._connection.error is not None:
            raise self._connection.error
        if self._broken is not None:
            await self._heal([m for m in self.open_messages if m is not None], self._broken)
        return await self.parked.tend()

    def forget_queue(self, queue: str, kept: Callable[[int], bool]) -> int:
        """Forgets a queue that is to be deleted. Returns what `ParkedMessages.forget` returns."""
        self._doubtful.pop(queue, None)
        self._replica.shortfall.note_gap(("queue", self.vhost, queue), "")
        return self.parked.forget(queue, kept)

    def waits_for(self, queue: str) -> list[tuple[int, bool]]:
        """As `ParkedMessages.waits_for`, with the messages on their way."""
        return self.parked.waits_for(queue, (m for m in self.open_messages if m is not None and m.parked))

    async def _heal(self, unanswered: list[Message], error: Exception) -> None:
        """Opens the channel again if the broker closed it over one message that was alone on it."""
        if not isinstance(error, ChannelClosed):
            raise error
        todo = next((todo(self._address) for text, todo in _CURABLE if text in error.text), "")
        if todo:
            what = f"its broker does not take a message of the log, vhost '{self.vhost}': {error.code} {error.text}"
            raise BrokerRefuses(what, todo=todo) from error
        if len(unanswered) != 1 or error.code not in PASSED_OVER:
            self._doubt()
            raise error
        self.open_messages.clear()
        self._pass_over(unanswered[0].sequence, f"{error.code} {error.text}")
        self._finish(unanswered)
        await self._reopen()

    def judge_end(self) -> None:
        """Notes the suspect entries if the broker ended the connection over a message: another user of the
        connection may see the end first.
        """
        error = self._connection.error
        if error is not None and error.code in CONNECTIONS_OVER_A_MESSAGE and not self.in_doubt:
            self._doubt()

    def _doubt(self) -> None:
        self.in_doubt = [m.sequence for m in self.open_messages if m is not None]

    def _pass_over(self, sequence: int, why: str) -> None:
        """Passes over entry `sequence`, a message that this broker does not take."""
        log.error("the message of entry %d, vhost '%s', is passed over, as the broker will not take it: %s", sequence, self.vhost, why)
        self._replica.passes_over(sequence)
