"""The census: on the primary, finds out what left its queues in no client's traffic, and brings it into the log (silent removals, R11).

Expiry, length limits and operators (management page, rabbitmqctl) take messages and queues away without a word to anybody. Rules:
- The broker is asked for the length of each replicated queue, some queues at a time. A queue that has looked the same for a while, to the broker
  and to the door (what consumers hold), is quiet, and what it holds enters the log as a TALLY. A backup that has more takes the excess out at the
  head of its queue, where everything that RabbitMQ removes by itself goes (see `tally`).
- A tally may be too high, never too low: too high, something stays on a backup until a later tally; too low, a message would be lost there. So
  everything that was in the queues at the first of the equal looks is counted at the last; and a queue on whose consumers deliveries may be under
  way that the door has not seen is passed over, as is one that somebody consumes around the door.
- RabbitMQ says 0 messages and 0 consumers also of a quorum queue that does not answer within a quarter of a second, and 404 also of a queue that
  does not come up. Neither is believed. That one cannot be looked at keeps nobody from looking at the others of its vhost.
- What clients have given back may be there or gone, and a quorum queue may hold it back unseen (delayed retries): it is spared. So is everything of
  earlier epochs, of which nobody knows what was given back, while the queue is not empty. Until the broker has heard of it, the queue is passed over.
- A queue that is gone is deleted in the log, in a barrier. A client may have declared it again in this very moment, in words that the log knows and
  which are therefore passed on: that is waited for, and then it is not gone. (In other words: `declare` has deleted it in the log before.)
  Nor is one that was never here (this broker may have refused the declaration), unless it may have gone by itself. Nor is one that a client has
  deleted while the broker was asked: so the log is looked at when the broker has answered, and nothing is said before the second look. Where a
  connection's own is found (exclusive), the log's, which never is one, is gone.
- Of a queue that is not replicated as a whole, only that it is gone is told: what is in it is each broker's own.
- A queue that goes with its last consumer (`declarations.goes_unused`) is deleted here, when clients of this node have consumed from it and none does
  any more; not while the door closes, as its clients come again elsewhere.
- Looking must not count as use: a classic queue that expires is asked for its length only while a client consumes from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Level
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey
from lrq_ha.routing.names import ROUTING_VHOST

from ..amqp import declarations
from ..amqp.address import Address
from ..amqp.connection import Channel
from ..amqp.errors import ChannelClosed
from ..amqp.frames import QUEUE_DELETE
from ..amqp.requeue import give_back, requeue_is_free
from ..amqp.vhosts import VhostConnections
from ..log.holds import QueueHold
from ..log.replica import Replica
from ..session.door_state import DoorState
from ..session.session import ClientSession

log = logging.getLogger("lrq_ha.census")

INTERVAL_S = 1.0
LOOKS_PER_ROUND = 64  # of all queues in turn; as many more where something has changed
EQUAL_LOOKS = 3
REPEAT_S = 10.0
HELD_MAX = 100_000  # while clients hold more, no queue counts as quiet: going through them takes too long
HELD_RANGES_MAX = 1_000
BACK_OFF_S = 30.0
ANSWER_S = 10.0
REDECLARED_S = 0.2  # within it, the broker has carried out a declaration that was under way and has no answer


@dataclass(slots=True)
class _Seen:
    """What the last looks at a queue have shown. `upto`: what was in the queues at the first of `equal` looks that were the same."""

    ready: int
    held: list[int]
    upto: int
    at: float
    equal: int = 1


@dataclass(slots=True)
class _Clients:
    """What the door's clients have of each queue: consumers; the entries whose copies they hold, one for each copy. `unsure`: or more than that."""

    consumers: Counter[QueueKey] = field(default_factory=Counter)
    held: defaultdict[QueueKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    unsure: set[QueueKey] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    """The last tally of a queue. `published`: the last publish of the log then; `again_at`: when it is to be repeated once; 0: it was."""

    messages: int
    held: list[int]
    published: int
    at: float
    again_at: float


class LengthReconciler:
    """See above.

    Args:
        replica: The log; what it declares is looked at.
        door: What its clients hold.
        broker: The own broker; the vhost in it is replaced.
    """

    def __init__(self, replica: Replica, door: DoorState[ClientSession], broker: Address) -> None:
        self._replica = replica
        self._door = door
        self._channels: dict[str, Channel] = {}
        self._vhosts = VhostConnections(broker)
        self._seen: dict[QueueKey, _Seen] = {}
        self._told: dict[QueueKey, _Told] = {}
        self._existed: set[QueueKey] = set()
        self._missed: dict[QueueKey, float] = {}  # queues that were not there at the last look, and when that was
        self._said: set[QueueKey] = set()  # of which it was said that they are not there
        self._gone: list[QueueKey] = []  # found gone in this round
        self._probed: dict[QueueKey, float] = {}
        self._turn: Iterator[QueueKey] = iter(())
        self._again: dict[QueueKey, None] = {}  # looked at next time, too: something has changed
        self._not_before: dict[str, float] = {}  # vhosts that could not be looked at
        self._unlooked: dict[QueueKey, float] = {}  # queues that could not be, and when to try again
        self._in_use: dict[QueueKey, float] = {}  # queues without consumers here that have some all the same, and when to ask again

    async def run(self) -> None:
        """Looks until cancelled, or until this node is not active any more."""
        try:
            while self._replica.active:
                await asyncio.sleep(INTERVAL_S)
                if self._replica.node.log.unfinished or self._door.log_blocked:
                    # A renewal takes messages out of their queues for a while (R17). In an alarm of the broker nothing gets into the log.
                    self._seen.clear()
                else:
                    await self._round()
        finally:
            self._vhosts.abort()

    async def _round(self) -> None:
        queues = dict.fromkeys(islice(self._again, LOOKS_PER_ROUND))
        self._again = {}
        turn = list(islice(self._turn, LOOKS_PER_ROUND))
        if len(turn) < LOOKS_PER_ROUND:
            listed = self._replica.declared
            declared = [key for key in listed.existing() if key[0] != ROUTING_VHOST and listed.knows(key)]
            given_back = self._replica.given_out.given_back
            gone = (self._seen, self._told, self._missed, self._probed, self._in_use, self._unlooked, given_back)
            for known in gone:
                for key in known.keys() - set(declared):
                    known.pop(key)
            self._existed.intersection_update(declared)
            self._said.intersection_update(declared)
            self._turn = iter(declared)
            turn += islice(self._turn, LOOKS_PER_ROUND - len(turn))
        queues.update(dict.fromkeys(turn))
        clients = self._clients()
        if clients is None:
            self._seen.clear()
            return
        now = time.monotonic()
        due = [key for key in self._replica.declared.consumed if now >= max(self._in_use.get(key, 0.0), self._not_before.get(key[0], 0.0))]
        unused = [key for key in due if not clients.consumers[key]]
        if unused and not self._door_closes():
            await self._delete_unused(unused)
        for key in queues:
            if not self._replica.active:
                return
            if time.monotonic() < max(self._not_before.get(key[0], 0.0), self._unlooked.get(key, 0.0)):
                continue
            try:
                await self._look(key, clients)
            except LrqError as error:
                self._cannot_look(key, error)
        if self._gone:
            await self._delete(self._gone)
            self._gone = []

    def _cannot_look(self, key: QueueKey, error: LrqError) -> None:
        """A queue that does not come up; rights that are missing, a vhost that is gone: clients go on."""
        self._seen.pop(key, None)
        vhost, queue = key
        again_at = time.monotonic() + BACK_OFF_S
        if isinstance(error, ChannelClosed) and error.of_queue:
            if not self._replica.declared.has(key):
                return
            if key not in self._unlooked:  # said once
                log.warning("what leaves queue '%s' in vhost '%s' by itself cannot be seen now: %s", queue, vhost, error)
            self._unlooked[key] = again_at
            return
        self._not_before[vhost] = again_at
        log.warning("what leaves queues by itself in vhost '%s' cannot be seen now: %s", vhost, error)

    # ---- looking -----------------------------------------------------------------------------------------------------

    async def _look(self, key: QueueKey, clients: _Clients) -> None:
        arguments = declarations.queue_arguments(self._replica.declared.declarations.get(key, b""))
        kind, expires = arguments.get("x-queue-type", "classic"), arguments.get("x-expires", 0)
        used = clients.consumers[key] > 0
        now = time.monotonic()
        if expires and kind == "classic" and not used:
            self._seen.pop(key, None)
            if now - self._probed.get(key, 0.0) < max(INTERVAL_S, expires / 2_000):
                return
            self._probed[key] = now
            if not await self._exists(key):
                self._missing(key)
            else:
                self._there(key)
            return
        upto = self._replica.progress.tracker.applied
        found = await self._length(key)
        if found is None:
            self._missing(key)
            return
        self._there(key)
        ready, consumers = found
        if not self._replica.declared.replicates(key):
            return
        if kind == "stream" or key not in self._replica.declared.declarations or arguments.get("x-delayed-retry-type", "disabled") != "disabled":
            return  # what is to be tried again later is in no length
        # More consumers than the door's: somebody consumes around it. None although there are some: the queue has not answered.
        if key in clients.unsure or consumers > clients.consumers[key] or (used and not consumers):
            self._seen.pop(key, None)
            return
        seen = self._compare(key, ready, clients.held.get(key, []), upto, now)
        if seen is None:
            return
        del self._seen[key]
        again_at = self._due(key, seen, now)
        if again_at is None:
            return
        sure = ready or consumers or arguments.get("x-queue-type") == "classic"
        if sure or (not expires and await self._is_empty(key, "x-delivery-limit" in arguments) and self._holds(key, seen.held)):
            self._tell(key, seen, now, kind, consumers, again_at)

    async def _channel(self, vhost: str) -> Channel:
        channel = self._channels.get(vhost)
        if channel is None or channel.error is not None:
            channel = self._channels[vhost] = await self._new_channel(vhost)
        return channel

    async def _new_channel(self, vhost: str) -> Channel:
        return await (await self._vhosts.connection(vhost, anew=True)).channel()

    async def _length(self, key: QueueKey) -> tuple[int, int] | None:
        """(ready messages, consumers) of a queue; None: there is none of the log's."""
        try:
            _, ready, consumers = await (await self._channel(key[0])).queue_declare(key[1], passive=True)
        except ChannelClosed as error:
            if error.no_such_queue or error.is_exclusive:
                return None
            raise
        return ready, consumers

    async def _exists(self, key: QueueKey) -> bool:
        """Whether there is such a queue, and it is the log's; unlike a passive declaration this is no use of it."""
        try:
            channel = await self._channel(key[0])
            await channel.queue_bind(key[1], "amq.direct", "lrq-ha-census")
            await channel.queue_unbind(key[1], "amq.direct", "lrq-ha-census")
        except ChannelClosed as error:
            if error.no_such_queue or error.is_exclusive:
                return False
            raise
        return True

    async def _is_empty(self, key: QueueKey, limited: bool) -> bool:
        """Whether a queue without consumers really is empty: of a quorum queue that does not answer in time, RabbitMQ says so too (measured).

        An answer that counts a consumer of our own comes from the queue itself. What comes just then is given back: not where that uses up one of a
        limited number of deliveries. It is one message at most, and the first, so what is published meanwhile stays in order. Clients that would meet
        that consumer wait: an exclusive one would be refused, as would a deletion if unused.
        """
        channel = await self._new_channel(key[0])
        if limited and not requeue_is_free(channel.connection):
            await channel.close()
            return False
        moving = self._replica.moving
        async with self._replica.barrier.nobody_declares():
            clients = self._clients()
            if key in moving or clients is None or clients.consumers[key]:
                await channel.close()
                return False
            moving[key] = wait = QueueHold(key, publishes=False)
        got: list[int] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                await channel.qos(1)
                tag = await channel.consume(key[1], lambda tag, *_: got.append(tag))
                _, ready, consumers = await channel.queue_declare(key[1], passive=True)
                await channel.cancel(tag)
                await give_back(channel.connection, channel, "", len(got), key[1])
        except TimeoutError:
            channel.connection.abort()
            return False
        except ChannelClosed:
            return False  # exclusive to somebody, or not in use
        finally:
            if moving.get(key) is wait and not wait.publishes:  # else a renewal that has begun meanwhile says when it is over
                del moving[key]
                wait.over.set()
            await channel.close()
        return not ready and not got and consumers == 1

    def _holds(self, key: QueueKey, held: list[int]) -> bool:
        """Whether clients hold the same of a queue as they did."""
        clients = self._clients()
        return clients is not None and key not in clients.unsure and clients.held.get(key, []) == held

    def _clients(self) -> _Clients | None:
        """None: they hold too much."""
        clients = _Clients()
        channels = [(session, channel) for session in self._door.sessions for channel in session.channels.values()]
        if sum(len(channel.deliveries) for _, channel in channels) > HELD_MAX:
            return None
        for session, channel in channels:
            consumed = [consumer.queue for consumer in (*channel.consumers.values(), *channel.consuming)]
            clients.consumers.update(consumed)
            clients.unsure.update(channel.returning, (consumer.queue for consumer, _ in channel.gets))
            if session.flow.reads_late or channel.undelivered or channel.recovers or channel.commits or channel.closing:
                clients.unsure.update(consumed)
            for delivery in channel.held:
                clients.held[delivery.queue].append(delivery.sequence)
        for session in self._door.sessions:  # what is given back is in no length, nor held, until the broker hears of it
            clients.unsure.update(session.still_returning())
        for held in clients.held.values():
            held.sort()
        return clients

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _compare(self, key: QueueKey, ready: int, held: list[int], upto: int, now: float) -> _Seen | None:
        """What has been seen of a queue, if it has been quiet for long enough."""
        seen = self._seen.get(key)
        told = self._told.get(key)
        if told is None or (told.messages, told.held) != (ready + len(held), held):
            self._again[key] = None
        if seen is None or (seen.ready, seen.held) != (ready, held):
            self._seen[key] = _Seen(ready, held, upto, now)
            return None
        if now - seen.at < INTERVAL_S / 2:
            return None
        seen.at = now
        seen.equal += 1
        return seen if seen.equal >= EQUAL_LOOKS else None

    def _due(self, key: QueueKey, seen: _Seen, now: float) -> float | None:
        """Whether there is something to tell; if so, when it is to be told again if nothing changes (0: not again)."""
        told = self._told.get(key)
        same = told is not None and (told.messages, told.held) == (seen.ready + len(seen.held), seen.held)
        if told is None or not same or (told.published != self._replica.index.last_publish and now - told.at >= REPEAT_S):
            return now + REPEAT_S
        return 0.0 if told.again_at and now >= told.again_at else None

    def _tell(self, key: QueueKey, seen: _Seen, now: float, kind: str, consumers: int, again_at: float) -> None:
        messages, published = seen.ready + len(seen.held), self._replica.index.last_publish
        if not messages and not consumers and kind != "quorum":
            # Whatever came back has gone again. With consumers it may be on its way to one: who gives it back at once is seldom seen to hold it.
            self._replica.given_out.given_back.pop(key, None)
        held, spared = RangeSet.of(seen.held), RangeSet(self._replica.given_out.given_back.get(key, ()))
        if messages:
            spared.add(1, self._replica.epoch_from)
        if held.ranges > HELD_RANGES_MAX or spared.ranges > HELD_RANGES_MAX:
            return
        vhost, queue = key
        tally = pb.Tally(vhost=vhost, queue=queue, upto=seen.upto, messages=messages, held=held.flat(), spared=spared.flat())
        self._replica.append(pb.Run(tally=tally))
        self._told[key] = _Told(messages, seen.held, published, now, again_at)

    # ---- queues that are gone ----------------------------------------------------------------------------------------

    def _there(self, key: QueueKey) -> None:
        self._existed.add(key)
        self._missed.pop(key, None)
        self._unlooked.pop(key, None)

    def _missing(self, key: QueueKey) -> None:
        self._seen.pop(key, None)
        if not self._replica.declared.has(key):
            self._missed.pop(key, None)
            return
        vhost, queue = key
        was_here = key in self._existed or key in self._replica.declared.here
        declaration = self._replica.declared.declarations.get(key, b"")
        if not was_here and declarations.level_of(declaration) is Level.NONE:
            return  # another node's
        if key not in self._missed:
            self._missed[key] = time.monotonic()
            self._again[key] = None
            return
        if not was_here and not declarations.may_vanish(declaration):
            if key not in self._said:
                self._said.add(key)
                log.warning("queue '%s' in vhost '%s' is in the log, and was not on this broker when it became primary", queue, vhost)
            return
        del self._missed[key]
        self._gone.append(key)

    async def _delete(self, keys: list[QueueKey]) -> None:
        """Brings into the log that these are gone."""
        replica = self._replica
        async with replica.barrier.up(self._door.alarmed) as stands:
            if not stands:
                return
            await asyncio.sleep(REDECLARED_S)
            await self._declarations_done(keys)
            for key in keys:
                vhost, queue = key
                if replica.declared.queues.get(key, -1) or time.monotonic() < self._not_before.get(vhost, 0.0) or await self._is_there(key):
                    continue
                if not replica.active:
                    return
                log.warning("queue '%s' in vhost '%s' has expired or was deleted at the broker: it is deleted on the backups, too", queue, vhost)
                self._log_deletion(key)

    def _log_deletion(self, key: QueueKey) -> None:
        vhost, queue = key
        self._replica.append(pb.Run(topology=pb.Topology(vhost=vhost, method=declarations.deletion(QUEUE_DELETE, queue))))
        self._existed.discard(key)
        self._door.forget_decisions()

    def _door_closes(self) -> bool:
        return bool(self._door.draining or self._door.closed_because())

    async def _delete_unused(self, keys: list[QueueKey]) -> None:
        """Deletes queues that go with their last consumer, and have had it."""
        replica = self._replica
        async with replica.barrier.up(self._door.alarmed) as stands:
            if not stands:
                return
            await self._declarations_done(keys)
            clients = self._clients()
            for key in keys:
                if clients is None or not replica.active or self._door_closes():
                    return
                if clients.consumers[key]:
                    continue
                try:
                    await (await self._channel(key[0])).queue_delete(key[1], if_unused=True)
                except ChannelClosed as error:
                    if not error.no_such_queue:  # somebody consumes around the door
                        self._in_use[key] = time.monotonic() + BACK_OFF_S
                        continue
                except LrqError as error:
                    self._cannot_look(key, error)
                    continue
                self._log_deletion(key)

    async def _is_there(self, key: QueueKey) -> bool:
        """Likewise `_exists`; also where it cannot be seen."""
        try:
            return await self._exists(key)
        except LrqError as error:
            self._cannot_look(key, error)
            return True

    async def _declarations_done(self, keys: Collection[QueueKey]) -> None:
        """Returns when the broker has carried out the declarations of these queues that were under way; no others are passed on during a barrier."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            channels = [channel for session in self._door.sessions for channel in session.channels.values()]
            if not any(passed.declares in keys for channel in channels for passed in channel.passed):
                return
            await asyncio.sleep(0.01)
