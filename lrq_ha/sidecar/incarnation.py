"""One incarnation of a sidecar: from connecting to its broker until something ends it. The core's driver.

Rules: effects of the core are carried out in order, at once; whatever breaks the one-writer rule or the connection to the broker ends the
incarnation, and the process starts the next one, which rebuilds everything from what the broker holds. No state outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, ClassVar

from broker_plugin import draining, frames, wire
from broker_plugin.applier import Applier
from broker_plugin.census import Census
from broker_plugin.door import Door
from broker_plugin.endpoints import ROUTING_VHOST
from broker_plugin.farewell import NOT_ALLOWED
from broker_plugin.peers import PeerEnd
from broker_plugin.renewing import GivenUp, Renewal
from broker_plugin.replica import Replica
from broker_plugin.streams import Streams
from broker_plugin.sweeper import Sweeper
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import format_stamp
from lrq_ha.replication.checkpoints import Checkpoints
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
    PauseRequest,
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
    StepDown,
    Subscribe,
    SwitchoverRequest,
    Tick,
    WriteBatch,
    WriteFence,
)
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import Position
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import ReplicatingSubscription, RoutingQueue, StoredBatch
from lrq_ha.routing import names

from .config import Config
from .links import Link
from .rebuild import applied_record, rebuild, state_before
from .reinit import tail, wipe
from .retention import Watch
from .sites import Sites

log = logging.getLogger("lrq_ha.node")

TICK_S = 0.05
RECORD_INTERVAL_S = 0.2
WATCH_INTERVAL_S = 1.0
CHECKPOINTS_PER_LOG_MIN = 4  # a log without its beginning must have one
ANSWER_TIMEOUT_S = 30.0
WINDOW_MESSAGES_MAX = 4_000
WINDOW_BYTES_MAX = 32 << 20
READER_PREFETCH = 50
STEP_DOWN_TIMEOUT_S = 10.0
APPLIED_TIMEOUT_S = 30.0
PARTING_S = 0.1
GREW_MAX = 4_096
REFUSAL_SHOWN_S = 5.0  # a node that was refused tries again every second

Request = PromoteRequest | RemoveRequest | SwitchoverRequest | PauseRequest


class Incarnation:
    """See above. `run` returns why it ended.

    Args:
        config: The node's configuration.
        door: The door, which outlives incarnations.
        shut_out: See Streams.
        paused, defers_to: See Node.
    """

    def __init__(self, config: Config, door: Door, shut_out: int = 0, *, paused: bool = False, defers_to: int = 0) -> None:
        self.config = config
        self.door = door
        r = config.replication
        self.node = Node(config.settings(), paused=paused, defers_to=defers_to)
        self.defers_to = 0  # what the next incarnation is told
        self._anew = False
        self._grew: deque[tuple[float, int]] = deque(maxlen=GREW_MAX)  # (monotonic seconds, end of the log), once per tick in which it grew
        self._leaving = ""  # why clients are turned away, while this leader steps down
        self.replica = Replica(self.node, r.replicate, self._emit)
        broker = config.broker_address(ROUTING_VHOST)
        self.streams = Streams(config.node.group, broker, r.log_bytes_max, self._written, self.end, shut_out=shut_out, on_blocked=door.block)
        self.applier = Applier(
            self.replica,
            broker,
            self,
            delay_s=r.apply_delay_s,
            delay_entries_max=r.apply_delay_entries_max,
            window_messages_max=WINDOW_MESSAGES_MAX,
            window_bytes_max=WINDOW_BYTES_MAX,
        )
        self.sweeper = Sweeper(self.replica, broker)
        self.sites = Sites(config, self.replica)
        self.memory = RoutingQueue(r.memory_bytes_max)
        self.watch = Watch(self.node, r.log_bytes_max, self.streams.head, self._feed)
        self.checkpoints = Checkpoints()
        self.links = {
            peer.id: Link(
                config.node.id,
                config.node.group,
                peer.id,
                config.door_address(peer.door, ROUTING_VHOST),
                self._link_up,
                self._link_down,
                self._link_ack,
            )
            for peer in config.peers
        }
        self.subscriptions: dict[int, ReplicatingSubscription] = {}
        self.ends: dict[int, PeerEnd] = {}
        self.since = time.time()
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._statuses_seen = 0
        self._recorded = (-1, -1)
        self._refused = (0.0, "")
        self.ready = False
        self._feeding = False
        self._paused = False
        self.replica.on_wake = self._wake
        self.replica.write_record = self._record
        self.replica.parked = self.applier.parked
        self.applier.on_full = self.sweeper.kick

    # ---- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Runs until the incarnation ends; returns the reason. Raises LrqError if it cannot start."""
        try:
            await self.streams.open()
            await rebuild(self.replica, self.streams, self.memory, self.checkpoints)
            self.sweeper.suspect(self._queues_published_again(), self.node.log.end)
            self.ready = True
            self.door.host = self
            self._feed(Opened(self.replica.tracker.applied, self.streams.lost_host and self.node.log.end > 0))
            for body in (self._ticks(), self._records(), self._watch(), self.applier.run(), self.sweeper.run()):
                self._spawn(body)
            for link in self.links.values():
                self._spawn(link.run())
            return await self._ended
        finally:
            self.ready = False
            self.door.host = None
            self.door.block("")
            self.door.log_blocked = ""
            self.door.close_clients(f"node {self.config.node.name} starts again")
            running = [*self._tasks, *self._catching_up.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._anew:
                await wipe(self.streams, self.config.broker_address(ROUTING_VHOST), self.node.log, self.replica.definitions)
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

    # ---- records -----------------------------------------------------------------------------------------------------

    def _queues_published_again(self) -> set[tuple[str, str]]:
        """Where older copies may be left of what is published again: wherever it may go."""
        if not self.replica.to_apply:
            return set()
        return {target.key for target in self.replica.filter.queues()} | {key for key, gone in self.replica.declared.items() if not gone}

    async def _records(self) -> None:
        """Writes the applied record when something has changed, and a CHECKPOINT when the log has grown enough."""
        while True:
            await asyncio.sleep(RECORD_INTERVAL_S)
            self._consider_checkpoint()
            await self._locate_checkpoint()
            if (self.replica.tracker.applied, self.replica.safe) != self._recorded:
                await self._record()
            if self.streams.lost_host and not self.node.lost_host:
                await self.streams.mark_boot()

    async def _record(self) -> None:
        applied, safe = self.replica.tracker.applied, self.replica.safe
        await self.streams.write_applied(applied_record(self.replica, self.checkpoints).SerializeToString())
        self._recorded = (applied, safe)
        self.replica.recorded = max(self.replica.recorded, applied)

    def _consider_checkpoint(self) -> None:
        settings = self.config.replication
        entries = self.node.log.end - self.checkpoints.last
        size = min(settings.checkpoint_bytes, settings.log_bytes_max // CHECKPOINTS_PER_LOG_MIN)
        due = entries >= settings.checkpoint_entries or self.replica.bytes_since_checkpoint >= size
        if due and not self.node.log.unfinished and self.node.role is Role.ACTIVE and entries > 1 and not self.replica.checkpoint():
            log.warning("the state of the log has become too large for a checkpoint: a restart will read more of it")

    async def _locate_checkpoint(self) -> None:
        point = self.checkpoints.to_locate(self.node.durable)
        if point is not None:
            offset = await self.streams.locate(point.sequence, point.leader)
            if offset is not None:
                self.checkpoints.located(point, offset)

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
            if not self._grew or self._grew[-1][1] < self.node.log.end:
                self._grew.append((time.monotonic(), self.node.log.end))

    def _lag_s(self, acknowledged: int) -> float:
        """How long ago the log was no longer than what a peer has acknowledged; to one tick, and no further back than GREW_MAX ticks of growth."""
        if acknowledged >= self.node.log.end:
            return 0.0
        grew = next((at for at, end in self._grew if end > acknowledged), time.monotonic())
        return round(time.monotonic() - grew, 2)

    async def _watch(self) -> None:
        """Who may fall off the log."""
        while True:
            await self.watch.look()
            self.watch.tell()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _emit(self, first: int, count: int, runs: list[pb.Run]) -> None:
        renewal = 0
        if count == 1 and runs[0].checkpoint.renewal:
            renewal = first
        elif count == 1 and runs[0].HasField("renewed"):
            renewal = -runs[0].renewed.checkpoint if runs[0].renewed.given_up else runs[0].renewed.checkpoint
        self._feed(Append(count, (first, runs), renewal))

    def _write_batch(self, effect: WriteBatch) -> None:
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES and isinstance(effect.body, bytes):  # a push: the same bytes, the leader's index
            body = effect.body
            runs = list(pb.Batch.FromString(body).runs)
            if header.first == self.node.log.base:  # never cut: the first batch of a log that begins here
                self.replica.begin(header.first, runs[0].checkpoint)
            self.replica.index_batch(header.first, runs, keep=True)
        else:
            if effect.kind is EntryKind.ENTRIES:
                given: tuple[int, list[pb.Run]] = effect.body  # type: ignore[assignment]
                first, runs = given
                if first != header.first:
                    raise IllegalEvent(f"entries given out from {first} on would be written from {header.first} on")
            else:
                members = sorted(header.sets[0][1])
                log.info("%s", "; ".join(filter(None, (f"in the set: {', '.join(map(self.node.name, members))}", self._left()))))
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
        self.watch.appended(header.last, len(body))
        if wire.checkpoint_of(runs) is not None:
            self.checkpoints.noted(self.node.log.start_point(header))
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
        for sequence, status in self.replica.statuses.since(self._statuses_seen):
            self.sites.status_entry(Position(self.node.log.epoch_at(sequence), sequence), status)
        self._statuses_seen = self.replica.safe

    def _cut(self, effect: CutTail) -> None:
        log.warning("entries from %d on were never safe and fall out of the log", effect.first)
        self.replica.cut(effect.first)
        self.memory.cut(effect.first)
        self.checkpoints.cut(effect.first)

    def _role(self, effect: RoleChanged) -> None:
        log.info("%s: %s", effect.role.value, effect.reason)
        self.since = time.time()
        if effect.role is Role.ACTIVE:
            self.applier.hurry = True
            if self.node.log.unfinished:
                self._leaving = f"node {self.config.node.name} goes on with renewing the log"
                self._spawn(self._go_on_renewing(self.node.log.unfinished))
            self._spawn(self.sites.run())
            self._spawn(Census(self.replica, self.door, self.config.broker_address(ROUTING_VHOST)).run())
            self._statuses_seen = 0
            self._tell_sites()
        elif effect.role is Role.RECOVERING:
            self.applier.hurry = True
            self.applier.wake()
        else:
            self.applier.hurry = False

    def _recover(self, effect: Recover) -> None:
        self._spawn(self._recover_epoch(effect.epoch, effect.clean))

    async def _recover_epoch(self, epoch: int, clean: bool) -> None:
        """R12, steps 6 and 7: bring what is live behind R to the broker, end the sweepers; then the door may open."""
        began = time.monotonic()
        self.replica.redelivered_upto = 0 if clean else self.node.log.end
        self.replica.begin_epoch(epoch)
        await self.applier.drained()
        await self.sweeper.stop()
        log.info("recovered in %.0f ms", 1000 * (time.monotonic() - began))
        self._feed(Recovered(epoch))

    def _restart(self, effect: Restart) -> None:
        self.defers_to = effect.defers_to
        # What was sent just now, to the node that takes over, is to reach it before the connections are closed.
        self.ready = False
        asyncio.get_running_loop().call_later(PARTING_S if effect.defers_to else 0.0, self.end, effect.reason)

    def _answered(self, effect: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(effect)

    # ---- sending the log ---------------------------------------------------------------------------------------------

    def _subscribe(self, effect: Subscribe) -> None:
        self._unsubscribe(effect.peer)
        self.subscriptions[effect.peer] = ReplicatingSubscription(effect.start, self.node.log.end, self.config.replication.push_bytes_max)
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
        nearest = self.checkpoints.start(subscription.sent)
        link = self.links[peer]
        try:
            async with aclosing(self.streams.batches(nearest.offset if nearest else "first", prefetch=READER_PREFETCH)) as records:
                async for _, header, body in records:
                    if header is not None and header.first > subscription.sent and self.node.log.epoch_at(header.first) == header.epoch:
                        if header.first > subscription.sent + 1:
                            raise LrqError(
                                f"{self.node.name(peer)} needs entry {subscription.sent + 1}, which the log no longer has: it must join again"
                            )
                        while not subscription.has_room():
                            await asyncio.sleep(TICK_S / 5)
                        batch = StoredBatch(header, body)
                        subscription.send(batch)
                        link.push(batch, self.node.leading, self.node.safe)
                    if self.memory.starting_at(subscription.sent + 1) is not None or subscription.sent >= self.node.log.end:
                        break
        except LrqError as error:
            log.warning("catching up %s: %s", self.node.name(peer), error)
            if self.subscriptions.get(peer) is subscription:
                self._spawn(self.watch.cannot_send(peer))
                return
        finally:
            if self._catching_up.get(peer) is asyncio.current_task():
                del self._catching_up[peer]
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
            return self._leaving
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
        before = None
        if batch.begins_renewal and not self.node.log.end:
            before = state_before(pb.Batch.FromString(body).runs[0].checkpoint)
        self._feed(Push(end.node, batch, safe, body, before))
        self._consider_pausing()

    def _consider_pausing(self) -> None:
        """A backup that does not get its queues written takes no more, and so slows the publishers."""
        limit = min(self.config.replication.apply_lag_bytes_max, self.config.replication.log_bytes_max // CHECKPOINTS_PER_LOG_MIN)
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
        await self.streams.write_view(queue, body, {"x-lrq-pos": stamp}, lambda: self._view_applied(sequence))

    def _view_applied(self, sequence: int) -> None:
        self.replica.applied(sequence, sequence)
        self.applier.wake()

    # ---- operators (HTTP) --------------------------------------------------------------------------------------------

    async def _ask_core(self, request: Request) -> Answer:
        if self._answer is not None:
            return Answer(False, "another request is under way")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._feed(request)
            return await asyncio.wait_for(asyncio.shield(self._answer), ANSWER_TIMEOUT_S)
        except TimeoutError:
            return Answer(False, f"no answer within {ANSWER_TIMEOUT_S:g} s; {self.node.role.value}: {self.node.reason}")
        finally:
            self._answer = None

    async def ask(self, request: Request) -> tuple[bool, str]:
        """Hands an operator's request to the core and waits for its answer; a promotion also until the door is open."""
        answer = await self._ask_core(request)
        ok, text = answer.ok, answer.text
        if ok and isinstance(request, PromoteRequest) and not request.dry_run:
            while self.node.role is Role.RECOVERING:
                await asyncio.sleep(TICK_S / 10)
            ok = self.node.role is Role.ACTIVE
            text += " and its door is open" if ok else f", but is {self.node.role.value} now: {self.node.reason}"
        return ok, text

    async def switchover(self, node: int, timeout_s: float, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Hands the next epoch to `node` (0: to an in-sync backup): nothing lost, nothing twice.

        Args:
            timeout_s: How long consumers may take to settle what they hold.
            force: Go on when that is over.
        """
        answer = await self._ask_core(SwitchoverRequest(node))
        if not answer.ok or dry_run:
            return answer.ok, answer.text + (f"; consumers hold {draining.held(self.door)} messages" if answer.ok else "")
        name = self.node.name(answer.node)
        ok, text = await self._step_down(answer.node, f"node {self.config.node.name} hands over to {name}", timeout_s, force)
        return ok, f"{self.config.node.name} has handed over to {name}{text}" if ok else text

    async def demote(self, timeout_s: float, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Ends this epoch; nobody takes the next one until an operator says so. Arguments as of `switchover`."""
        if self.node.role is not Role.ACTIVE:
            return False, f"{self.config.node.name} is not primary"
        if dry_run:
            return True, f"would step down; consumers hold {draining.held(self.door)} messages"
        await self._ask_core(PauseRequest(True))
        ok, text = await self._step_down(0, f"node {self.config.node.name} steps down", timeout_s, force)
        if not ok:
            await self._ask_core(PauseRequest(False))
        return ok, f"{self.config.node.name} has stepped down{text}; the group is paused" if ok else text

    async def _step_down(self, node: int, reason: str, timeout_s: float, force: bool) -> tuple[bool, str]:
        ok, text, left = await self._close_door(node, reason, timeout_s, force)
        if ok:
            self._feed(StepDown(node, not left))
        return ok, text

    async def _close_door(self, node: int, reason: str, timeout_s: float, force: bool) -> tuple[bool, str, int]:
        """Turns every client away in order and waits until everything is safe; `_leaving` keeps the door closed. Says how many messages are left."""
        if self._leaving:
            return False, f"the door is closed already: {self._leaving}", 0
        left = await draining.drain(self.door, timeout_s)
        if left and not force:
            draining.give_up(self.door)
            return False, (
                f"consumers still hold {left} messages after {timeout_s:g} s; nothing was changed. Wait longer with --timeout, or repeat with "
                "--force: they are then delivered again"
            ), left
        self._leaving = reason
        await draining.close(self.door, reason, STEP_DOWN_TIMEOUT_S)
        deadline = time.monotonic() + STEP_DOWN_TIMEOUT_S
        while not self._all_safe(node) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S / 10)
        if not self._all_safe(node):
            self._leaving = ""
            return False, f"the log did not become safe within {STEP_DOWN_TIMEOUT_S:g} s: this node goes on as primary", left
        return True, f"; {left} messages are delivered again" if left else "", left

    def _all_safe(self, node: int) -> bool:
        acknowledged = node == 0 or self.node.peers[node].acknowledged == self.node.log.end
        return self.node.safe == self.node.log.end == self.replica.end and acknowledged

    async def renew(self, timeout_s: float, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """R17: publishes everything live again behind a CHECKPOINT, with the door closed. Arguments as of `switchover`."""
        name = self.config.node.name
        if self.node.role is not Role.ACTIVE:
            return False, f"{name} is not primary"
        if dry_run:
            queues = len(self.replica.definitions.queues())
            return True, f"would close the door and publish again what is live in {queues} queues; consumers hold {draining.held(self.door)} messages"
        ok, text, _ = await self._close_door(0, f"node {name} renews its log", timeout_s, force)
        if not ok:
            return ok, text
        task = self._spawn(self._renew())
        await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled() or task.exception():
            reason = self._ended.result() if self._ended.done() else "see its log"
            return False, f"{name} could not go on: {reason}; whoever leads next goes on with it"
        renewed, said = task.result()
        return renewed, said + text

    async def _renew(self) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(APPLIED_TIMEOUT_S):
                await self.replica.wait_applied(self.replica.end)
        except TimeoutError:
            self._leaving = ""
            return False, "a queue refuses messages (a length limit?), so not everything is in its queue: make room and try again"
        if not self.replica.checkpoint(renewal=True):
            self._leaving = ""
            return False, "the state of the log has become too large for a checkpoint, so no node can begin at one"
        return await self._go_on_renewing(self.node.log.end)

    async def _go_on_renewing(self, checkpoint: int) -> tuple[bool, str]:
        """Moves what stands before the CHECKPOINT. Raises LrqError if it must be gone on with, by whoever leads next."""
        began, name = time.monotonic(), self.config.node.name
        renewal = Renewal(self.replica, self.config.broker_address(ROUTING_VHOST), checkpoint)
        problem = ""
        await self.replica.wait_safe(checkpoint)
        try:
            await renewal.run()
        except GivenUp as error:
            problem = str(error)
        await self.watch.look(now=True)
        if not problem and self.node.head > checkpoint:
            problem = f"what is live takes more than log_bytes_max = {self.config.replication.log_bytes_max}: nobody can join before that is raised"
        await self.replica.wait_safe(self.replica.renewed(checkpoint, given_up=bool(problem)))
        self._leaving = ""
        if problem:
            log.error("the renewal was given up: %s", problem)
            return False, f"{problem} ({renewal.moved} messages were published again)"
        said = f"{name} has published {renewal.moved} messages again in {time.monotonic() - began:.1f} s: a node may join from entry {checkpoint} on"
        log.info("%s", said)
        return True, said

    def tail(self) -> AsyncIterator[dict[str, Any]]:
        """The entries that a diverged node refuses to drop. Raises LrqError if it is not diverged."""
        if self.node.role is not Role.DIVERGED:
            raise LrqError(f"{self.config.node.name} is {self.node.role.value}, not diverged: it has no entries of its own")
        nearest = self.checkpoints.start(self.node.tail_from - 1)
        return tail(self.streams, self.node.log, self.node.tail_from, nearest.offset if nearest else "first")

    def reinit(self, *, dry_run: bool) -> tuple[bool, str]:
        """Lets this node begin anew: everything that its log brought to its broker is deleted, and it follows from the first entry."""
        name, node = self.config.node.name, self.node
        if node.leading or node.role is Role.RECOVERING:
            return False, f"{name} is primary: only a backup can be made anew"
        dropped = f"entries {node.tail_from} to {node.log.end}, which it alone may hold" if node.role is Role.DIVERGED else "its log"
        if dry_run:
            return True, f"would drop {dropped}, and the queues and exchanges that its log declared; it then follows from the first entry"
        self._anew = True
        self.end("made anew by the operator")
        return True, f"{name} drops {dropped}, and begins anew"

    def status(self) -> dict[str, Any]:
        """What GET /status tells of this incarnation."""
        node = self.node
        peers = {}
        for number, peer in node.peers.items():
            subscription = self.subscriptions.get(number)
            peers[node.name(number)] = {
                "connected": peer.connected and number in self.ends,
                "problem": self.links[number].problem or self.watch.trouble(number),
                "acked": peer.acknowledged,
                "applied": peer.applied,
                "lag_entries": max(0, node.log.end - peer.acknowledged) if node.leading else None,
                "lag_bytes": subscription.in_flight_bytes if subscription else None,
                "log_bytes_behind": self.watch.retention.behind(peer.acknowledged) if node.leading and peer.acknowledged else None,
                "lag_seconds": self._lag_s(peer.acknowledged) if node.leading else None,
                "apply_lag_entries": max(0, node.log.end - peer.applied) if node.leading else None,
            }
        primary = node.primary()
        return {
            "role": node.role.value,
            "reason": node.reason + self._troubles(),
            "epoch": node.leading or node.leader_epoch,
            "head": node.head,
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
            "paused": node.paused,
            "diverged_from": node.tail_from if node.role is Role.DIVERGED else None,
        }

    def _troubles(self) -> str:
        """What keeps a node that waits for others from reaching them, and whom a primary's log may leave behind."""
        if self.node.leading:
            behind = "; ".join(filter(None, map(self.watch.trouble, self.node.peers)))
            return "".join(f"; {trouble}" for trouble in (self._leaving, self._left(), behind) if trouble)
        if self.node.role is not Role.CATCH_UP or self.node.primary():
            return ""
        troubles = [f"{self.node.name(number)}: {link.problem}" for number, link in self.links.items() if link.problem]
        refused_at, refusal = self._refused
        if refusal and time.monotonic() - refused_at < REFUSAL_SHOWN_S:
            troubles.append(f"refused: {refusal}")
        return f" ({'; '.join(troubles)})" if troubles else ""

    def _left(self) -> str:
        """Whom this primary took out of the set, and why."""
        peers = self.node.peers.items()
        return "; ".join(f"{self.node.name(number)} was taken out of the set, as {peer.left}" for number, peer in peers if peer.left)

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


__all__ = ["Effect", "Incarnation"]
