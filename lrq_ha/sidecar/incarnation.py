"""One incarnation of a sidecar: from connecting to its broker until something ends it. The core's driver.

Rules: effects of the core are carried out in order, at once; whatever breaks the one-writer rule or the connection to the broker ends the
incarnation, and the process starts the next one, which rebuilds everything from what the broker holds. No state outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

from broker_plugin import frames, wire
from broker_plugin.applier import Applier
from broker_plugin.client import Channel
from broker_plugin.door import Door
from broker_plugin.peers import PeerEnd
from broker_plugin.replica import Replica
from broker_plugin.streams import Streams
from broker_plugin.sweeper import Sweeper
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedRecord, AppliedTracker, Generations, QueueRecord, VisitRecord, format_stamp
from lrq_ha.replication.errors import IllegalEvent, LrqError
from lrq_ha.replication.events import (
    Ack,
    Answer,
    Append,
    CutTail,
    Disconnect,
    Effect,
    EntryKind,
    Event,
    Opened,
    OwnConfirmed,
    PeerAcked,
    PeerConnected,
    PeerDisconnected,
    PeerMessage,
    PromoteRequest,
    Push,
    Recover,
    Recovered,
    RefusePush,
    RemoveRequest,
    Restart,
    RoleChanged,
    SafeAdvanced,
    Send,
    Subscribe,
    Tick,
    WriteBatch,
    WriteFence,
)
from lrq_ha.replication.filter import DeliveryFilter
from lrq_ha.replication.log import Acceptance, BatchHeader
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import Position
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import ReplicatingSubscription, RoutingQueue, StoredBatch
from lrq_ha.routing import names

from .config import Config
from .links import Link
from .sites import Sites

log = logging.getLogger("lrq_ha.node")

TICK_S = 0.05
RECORD_INTERVAL_S = 0.2
ANSWER_TIMEOUT_S = 30.0
WINDOW_MESSAGES_MAX = 4_000
WINDOW_BYTES_MAX = 32 << 20
READER_PREFETCH = 50
REFUSAL_SHOWN_S = 5.0  # a node that was refused tries again every second
NOT_ALLOWED = 530  # AMQP reply code


class Incarnation:
    """See above. `run` returns why it ended.

    Args:
        config: The node's configuration.
        door: The door, which outlives incarnations.
        shut_out: See Streams.
    """

    def __init__(self, config: Config, door: Door, shut_out: int = 0) -> None:
        self.config = config
        self.door = door
        r = config.replication
        self.node = Node(config.settings())
        self.replica = Replica(self.node, r.replicate, self._emit)
        self.streams = Streams(config.node.group, config.broker.url, r.log_bytes_max, self._written, self.end, shut_out=shut_out)
        self.applier = Applier(
            self.replica,
            config.broker.url,
            self,
            delay_s=r.apply_delay_s,
            delay_entries_max=r.apply_delay_entries_max,
            window_messages_max=WINDOW_MESSAGES_MAX,
            window_bytes_max=WINDOW_BYTES_MAX,
        )
        self.sweeper = Sweeper(self.replica, config.broker.url)
        self.sites = Sites(config, self.replica, broker_url=config.broker.url)
        self.memory = RoutingQueue(r.memory_bytes_max)
        self.links = {
            peer.id: Link(config.node.id, config.node.group, peer.id, peer.door, self._link_up, self._link_down, self._link_ack)
            for peer in config.peers
        }
        self.subscriptions: dict[int, ReplicatingSubscription] = {}
        self.ends: dict[int, PeerEnd] = {}
        self.since = time.time()
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[tuple[bool, str]] | None = None
        self._statuses_seen = 0
        self._recorded = (-1, -1)
        self._refused = (0.0, "")
        self.ready = False
        self._feeding = False
        self._paused = False
        self.replica.on_wake = self._wake
        self.applier.on_full = self.sweeper.kick

    # ---- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Runs until the incarnation ends; returns the reason. Raises LrqError if it cannot start."""
        try:
            await self.streams.open()
            await self._rebuild()
            self.ready = True
            self.door.host = self
            self._feed(Opened(self.replica.tracker.applied, self.streams.lost_host and self.node.log.end > 0))
            for body in (self._ticks(), self._records(), self.applier.run(), self.sweeper.run()):
                self._spawn(body)
            for link in self.links.values():
                self._spawn(link.run())
            return await self._ended
        finally:
            self.ready = False
            self.door.host = None
            self.door.close_clients(f"node {self.config.node.name} starts again")
            running = [*self._tasks, *self._catching_up.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.streams.close()

    def end(self, reason: str) -> None:
        """Ends this incarnation."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            if not isinstance(error, LrqError):
                log.error("a task failed", exc_info=error)
            self.end(f"{error}")

    # ---- rebuilding --------------------------------------------------------------------------------------------------

    async def _rebuild(self) -> None:
        """R7: the applied record first, then the log; the new generation is on record before anything is published."""
        record: list[AppliedRecord] = []
        newest = [0]

        def take_record(headers: Mapping[str, Any], body: bytes) -> None:
            if wire.OPEN not in headers:
                record[:] = [_record_from_pb(pb.Applied.FromString(body))]

        await self.streams.read(self.streams.applied_queue, take_record)
        replica = self.replica
        last = record[0] if record else AppliedRecord(0, 0, (), (), b"")
        replica.generations = Generations(last.generations)
        replica.generations.opened(last.applied, self.streams.generation)
        if record:
            replica.filter = DeliveryFilter.restored(replica.generations, last.queues, last.refused)
        else:
            replica.filter = DeliveryFilter(replica.generations)
        replica.tracker = AppliedTracker(last.applied)

        def take_log(headers: Mapping[str, Any], body: bytes) -> None:
            if wire.FENCE in headers:
                self.node.read_fence(int(headers[wire.FENCE]), int(headers[wire.FENCE_OUT]))
            elif wire.OPEN not in headers:
                batch, _ = wire.parse_batch(dict(headers))
                self._read_batch(batch, body)
                newest[0] += 1

        await self.streams.read(self.streams.log_queue, take_log)
        replica.safe_advanced(last.applied)
        replica.dedup.completed(last.applied)
        again = {target.key for target in replica.filter.queues()} if replica.to_apply else set()
        self.sweeper.suspect(again, self.node.log.end)
        await self.streams.write_applied(self._record().SerializeToString())
        log.info(
            "rebuilt: log to %d (%d batches), applied to %d, generation %d",
            self.node.log.end,
            newest[0],
            last.applied,
            self.streams.generation,
        )

    def _read_batch(self, batch: BatchHeader, body: bytes) -> None:
        end_before = self.node.log.end
        if self.node.read_batch(batch) is Acceptance.APPEND:
            if batch.first <= end_before:
                self.replica.cut(batch.first)
                self.memory.cut(batch.first)
            self.replica.index_batch(batch.first, pb.Batch.FromString(body).runs, keep=True)
            self.memory.append(StoredBatch(batch, body))

    def _record(self) -> pb.Applied:
        replica = self.replica
        queues, refused = replica.filter.export()
        record = pb.Applied(applied=replica.tracker.applied, refused=refused)
        record.generations.extend(pb.Generation(applied=a, generation=g) for a, g in replica.generations.table)
        for q in queues:
            part = record.queues.add(vhost=q.vhost, queue=q.queue, done=q.done, moved=q.moved, due=q.due, purged=q.purged)
            part.visits.extend(
                pb.PendingVisit(origin=v.origin, visit=v.visit, dequeued=v.dequeued, positions=v.positions) for v in q.visits
            )
        return record

    async def _records(self) -> None:
        """Writes the applied record when something has changed."""
        while True:
            await asyncio.sleep(RECORD_INTERVAL_S)
            state = (self.replica.tracker.applied, self.replica.safe)
            if state != self._recorded:
                self._recorded = state
                await self.streams.write_applied(self._record().SerializeToString())
            if self.streams.lost_host and not self.node.lost_host:
                await self.streams.mark_boot()

    # ---- the core ----------------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if not self.ready or self._ended.done():
            return
        if not isinstance(event, Append) and self._may_append(event):
            self.replica.flush()  # what the core appends by itself comes after the sequences that were given out already
        try:
            if self._feeding:
                raise IllegalEvent(f"{type(event).__name__} while the effects of another event are carried out")
            self._feeding = True
            for effect in self.node.handle(event, time.monotonic()):
                self._EFFECTS[type(effect)](self, effect)
        except IllegalEvent as error:
            log.error("%s", error)
            self.end(str(error))
        finally:
            self._feeding = False

    def _may_append(self, event: Event) -> bool:
        """Whether the core may append MEMBERS at this event; acks and confirms, of which there are many, only where the set may change."""
        return not isinstance(event, OwnConfirmed | PeerAcked) or self.node.set_may_change

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._feed(Tick())

    def _emit(self, first: int, count: int, runs: list[pb.Run]) -> None:
        self._feed(Append(count, (first, runs)))

    def _write_batch(self, effect: WriteBatch) -> None:
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES and isinstance(effect.body, bytes):  # a push: the same bytes, the leader's index
            body = effect.body
            self.replica.index_batch(header.first, pb.Batch.FromString(body).runs, keep=True)
        else:
            if effect.kind is EntryKind.ENTRIES:
                given: tuple[int, list[pb.Run]] = effect.body  # type: ignore[assignment]
                first, runs = given
                if first != header.first:
                    raise IllegalEvent(f"entries given out from {first} on would be written from {header.first} on")
            else:
                members = sorted(header.sets[0][1])
                marker = effect.kind is EntryKind.MARKER
                runs = [pb.Run(marker=pb.Marker(nodes=members)) if marker else pb.Run(members=pb.Members(nodes=members))]
                self.replica.done_when_safe(header.first, header.last)
            batch = pb.Batch(
                epoch=header.epoch,
                first=header.first,
                count=header.last - header.first + 1,
                previous_epoch=header.previous_epoch,
                timestamp_us=time.time_ns() // 1000,
                runs=runs,
            )
            body = batch.SerializeToString()
            self.replica.batches_in_flight += 1
        self.streams.write_batch(header, body, self.node.safe)
        stored = StoredBatch(header, body)
        self.memory.append(stored)
        if self.node.leading:
            for node in list(self.subscriptions):
                self._pump(node)

    def _write_fence(self, effect: WriteFence) -> None:
        self.streams.write_fence(effect.epoch, effect.out_end)

    def _written(self, count: int) -> None:
        self.replica.batches_in_flight = max(0, self.replica.batches_in_flight - count)
        self._feed(OwnConfirmed(count))
        self.replica.own_confirmed()

    def _send(self, effect: Send) -> None:
        link = self.links.get(effect.peer)
        if link is not None:
            link.send(wire.encode_control(self.config.node.id, self.config.node.group, effect.message))

    def _disconnect(self, effect: Disconnect) -> None:
        self._unsubscribe(effect.peer)
        asyncio.get_running_loop().call_soon(self.links[effect.peer].drop)

    def _ack(self, effect: Ack) -> None:
        end = self.ends.get(effect.peer)
        if end is not None:
            end.acknowledge(effect.upto)

    def _refuse_push(self, effect: RefusePush) -> None:
        end = self.ends.get(effect.peer)
        if end is not None:
            log.info("refused a push of %s: %s", self.node.name(effect.peer), effect.reason)
            asyncio.get_running_loop().call_soon(end.close)

    def _safe(self, effect: SafeAdvanced) -> None:
        self.replica.safe_advanced(effect.safe)
        if self.node.leading:
            self._tell_sites()

    def _tell_sites(self) -> None:
        """Status entries that are safe now go to the sessions with other sites."""
        fresh = [(seq, status) for seq, status in self.replica.statuses.values() if self._statuses_seen < seq <= self.replica.safe]
        for sequence, status in sorted(fresh, key=lambda pair: pair[0]):
            self.sites.status_entry(Position(self.node.log.epoch_at(sequence), sequence), status)
        self._statuses_seen = self.replica.safe

    def _cut(self, effect: CutTail) -> None:
        log.warning("entries from %d on were never safe and fall out of the log", effect.first)
        self.replica.cut(effect.first)
        self.memory.cut(effect.first)

    def _role(self, effect: RoleChanged) -> None:
        log.info("%s: %s", effect.role.value, effect.reason)
        self.since = time.time()
        if effect.role is Role.ACTIVE:
            self.applier.hurry = True
            self._spawn(self.sites.run())
            self._statuses_seen = 0
            self._tell_sites()
        elif effect.role is Role.RECOVERING:
            self.applier.hurry = True
            self.applier.wake()
        else:
            self.applier.hurry = False

    def _recover(self, effect: Recover) -> None:
        self._spawn(self._recover_epoch(effect.epoch))

    async def _recover_epoch(self, epoch: int) -> None:
        """R12, steps 6 and 7: bring what is live behind R to the broker, end the sweepers; then the door may open."""
        began = time.monotonic()
        self.replica.redelivered_upto = self.node.log.end
        self.replica.begin_epoch(epoch)
        await self.applier.drained()
        await self.sweeper.stop()
        log.info("recovered in %.0f ms", 1000 * (time.monotonic() - began))
        self._feed(Recovered(epoch))

    def _restart(self, effect: Restart) -> None:
        self.end(effect.reason)

    def _answered(self, effect: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((effect.ok, effect.text))

    # ---- sending the log ---------------------------------------------------------------------------------------------

    def _subscribe(self, effect: Subscribe) -> None:
        self._unsubscribe(effect.peer)
        self.subscriptions[effect.peer] = ReplicatingSubscription(
            effect.start, self.node.log.end, self.config.replication.push_bytes_max
        )
        self._pump(effect.peer)

    def _unsubscribe(self, peer: int) -> None:
        self.subscriptions.pop(peer, None)
        task = self._catching_up.pop(peer, None)
        if task is not None:
            task.cancel()

    def _pump(self, peer: int) -> None:
        """Sends what there is room for: from memory, or else from the stream."""
        subscription = self.subscriptions.get(peer)
        if subscription is None:
            return
        subscription.appended(self.node.log.end)
        if peer in self._catching_up:
            return
        index = self.memory.starting_at(subscription.sent + 1)
        if index is None:
            if subscription.sent < self.node.log.end:
                self._catching_up[peer] = asyncio.get_running_loop().create_task(self._catch_up(peer, subscription))
            return
        link = self.links[peer]
        while index < len(self.memory) and subscription.has_room():
            batch = self.memory[index]
            subscription.send(batch)
            link.push(batch, self.node.leading, self.node.safe)
            index += 1

    async def _catch_up(self, peer: int, subscription: ReplicatingSubscription) -> None:
        """Reads the own stream until what the peer needs next is in memory."""
        arrived: asyncio.Queue[tuple[int, bytes, bytes]] = asyncio.Queue()
        channel: Channel | None = None
        try:
            channel = await self.streams.reader(
                self.streams.log_queue, lambda tag, header, body: arrived.put_nowait((tag, header, body)), prefetch=READER_PREFETCH
            )
            link = self.links[peer]
            while self.memory.starting_at(subscription.sent + 1) is None and subscription.sent < self.node.log.end:
                tag, header_payload, body = await arrived.get()
                channel.ack(tag)
                headers = wire.header_table(header_payload)
                if wire.LAST not in headers:
                    continue
                header, _ = wire.parse_batch(headers)
                if header.first != subscription.sent + 1 or self.node.log.epoch_at(header.first) != header.epoch:
                    if header.first > subscription.sent + 1 and self.node.log.epoch_at(header.first) == header.epoch:
                        raise LrqError(f"{self.node.name(peer)} needs entry {subscription.sent + 1}, which the log no longer has: it must join again")
                    continue
                while not subscription.has_room():
                    await asyncio.sleep(TICK_S / 5)
                batch = StoredBatch(header, body)
                subscription.send(batch)
                link.push(batch, self.node.leading, self.node.safe)
        except LrqError as error:
            log.warning("catching up %s: %s", self.node.name(peer), error)
        finally:
            if self._catching_up.get(peer) is asyncio.current_task():
                del self._catching_up[peer]
            if channel is not None and channel.error is None:
                await channel.close()
        self._pump(peer)

    def _link_up(self, peer: int) -> None:
        self._feed(PeerConnected(peer))

    def _link_down(self, peer: int) -> None:
        self._unsubscribe(peer)
        self._feed(PeerDisconnected(peer))

    def _link_ack(self, peer: int, upto: int) -> None:
        subscription = self.subscriptions.get(peer)
        if subscription is not None and upto <= subscription.sent:
            subscription.acknowledge(upto)
            self._feed(PeerAcked(peer, upto))
            self._pump(peer)

    # ---- receiving (door.Host) ---------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""
        if self.node.role is Role.ACTIVE:
            return ""
        me, primary = self.config.node.name, self.node.primary()
        if primary and primary != self.config.node.id:
            return f"node {me} is a backup; primary is {self.node.name(primary)}"
        return f"node {me} is {self.node.role.value} ({self.node.reason}); it serves no clients"

    def control(self, end: PeerEnd, body: bytes) -> None:
        """A control message of another node."""
        sender, message = wire.decode_control(body, self.config.node.group)
        refusal = self._refusal_of(sender) if sender == end.node else f"node {end.node} speaks as node {sender}"
        if refusal:
            self._refused = (time.monotonic(), refusal)
            if end.transport is not None:
                end.transport.write(frames.connection_close(NOT_ALLOWED, refusal))
            raise LrqError(refusal)
        old = self.ends.get(end.node)
        if old is not end:
            self.ends[end.node] = end
            if old is not None:
                old.close()
        self._feed(PeerMessage(sender, message))

    def _refusal_of(self, sender: int) -> str:
        """Why a node of the group is not taken for one; empty if it is one."""
        node = self.config.node
        if sender == node.id:
            return f"two nodes of group {node.group} have the id {sender}, {node.name} is one: give each its own in [node] id and [[peers]] id"
        if sender not in self.node.peers:
            return f"node {sender} is not among the [[peers]] of {node.name} (id {node.id}): correct them or the node's [node] id"
        return ""

    def push(self, end: PeerEnd, header: bytes, body: bytes) -> None:
        """A batch of the log from its leader."""
        batch, safe = wire.parse_batch(wire.header_table(header))
        if self.ends.get(end.node) is not end:
            end.close()
            return
        end.expect_ack(batch.last)
        self._feed(Push(end.node, batch, safe, body))
        self._consider_pausing()

    def _consider_pausing(self) -> None:
        """A backup that does not get its queues written takes no more, and so slows the publishers."""
        limit = self.config.replication.apply_lag_bytes_max
        waiting = self.replica.to_apply_bytes
        if (not self._paused and waiting > limit) or (self._paused and waiting < limit // 2):
            self._paused = not self._paused
            for end in self.ends.values():
                end.pause(self._paused)

    def _wake(self) -> None:
        self.applier.wake()
        if self._paused:
            self._consider_pausing()

    def peer_gone(self, end: PeerEnd) -> None:
        """The other node's connection to this door is lost."""
        if self.ends.get(end.node) is end:
            del self.ends[end.node]

    # ---- views (Applier) ---------------------------------------------------------------------------------------------

    async def append(self, queue: str, body: bytes, sequence: int, epoch: int) -> None:
        """Appends an entry to a view stream; it counts as applied when the stream has confirmed it."""
        stamp = format_stamp(epoch, sequence, self.replica.generations.newest).decode()
        self.sites.view_written(queue, sequence)
        await self.streams.write_view(queue, body, {"x-lrq-pos": stamp}, lambda: self.replica.applied(sequence, sequence))

    # ---- operators (HTTP) --------------------------------------------------------------------------------------------

    async def ask(self, request: PromoteRequest | RemoveRequest) -> tuple[bool, str]:
        """Hands an operator's request to the core and waits for its answer."""
        if self._answer is not None:
            return False, "another request is under way"
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._feed(request)
            ok, text = await asyncio.wait_for(asyncio.shield(self._answer), ANSWER_TIMEOUT_S)
            if ok and isinstance(request, PromoteRequest) and not request.dry_run:
                while self.node.role is Role.RECOVERING:
                    await asyncio.sleep(TICK_S / 10)
                ok = self.node.role is Role.ACTIVE
                text += " and its door is open" if ok else f", but is {self.node.role.value} now: {self.node.reason}"
            return ok, text
        except TimeoutError:
            return False, f"no answer within {ANSWER_TIMEOUT_S:g} s; {self.node.role.value}: {self.node.reason}"
        finally:
            self._answer = None

    def status(self) -> dict[str, Any]:
        """What GET /status tells of this incarnation."""
        node = self.node
        peers = {}
        for number, peer in node.peers.items():
            subscription = self.subscriptions.get(number)
            peers[node.name(number)] = {
                "connected": peer.connected and number in self.ends,
                "problem": self.links[number].problem,
                "acked": peer.acknowledged,
                "applied": peer.applied,
                "lag_entries": max(0, node.log.end - peer.acknowledged) if node.leading else None,
                "lag_bytes": subscription.in_flight_bytes if subscription else None,
                "apply_lag_entries": max(0, node.log.end - peer.applied) if node.leading else None,
            }
        primary = node.primary()
        return {
            "role": node.role.value,
            "reason": node.reason + self._troubles(),
            "epoch": node.leading or node.leader_epoch,
            "end": node.log.end,
            "safe": node.safe,
            "applied": self.replica.tracker.applied,
            "in_set": node.log.in_set or bool(node.leading),
            "members": [node.name(n) for n in sorted(node.log.members)],
            "primary": node.name(primary) if primary else None,
            "peers": peers,
            "sessions": self.sites.status(),
            "since": self.since,
            "generation": self.replica.generations.newest,
            "unsafe_bytes": self.replica.unsafe_bytes,
            "to_apply_bytes": self.replica.to_apply_bytes,
            "memory_bytes": self.memory.bytes,
        }

    def _troubles(self) -> str:
        """What keeps a node that waits for others from reaching them."""
        if self.node.role is not Role.CATCH_UP or self.node.primary():
            return ""
        troubles = [f"{self.node.name(number)}: {link.problem}" for number, link in self.links.items() if link.problem]
        refused_at, refusal = self._refused
        if refusal and time.monotonic() - refused_at < REFUSAL_SHOWN_S:
            troubles.append(f"refused: {refusal}")
        return f" ({'; '.join(troubles)})" if troubles else ""

    def queues(self) -> list[str]:
        """The receive queues that exist here."""
        return [queue for queue in self.replica.sink.queues() if names.parse_recv_queue(queue)]

    _EFFECTS: ClassVar[dict[type, Callable[[Incarnation, Any], None]]] = {
        WriteBatch: _write_batch,
        WriteFence: _write_fence,
        Send: _send,
        Subscribe: _subscribe,
        Disconnect: _disconnect,
        Ack: _ack,
        RefusePush: _refuse_push,
        SafeAdvanced: _safe,
        CutTail: _cut,
        RoleChanged: _role,
        Recover: _recover,
        Restart: _restart,
        Answer: _answered,
    }


def _record_from_pb(record: pb.Applied) -> AppliedRecord:
    queues = tuple(
        QueueRecord(
            q.vhost,
            q.queue,
            q.done,
            q.moved,
            q.due,
            q.purged,
            tuple(VisitRecord(v.origin, v.visit, v.dequeued, v.positions) for v in q.visits),
        )
        for q in record.queues
    )
    return AppliedRecord(record.applied, record.offset, tuple((g.applied, g.generation) for g in record.generations), queues, record.refused)


__all__ = ["Effect", "Incarnation"]
