"""The messages of one vhost that full queues refuse, and those that wait behind them, until they are in the queues.

Rules:
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
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from heapq import heappush
from itertools import chain

from lrq_ha.replication.queues import QueueKey

from ..amqp.content_header import further_keys, routes_on
from ..log.replica import Replica
from .declarer import Declarer
from .parking_lot import RETRY_MESSAGES_MIN, RETRY_S, Message, OnFull, ParkingLot, Place, Route, alone, batch_min, leaves_copies, refuser, told
from .queue_limits import QueueLimits, Reach

log = logging.getLogger("lrq_ha.applier")

RETRY_MESSAGES_MAX = 1_024
RETRY_ROUTED_MAX_S = 60.0
PARKED_MESSAGE_BYTES = 512  # of memory for each message, beside its own bytes


class ParkedMessages:
    """The parked messages of one vhost.

    Args:
        vhost: The vhost.
        replica: Knows which messages the queues still need.
        declarer: Makes this node's own exchanges, and counts the messages of a queue.
        send: Sends messages, and returns when there is room for more.
        finish: Marks messages as applied, and calls `leave` for each.

    Attributes:
        places: The messages by what they wait for.
    """

    def __init__(
        self, vhost: str, replica: Replica, declarer: Declarer, send: Callable[[list[Message]], Awaitable[None]],
        finish: Callable[[list[Message]], None], on_full: OnFull,
    ) -> None:  # fmt: skip
        self.places: dict[Place, ParkingLot] = {}
        self._vhost = vhost
        self._replica = replica
        self._declarer = declarer
        self._send = send
        self._finish = finish
        self._on_full = on_full
        self._limits = QueueLimits(replica.declared, vhost, replica.reached)
        self._not_alone: set[str] = set()  # queues to which no exchange of this node's own can lead

    def full(self) -> list[str]:
        """For operators: the full queues, and how many messages wait for room there."""
        return [
            f"{told(place)} in vhost '{self._vhost}' is full here, and {len(parked.waiting) + parked.flying} messages wait for room"
            for place, parked in self.places.items()
            if parked.waiting or parked.flying
        ]

    # ---- parking -----------------------------------------------------------------------------------------------------

    def let_wait(self, messages: list[Message]) -> list[Message]:
        """Parks the messages that would overtake parked ones; returns the others."""
        now = time.monotonic()
        moving = {queue for place, parked in self.places.items() if not (isinstance(place, Route) or parked.is_stuck(now)) for queue in place}
        free = []
        for message in messages:
            place = message.route if message.route in self.places else self._place(message)
            parked = self.places.get(place)
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

    def park(self, message: Message) -> None:
        """Parks a message that the broker refused."""
        tried = message.retried
        if tried:
            message.retried = False
            self.places[message.place].flying -= 1
        if message.refusers is None:
            self._decide(message)
        place = message.place
        is_new = place not in self.places
        parked = self._keep(place, message)
        if is_new:
            log.warning("the broker refuses messages for %s in vhost '%s': they are tried again until it takes them", told(place), self._vhost)
        if is_new or (tried and not parked.refused):  # else one more refusal of many, and each would put off the next try
            parked.batch = batch_min(place)
            parked.refused = True
            parked.at = time.monotonic() + parked.pause_s
            self._kick(place)

    def _decide(self, message: Message) -> None:
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
            message.route = Route(alone(queue), message.route.routing_key, ((self._vhost, queue),))
            message.mandatory = False

    def leave(self, message: Message) -> None:
        """A parked message is in its queue, or not needed there."""
        self._replica.progress.parked.remove(message.sequence)
        self._replica.progress.parked_bytes -= message.size + PARKED_MESSAGE_BYTES
        if not message.retried:
            return
        message.retried = False
        parked = self.places.get(message.place)
        if parked is not None:
            parked.flying -= 1
            parked.moved = time.monotonic()
            if not parked.flying and not parked.refused:  # the whole round went in: more at once
                parked.batch = min(2 * parked.batch, RETRY_MESSAGES_MAX)
                parked.at = 0.0

    def _kick(self, place: Place) -> None:
        if isinstance(place, Route):
            self._on_full(None)
        else:
            for queue in place:
                self._on_full((self._vhost, queue))

    def _keep(self, place: Place, message: Message) -> ParkingLot:
        """Parks a message, outside of the window."""
        if not message.parked:
            message.parked = True
            message.part()
            self._replica.progress.parked.add(message.sequence)
            self._replica.progress.parked_bytes += message.size + PARKED_MESSAGE_BYTES
        parked = self.places.get(place)
        if parked is None:
            parked = self.places[place] = ParkingLot(time.monotonic(), batch_min(place))
        message.place = place
        if message.route != message.origin:
            parked.alone = message.route.queues[0][1]
        parked.holds_others = parked.holds_others or refuser(message, place) is not None
        heappush(parked.waiting, (message.sequence, message))
        return parked

    # ---- trying again ------------------------------------------------------------------------------------------------

    async def tend(self) -> float:
        """Sends messages whose next try is due. Returns the seconds until the next call is due."""
        if not self.places:
            return 3600.0
        now = time.monotonic()
        several = any(not isinstance(place, Route) and len(place) > 1 for place in self.places)
        for place, parked in list(self.places.items()):
            if parked.flying:
                continue
            while parked.waiting and self._is_needless(parked.waiting[0][1]):
                parked.put_back(self._needed(parked.take(RETRY_MESSAGES_MAX)))
                await asyncio.sleep(0)
            if not parked.waiting:
                del self.places[place]
                if parked.alone:
                    await self._declarer.remove_exchange(alone(parked.alone))
            elif parked.at <= now:
                await self._try_again(place, parked, now, several)
        return min((p.at - now for p in self.places.values() if not p.flying), default=3600.0)

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
        if parked.alone and not await self._declarer.lead_to(parked.alone, alone(parked.alone)):
            parked.put_back(needed)
            self._go_as_they_came(parked)
            return
        for message in needed:
            message.retried = True
        parked.flying += len(needed)
        if leaves_copies(place):
            parked.pause_s = min(2 * parked.pause_s, RETRY_ROUTED_MAX_S) if parked.refused else RETRY_S
        parked.refused = False
        await self._send(needed)

    def _go_as_they_came(self, parked: ParkingLot) -> None:
        """Sends parked messages through their original exchange again, as no exchange of this node's own can lead to their queue."""
        what = "there is another exchange '%s' in vhost '%s' than this node's own: what queue '%s' refuses is tried again through its exchange"
        log.warning(f"{what}, and may come twice to others", alone(parked.alone), self._vhost, parked.alone)
        self._not_alone.add(parked.alone)
        parked.alone = ""
        for message in parked.take_where(lambda message: message.route != message.origin):
            message.route = message.origin
            self._keep(message.route, message)

    def _is_behind_others(self, place: Place, sequence: int, now: float) -> bool:
        """Whether entry `sequence` waits for messages parked in other places, as both may reach one full queue."""
        if isinstance(place, Route):
            return False
        others = ((other, parked) for other, parked in self.places.items() if other != place and not isinstance(other, Route))
        return any(not place.isdisjoint(other) and parked.goes_before(sequence, now) for other, parked in others)

    async def _room(self, place: Place) -> int:
        """How many messages may be tried again: where several queues may refuse them, the least known room of these queues."""
        room = RETRY_MESSAGES_MAX
        if not isinstance(place, Route) and len(place) > 1:
            for queue in place:
                length_max = self._limits.length_max(queue)
                if length_max is not None:
                    room = min(room, length_max - await self._declarer.ready(queue))
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
            queues = [(self._vhost, queue) for queue in message.refusers]
        return skip((), sequence) or (bool(queues) and all(skip((queue,), sequence) or has_died(queue, sequence) for queue in queues))

    def forget(self, queue: str, kept: Callable[[int], bool]) -> int:
        """Forgets the messages parked for a queue alone, and returns how many remain: to be `kept`, or on their way."""
        parked = self.places.get(frozenset((queue,)))
        if parked is None:
            return 0
        self._finish(parked.take_where(lambda message: bool(message.route.queues) and not kept(message.sequence)))
        return self.count(queue, kept)

    def count(self, queue: str, which: Callable[[int], bool]) -> int:
        """How many messages parked for a queue alone match `which`, or are being tried again."""
        parked = self.places.get(frozenset((queue,)))
        return parked.flying + sum(which(sequence) for sequence, m in parked.waiting if m.route.queues) if parked is not None else 0

    def waits_for(self, queue: str, flying: Iterable[Message]) -> list[tuple[int, bool]]:
        """The messages that wait, or may wait, for room in a queue: (entry, whether it came by the queue's name),
        ascending. `flying`: the messages that are being tried again.
        """
        waiting = (message for parked in self.places.values() for _, message in parked.waiting)
        by_name = ((self._vhost, queue),)
        found = []
        for message in chain(waiting, flying):
            places = message.refusers if message.refusers is not None else message.place
            if not isinstance(places, Route) and queue in places:
                found.append((message.sequence, message.origin.queues == by_name))
        return sorted(found)
