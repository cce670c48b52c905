"""Writes the log's messages to one vhost: publishes them, handles the broker's answers, and sends again where
needed.

Rules:
- Publish tags of a channel are consecutive, so the open messages are a deque, and a tag is an index into it.
- A message that the broker refused (a full reject-publish queue) is parked by the queues that may have refused it
  (`queue_limits`). A later message that may reach one of these queues waits behind it; all other messages go on, as a
  parked message takes no place in the window. A parked message is tried again until it is in, or until the log says
  that no queue needs it. Messages parked for one queue alone go with that queue: a queue that is deleted and declared
  again has nothing from before.
- If one of several queues is full, the broker refuses the message, and the other queues have it nevertheless. Each
  retry through the exchange would add copies there, and a full drop-head queue would lose a live message. So where
  only one queue can have refused the message, it goes through its exchange once, and then to that queue alone,
  through an exchange of this node's own that leads nowhere else. A publish by the queue's name would lose the routing
  keys, which consumers and dead-lettering may need.
- The queues that may have refused a message are decided at the first refusal, by the part of the log that this node
  had carried out then. Later bindings and unbindings do not change the queues that lack the message.
- Where several queues may have refused a message, or none is known, the queues that have it are unknown. The message
  is tried again when all of these have room, as far as the broker tells, one message first, and less often after each
  refusal: each try may leave a second copy.
- A message that has not been through its exchange does not wait without end behind messages parked for one of its
  queues, as its other queues would wait too. Such a message waits only while the parked ones move, as it could
  overtake them.
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

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappush
from itertools import chain

from lrq_ha.replication.queues import QueueKey

from ..amqp import direct_reply, encode, frames
from ..amqp.address import Address
from ..amqp.connection import Channel, Connection
from ..amqp.content_header import BODY_SIZE_END, asked_by_nobody, further_keys, routes_on
from ..amqp.errors import BrokerRefuses, ChannelClosed, ConnectionClosed, grant, impersonate
from ..amqp.vhosts import open_vhost
from ..log.replica import Replica
from ..log.shortfall import reinit
from ..log.stamps import StampCache, find_stamp, position_field, stamp
from .declarer import LACKS_RIGHTS, PASSED_OVER, Declarer
from .parking_lot import RETRY_MESSAGES_MIN, RETRY_S, Message, ParkingLot, Place, Route, alone, batch_min, leaves_copies, refuser, told
from .queue_limits import QueueLimits, Reach

log = logging.getLogger("lrq_ha.applier")

RETRY_MESSAGES_MAX = 1_024
RETRY_ROUTED_MAX_S = 60.0
DOUBTFUL_MAX = 1_000  # queues
PARKED_MESSAGE_BYTES = 512  # of memory for each message, beside its own bytes
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


class VhostWriter:
    """Writes to one vhost. Made by `open` only.

    Attributes:
        vhost: The vhost.
        open_messages: Published and not answered, in order of their tags; None where a later one was answered first.
        parked: Refused messages, and those behind them, by place.
        in_doubt: The entries over one of which the broker closed the channel or connection.
        declarer: Carries out declarations, over this connection.
    """

    def __init__(
        self, vhost: str, replica: Replica, window: Window, wake: Callable[[], None], on_full: Callable[[QueueKey | None], None]
    ) -> None:
        self.vhost = vhost
        self.open_messages: deque[Message | None] = deque()
        self.parked: dict[Place, ParkingLot] = {}
        self.in_doubt: list[int] = []
        self._replica = replica
        self._window = window
        self._wake = wake
        self._on_full = on_full
        self._limits = QueueLimits(replica.declared, vhost, replica.reached)
        self._not_alone: set[str] = set()  # queues to which no exchange of this node's own can lead
        self._suffix = b"/%d" % replica.index.generations.newest
        self._me = replica.node.name(replica.node.me)
        self.declarer: Declarer
        self._address: Address
        self._connection: Connection
        self._channel: Channel
        self._broken: Exception | None = None
        self._tag = 1  # of open_messages[0]
        self._routes: dict[bytes, Route] = {}
        self._stamps = StampCache()
        self._doubtful: dict[str, int] = {}  # queues that a message did not find, and the end of the log then

    @classmethod
    async def open(
        cls, address: Address, replica: Replica, window: Window, wake: Callable[[], None], on_full: Callable[[QueueKey | None], None]
    ) -> VhostWriter:
        """Connects to the broker. Raises the errors of `open_vhost`."""
        lane = cls(address.vhost, replica, window, wake, on_full)
        lane._connection = await open_vhost(address, address.vhost, frame_max_bytes=frames.FRAME_MAX_ANY_BYTES, on_close=lambda _error: wake())
        lane._address = address
        lane.declarer = Declarer(address, lane._connection, lane._me, replica.shortfall)
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
        self.declarer.abort()

    @property
    def number(self) -> int:
        """The channel number of the frames sent."""
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

    def full(self) -> list[str]:
        """For operators: the full queues, and how many messages wait for room there."""
        return [
            f"{told(place)} in vhost '{self.vhost}' is full here, and {len(parked.waiting) + parked.flying} messages wait for room"
            for place, parked in self.parked.items()
            if parked.waiting or parked.flying
        ]

    # ---- publishing --------------------------------------------------------------------------------------------------

    def route(self, method: bytes) -> Route:
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

    async def has_exchange(self, exchange: str, sequence: int) -> bool:
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
        if self.parked:
            messages = self._let_wait(messages)
        for message in messages:
            self._window.messages += 1
            self._window.bytes += message.size
        self._send(messages)

    def _let_wait(self, messages: list[Message]) -> list[Message]:
        """Parks the messages that would overtake parked ones; returns the others."""
        now = time.monotonic()
        moving = {queue for place, parked in self.parked.items() if not (isinstance(place, Route) or parked.is_stuck(now)) for queue in place}
        free = []
        for message in messages:
            place = message.route if message.route in self.parked else self._place(message)
            parked = self.parked.get(place)
            if parked is not None:
                waits = not (parked.is_stuck(now) and refuser(message, place) is not None)
            else:
                waits = not (isinstance(place, Route) or place.isdisjoint(moving))
            if waits:
                self._keep(place, message)
            else:
                free.append(message)
        return free

    def _place(self, message: Message) -> Place:
        route = message.route
        if route.queues:
            return frozenset((route.queues[0][1],))
        return self._reach(message).refuse or route

    def _reach(self, message: Message) -> Reach:
        further = further_keys(message.payload) if routes_on(message.payload) else ()
        return self._limits.reach(message.route.exchange, (message.route.routing_key, *further))

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

    async def room(self) -> None:
        """Returns when the connection's write buffer has room."""
        if self._connection.paused:
            await self._connection.drained()

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
                self._park(message)
        self._wake()

    def _finish(self, messages: Iterable[Message]) -> None:
        """Marks messages as applied: they are in the queues, or not needed there."""
        first = last = 0
        room = False
        for message in messages:
            if message.parked:
                room = True
                self._replica.progress.parked.remove(message.sequence)
                self._replica.progress.parked_bytes -= message.size + PARKED_MESSAGE_BYTES
            else:
                self._window.messages -= 1
                self._window.bytes -= message.size
            if message.retried:
                self._landed(message)
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

    def _landed(self, message: Message) -> None:
        message.retried = False
        parked = self.parked.get(message.place)
        if parked is not None:
            parked.flying -= 1
            parked.moved = time.monotonic()
            if not parked.flying and not parked.refused:  # the whole round went in: more at once
                parked.batch = min(2 * parked.batch, RETRY_MESSAGES_MAX)
                parked.at = 0.0

    def _park(self, message: Message) -> None:
        tried = message.retried
        if tried:
            message.retried = False
            self.parked[message.place].flying -= 1
        if message.refusers is None:
            self._refused(message)
        if not message.parked:
            self._window.messages -= 1
            self._window.bytes -= message.size
        place = message.place
        is_new = place not in self.parked
        parked = self._keep(place, message)
        if is_new:
            log.warning("the broker refuses messages for %s in vhost '%s': they are tried again until it takes them", told(place), self.vhost)
        if is_new or (tried and not parked.refused):  # else one more refusal of many, and each would put off the next try
            parked.batch = batch_min(place)
            parked.refused = True
            parked.at = time.monotonic() + parked.pause_s
            self._kick(place)

    def _refused(self, message: Message) -> None:
        """Decides at the first refusal where a message waits and goes from now on, whatever is bound or declared later."""
        message.place = self._place(message)
        if message.route.queues:
            message.refusers = frozenset((message.route.queues[0][1],))
            return
        reach = self._reach(message)
        message.refusers = reach.refuse or reach.queues
        queue = refuser(message, message.place)
        if queue in self._not_alone:
            message.place = message.route
        elif queue is not None:
            message.route = Route(alone(queue), message.route.routing_key, ((self.vhost, queue),))
            message.mandatory = False

    def _kick(self, place: Place) -> None:
        if isinstance(place, Route):
            self._on_full(None)
        else:
            for queue in place:
                self._on_full((self.vhost, queue))

    def _keep(self, place: Place, message: Message) -> ParkingLot:
        """Parks a message, outside of the window."""
        if not message.parked:
            message.parked = True
            message.part()
            self._replica.progress.parked.add(message.sequence)
            self._replica.progress.parked_bytes += message.size + PARKED_MESSAGE_BYTES
        parked = self.parked.get(place)
        if parked is None:
            parked = self.parked[place] = ParkingLot(time.monotonic(), batch_min(place))
        message.place = place
        if message.route != message.origin:
            parked.alone = message.route.queues[0][1]
        parked.holds_others = parked.holds_others or refuser(message, place) is not None
        heappush(parked.waiting, (message.sequence, message))
        return parked

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
            await self._heal(self._broken)
        if not self.parked:
            return 3600.0
        now = time.monotonic()
        several = any(not isinstance(place, Route) and len(place) > 1 for place in self.parked)
        for place, parked in list(self.parked.items()):
            if parked.flying:
                continue
            while parked.waiting and self._is_needless(parked.waiting[0][1]):
                parked.put_back(self._needed(parked.take(RETRY_MESSAGES_MAX)))
                await asyncio.sleep(0)
            if not parked.waiting:
                del self.parked[place]
                if parked.alone:
                    await self.declarer.remove_exchange(alone(parked.alone))
            elif parked.at <= now:
                await self._try_again(place, parked, now, several)
        return min((p.at - now for p in self.parked.values() if not p.flying), default=3600.0)

    async def _try_again(self, place: Place, parked: ParkingLot, now: float, several: bool) -> None:
        """Tries messages of one place again. `several`: some place has several queues; only then may places overlap."""
        self._kick(place)
        room = await self._room(place)
        needed = self._needed(parked.take(max(parked.batch, RETRY_MESSAGES_MIN)))
        is_behind = bool(needed) and several and self._is_behind_others(place, needed[0].sequence, now)
        count = 0 if is_behind else max(0, min(parked.batch, room))
        parked.put_back(needed[count:])
        if needed and not count:
            parked.at = now + RETRY_S
            return
        del needed[count:]
        if parked.holds_others and parked.is_stuck(now):
            needed += self._needed(parked.take_others(RETRY_MESSAGES_MAX))
        if parked.alone and not await self.declarer.lead_to(parked.alone, alone(parked.alone)):
            parked.put_back(needed)
            self._go_as_they_came(parked)
            return
        for message in needed:
            message.retried = True
        parked.flying += len(needed)
        if leaves_copies(place):
            parked.pause_s = min(2 * parked.pause_s, RETRY_ROUTED_MAX_S) if parked.refused else RETRY_S
        parked.refused = False
        self._send(needed)
        await self.room()

    def _go_as_they_came(self, parked: ParkingLot) -> None:
        """Sends parked messages through their original exchange again, as no exchange of this node's own can lead to their queue."""
        what = "there is another exchange '%s' in vhost '%s' than this node's own: what queue '%s' refuses is tried again through its exchange"
        log.warning(f"{what}, and may come twice to others", alone(parked.alone), self.vhost, parked.alone)
        self._not_alone.add(parked.alone)
        parked.alone = ""
        for message in parked.take_where(lambda message: message.route != message.origin):
            message.route = message.origin
            self._keep(message.route, message)

    def _is_behind_others(self, place: Place, sequence: int, now: float) -> bool:
        """Whether entry `sequence` waits for messages parked in other places, as both may reach one full queue."""
        if isinstance(place, Route):
            return False
        others = ((other, parked) for other, parked in self.parked.items() if other != place and not isinstance(other, Route))
        return any(not place.isdisjoint(other) and parked.goes_before(sequence, now) for other, parked in others)

    async def _room(self, place: Place) -> int:
        """How many messages may be tried again: where several queues may refuse them, the least known room of these queues."""
        room = RETRY_MESSAGES_MAX
        if not isinstance(place, Route) and len(place) > 1:
            for queue in place:
                length_max = self._limits.length_max(queue)
                if length_max is not None:
                    room = min(room, length_max - await self.declarer.ready(queue))
        return room

    def _needed(self, messages: list[Message]) -> list[Message]:
        """The messages that the log still wants in the queues; the others count as applied, though copies of them may exist."""
        needless = [message for message in messages if self._is_needless(message)]
        if not needless:
            return messages
        for message in needless:
            for queue in message.route.queues:
                self._replica.index.filter.queue(queue).skipped(message.sequence, message.sequence)
        self._finish(needless)
        gone = set(map(id, needless))
        return [m for m in messages if id(m) not in gone]

    def _is_needless(self, message: Message) -> bool:
        """Whether the log wants the message neither in its one queue, nor in any queue that may have refused it."""
        skip, has_died, sequence = self._replica.index.filter.may_skip, self._replica.barrier.has_died, message.sequence
        queues: Iterable[QueueKey] = message.route.queues
        if not queues and message.refusers is not None:
            queues = [(self.vhost, queue) for queue in message.refusers]
        return skip((), sequence) or (bool(queues) and all(skip((queue,), sequence) or has_died(queue, sequence) for queue in queues))

    def forget_queue(self, queue: str, kept: Callable[[int], bool]) -> int:
        """Forgets the messages parked for a queue alone that is to be deleted. Returns how many remain: to be
        `kept`, or on their way.
        """
        self._doubtful.pop(queue, None)
        self._replica.shortfall.note_gap(("queue", self.vhost, queue), "")
        parked = self.parked.get(frozenset((queue,)))
        if parked is None:
            return 0
        self._finish(parked.take_where(lambda message: bool(message.route.queues) and not kept(message.sequence)))
        return self.parked_for(queue, kept)

    def parked_for(self, queue: str, which: Callable[[int], bool]) -> int:
        """How many messages parked for a queue alone match `which`, or are being tried again."""
        parked = self.parked.get(frozenset((queue,)))
        return parked.flying + sum(which(sequence) for sequence, m in parked.waiting if m.route.queues) if parked is not None else 0

    def waits_for(self, queue: str) -> list[tuple[int, bool]]:
        """The messages that wait, or may wait, for room in a queue: (entry, whether it came by the queue's name),
        ascending. Includes those being tried again.
        """
        waiting = (message for parked in self.parked.values() for _, message in parked.waiting)
        flying = (message for message in self.open_messages if message is not None and message.parked)
        by_name = ((self.vhost, queue),)
        found = []
        for message in chain(waiting, flying):
            places = message.refusers if message.refusers is not None else message.place
            if not isinstance(places, Route) and queue in places:
                found.append((message.sequence, message.origin.queues == by_name))
        return sorted(found)

    async def _heal(self, error: Exception) -> None:
        if isinstance(error, ConnectionClosed) or not isinstance(error, ChannelClosed):
            raise error
        await self._over_a_message([m for m in self.open_messages if m is not None], error)

    async def _over_a_message(self, unanswered: list[Message], error: ChannelClosed) -> None:
        """The broker closed the channel over one of these messages."""
        todo = next((todo(self._address) for text, todo in _CURABLE if text in error.text), "")
        if todo:
            what = f"its broker does not take a message of the log, vhost '{self.vhost}': {error.code} {error.text}"
            raise BrokerRefuses(what, todo=todo) from error
        if len(unanswered) != 1 or error.code not in PASSED_OVER:
            self._doubt()
            raise error
        self.open_messages.clear()
        self.pass_over(unanswered[0].sequence, f"{error.code} {error.text}")
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

    def pass_over(self, sequence: int, why: str) -> None:
        """Passes over entry `sequence`, a message that this broker does not take."""
        log.error("the message of entry %d, vhost '%s', is passed over, as the broker will not take it: %s", sequence, self.vhost, why)
        self._replica.passes_over(sequence)
