"""The length reconciler: on the primary, detects messages that left queues without a client, and brings that into the log (silent removals, R11).

Expiry, length limits and operators (management page, rabbitmqctl) remove messages and queues without notice.

Rules:
- The broker is asked for the length of each replicated queue, some queues at a time. A queue is quiet if some looks in a row were equal, at the
  broker and at the door (the deliveries that consumers hold). The content of a quiet queue enters the log as a TALLY. A backup with more messages
  removes the excess at the head of its queue, where RabbitMQ removes by itself (see `tally`).
- A tally may be too high, never too low. Too high, a message stays on a backup until a later tally; too low, a message would be lost there. So the
  last look counts all that was in the queues at the first of the equal looks. A queue is skipped if deliveries to its consumers may be under way that
  the door has not seen, or if it has a consumer around the door.
- RabbitMQ reports 0 messages and 0 consumers also for a quorum queue that does not answer within a quarter of a second, and 404 also for a queue that
  does not come up. Neither report is believed. A queue that cannot be looked at does not keep the others of its vhost from being looked at.
- Messages that clients have given back may be there or gone, and a quorum queue may hold them back unseen (delayed retries): a tally spares them. It
  also spares all entries of earlier epochs while the queue is not empty, as their returns are unknown. Until the broker has heard of a return, the
  queue is skipped.
- A queue that is gone is deleted in the log, in a barrier. A client may just have declared it again, with arguments that the log knows, and such a
  declaration is passed on: the reconciler waits for it, and the queue is then not gone. (`declare` deletes a queue with other arguments in the log.)
  A queue that was never here does not count as gone (this broker may have refused the declaration), unless it may have gone by itself. Nor does a
  queue that a client deleted while the broker was asked: the log is checked after the broker's answer, and only a second look counts. Where the name
  belongs to a connection's own queue (exclusive), the log's queue, which is never exclusive, is gone.
- Of a queue that is not replicated as a whole, only its end enters the log: its content is each broker's own.
- A queue that goes with its last consumer (`declarations.goes_unused`) is deleted here when clients of this node have consumed from it and none
  does any more; not while the door closes, as its clients connect again elsewhere.
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
LOOKS_PER_ROUND = 64  # of all queues in turn, and up to as many queues that have changed
EQUAL_LOOKS = 3
REPEAT_S = 10.0
HELD_MAX = 100_000  # while clients hold more, no queue counts as quiet: a walk over them takes too long
HELD_RANGES_MAX = 1_000
BACK_OFF_S = 30.0
ANSWER_S = 10.0
REDECLARED_S = 0.2  # within it, the broker has carried out a declaration that was under way without an answer


@dataclass(slots=True)
class _Seen:
    """The result of the last looks at a queue. `upto`: the last applied entry at the first of `equal` equal looks."""

    ready: int
    held: list[int]
    upto: int
    at: float
    equal: int = 1


@dataclass(slots=True)
class _Clients:
    """The state of each queue at the door's clients: consumers; entries whose copies they hold, one per copy. `unsure`: queues with possibly more."""

    consumers: Counter[QueueKey] = field(default_factory=Counter)
    held: defaultdict[QueueKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    unsure: set[QueueKey] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    """The last tally of a queue. `published`: the log's last publish then; `again_at`: when to repeat it once; 0: repeated."""

    messages: int
    held: list[int]
    published: int
    at: float
    again_at: float


class LengthReconciler:
    """Compares the queues of one primary with its log.

    Args:
        replica: The log, which lists the queues.
        door: The door, whose clients hold deliveries.
        broker: The own broker; its vhost is replaced.
    """

    def __init__(self, replica: Replica, door: DoorState[ClientSession], broker: Address) -> None:
        self._replica = replica
        self._door = door
        self._channels: dict[str, Channel] = {}
        self._vhosts = VhostConnections(broker)
        self._seen: dict[QueueKey, _Seen] = {}
        self._told: dict[QueueKey, _Told] = {}
        self._existed: set[QueueKey] = set()
        self._missed: dict[QueueKey, float] = {}  # queues that were missing at the last look, and the time of the look
        self._said: set[QueueKey] = set()  # missing queues that have been reported
        self._gone: list[QueueKey] = []  # queues found gone in this round
        self._probed: dict[QueueKey, float] = {}
        self._turn: Iterator[QueueKey] = iter(())
        self._again: dict[QueueKey, None] = {}  # changed queues, which are looked at next time, too
        self._not_before: dict[str, float] = {}  # vhosts that could not be looked at, and when to try again
        self._unlooked: dict[QueueKey, float] = {}  # queues that could not be looked at, and when to try again
        self._in_use: dict[QueueKey, float] = {}  # queues with consumers around the door, and when to ask again

    async def run(self) -> None:
        """Compares until cancelled, or until this node is not active any more."""
        try:
            while self._replica.active:
                await asyncio.sleep(INTERVAL_S)
                if self._replica.node.log.unfinished or self._door.log_blocked:
                    # A renewal takes messages out of their queues for a while (R17). In an alarm of the broker no entry gets into the log.
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
        """Backs off from a queue that does not come up, or a vhost that is gone or lacks rights: clients go on."""
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
            return  # messages of delayed retries are in no length
        # More consumers than the door's: one consumes around it. None although the door has some: the queue has not answered.
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
        """(ready messages, consumers) of a queue; None if the log's queue does not exist."""
        try:
            _, ready, consumers = await (await self._channel(key[0])).queue_declare(key[1], passive=True)
        except ChannelClosed as error:
            if error.no_such_queue or error.is_exclusive:
                return None
            raise
        return ready, consumers

    async def _exists(self, key: QueueKey) -> bool:
        """Whether the log's queue exists; unlike a passive declaration, this question does not count as use."""
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
        """Whether a queue without consumers is empty: RabbitMQ also reports that of a quorum queue that does not answer in time (measured).

        An answer that counts the reconciler's own consumer comes from the queue itself. A message that arrives just then is given back, so a queue
        where that uses up one of a limited number of deliveries is left out. It is at most one message, and the first, so later publishes stay in
        order. Clients that would meet that consumer wait: an exclusive consumer would be refused, and a deletion if unused, too.
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
            return False  # exclusive to another connection, or not in use
        finally:
            if moving.get(key) is wait and not wait.publishes:  # else a renewal that has begun meanwhile ends the hold
                del moving[key]
                wait.over.set()
            await channel.close()
        return not ready and not got and consumers == 1

    def _holds(self, key: QueueKey, held: list[int]) -> bool:
        """Whether clients hold `held` of a queue, as before."""
        clients = self._clients()
        return clients is not None and key not in clients.unsure and clients.held.get(key, []) == held

    def _clients(self) -> _Clients | None:
        """The clients' consumers and deliveries; None if there are too many deliveries."""
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
        for session in self._door.sessions:  # a return that the broker has not heard of is neither in a length nor held
            clients.unsure.update(session.still_returning())
        for held in clients.held.values():
            held.sort()
        return clients

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _compare(self, key: QueueKey, ready: int, held: list[int], upto: int, now: float) -> _Seen | None:
        """The result of the looks at a queue, if it has been quiet for long enough."""
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
        """None if no tally is due; else when to repeat the tally if nothing changes (0: not again)."""
        told = self._told.get(key)
        same = told is not None and (told.messages, told.held) == (seen.ready + len(seen.held), seen.held)
        if told is None or not same or (told.published != self._replica.index.last_publish and now - told.at >= REPEAT_S):
            return now + REPEAT_S
        return 0.0 if told.again_at and now >= told.again_at else None

    def _tell(self, key: QueueKey, seen: _Seen, now: float, kind: str, consumers: int, again_at: float) -> None:
        messages, published = seen.ready + len(seen.held), self._replica.index.last_publish
        if not messages and not consumers and kind != "quorum":
            # All returned messages have gone again. With consumers they may be on their way: a client that returns them at once rarely holds them.
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
            return  # another node's queue
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
        """Brings the end of these queues into the log."""
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
        """Deletes queues that go with their last consumer, and have lost it."""
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
                    if not error.no_such_queue:  # a client consumes around the door
                        self._in_use[key] = time.monotonic() + BACK_OFF_S
                        continue
                except LrqError as error:
                    self._cannot_look(key, error)
                    continue
                self._log_deletion(key)

    async def _is_there(self, key: QueueKey) -> bool:
        """Like `_exists`, but True where the queue cannot be looked at."""
        try:
            return await self._exists(key)
        except LrqError as error:
            self._cannot_look(key, error)
            return True

    async def _declarations_done(self, keys: Collection[QueueKey]) -> None:
        """Waits until the broker has carried out pending declarations of these queues; during a barrier no others are passed on."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            channels = [channel for session in self._door.sessions for channel in session.channels.values()]
            if not any(passed.declares in keys for channel in channels for passed in channel.passed):
                return
            await asyncio.sleep(0.01)
