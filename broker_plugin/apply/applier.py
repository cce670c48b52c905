"""The applier: brings the entries of `Replica.to_apply` to the broker beside this sidecar, in log order (R5, R11).

Rules:
- Only safe entries are applied. A follower waits a little longer: a message that is consumed meanwhile, and was
  routed to one queue only, is never written at all. While an epoch is taken (`hurry`), and on an active node (which
  applies only views), nothing waits.
- A declaration waits until all earlier publishes of its vhost are confirmed. Deletions, purges and declarations of
  queues and exchanges do not wait for messages that a full queue refuses: a deletion may be the only way to make
  room.
- A restart carries out again the entries that are not on record, which may be old while a full queue refuses
  something. But a queue whose messages are in no log is not deleted again where this node's own clients have declared
  it since.
- Every message is stamped with this node's newest generation. Messages behind R are published again, whatever was
  done before (R8).
- A lost connection ends `run`: the incarnation is over.
- Entries of a deleted vhost are passed over: other vhosts must not wait for them.
- Where the sidecar's user lacks a right, or a vhost is missing that this broker never had, nothing is written until
  an operator has mended that (`Shortfall`). Nothing is lost: the applier resumes where it stopped. Only a message
  refused among others ends `run`, as these others need a new generation (R8); the next applier waits a while before
  it tries that message again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import owner_of
from lrq_ha.replication.queues import QueueKey
from lrq_ha.routing import names

from ..amqp import frames
from ..amqp.address import Address
from ..amqp.declarations import first_name
from ..amqp.errors import BrokerRefuses, VhostNotFound
from ..log.definitions import Row, rows_of
from ..log.replica import LEVELS, Entry, Replica
from .rejected_messages import RejectedMessages, Sweeping
from .vhost_writer import SuspectEntries, VhostWriter, Window
from .waits import REFUSED_AGAIN_S, Waits

log = logging.getLogger("lrq_ha.applier")

_OF_QUEUES = (frames.QUEUE_DECLARE, frames.QUEUE_BIND)
# Declarations of queues with these levels that are not carried out here: on a backup, a queue that is not fully
# replicated is bound to nothing.
_NOT_HERE = {pb.LEVEL_CONFIGURATION: (frames.QUEUE_BIND,), pb.LEVEL_NONE: _OF_QUEUES}
TURN_MESSAGES_MAX = 256  # in one turn of the event loop
FULL_SHOWN_MAX = 3
WAITS_S = 0.2  # an applier that waits for longer counts as not overdue
ABSENT_AGAIN_S = 30.0  # between two tries to open a missing vhost
MESSAGE_AGAIN_S = 60.0  # before a message is tried again that ended the previous applier
GAPS_AGAIN_S = 5.0


class Views(Protocol):
    """The writer of view streams."""

    async def append(self, queue: str, body: bytes, sequence: int, epoch: int) -> None:
        """Returns when written to the socket; the entry is marked as applied when the stream has confirmed it."""


class Applier:
    """Brings safe entries to the queues of this node's broker.

    Args:
        replica: Where the entries wait.
        broker: The own broker; its vhost is replaced.
        views: The writer of view streams.
        sweeper: The sweeper of this node.
        delay_s: How late a follower applies.
        delay_entries_max, delay_bytes_max: How many entries, and bytes, may wait for that delay.
        window_messages_max: Most unconfirmed messages, without those that full queues refuse.
        window_bytes_max: Most unconfirmed bytes, without those that full queues refuse.
        on_follow: Called before anything is applied while another node leads.
        may_write: Asked whether the sidecar's user has all rights in a vhost that applying needs.
        set_objects: Carries out a change of the broker's users, policies and so on, up to an entry.
        doubt: The suspect entries over which the previous incarnation ended.
        refused: A message of the log that the broker refused, over which the previous incarnation ended, and the
            command that mends it.

    Attributes:
        refused: As the argument, for this incarnation.
        doubt: As the argument, for this incarnation.
        hurry: Apply everything that is safe at once.
    """

    def __init__(
        self,
        replica: Replica,
        broker: Address,
        views: Views,
        sweeper: Sweeping,
        *,
        delay_s: float,
        delay_entries_max: int,
        delay_bytes_max: int,
        window_messages_max: int,
        window_bytes_max: int,
        on_follow: Callable[[], Awaitable[None]],
        may_write: Callable[[str], Awaitable[bool]],
        doubt: SuspectEntries | None = None,
        refused: str = "",
        set_objects: Callable[[pb.DefinitionsChange, int], Awaitable[None]] | None = None,
    ) -> None:
        self.doubt = doubt
        self.refused = refused
        self._may_write = may_write
        self._set_objects = set_objects
        self.hurry = False
        self._on_follow = on_follow
        self._replica = replica
        self._broker = broker
        self._views = views
        self._sweeper = sweeper
        self._waits = Waits(self._tend, replica.shortfall)
        self._rejected = RejectedMessages(replica, sweeper, self._waits, lambda: self.hurry)
        self._delay_s = delay_s
        self._delay_entries_max, self._delay_bytes_max = delay_entries_max, delay_bytes_max
        self._window = Window(window_messages_max, window_bytes_max)
        self._lanes: dict[str, VhostWriter] = {}
        self._read_upto = 0  # end of the log when this node was rebuilt
        self._absent: dict[str, float] = {}  # vhosts that this broker did not have, and when to ask again
        self._follows = False
        self._turn = 0
        self._gaps_at = 0.0  # when to try refused declarations again
        self._drained: list[asyncio.Future[None]] = []
        self._ended: BaseException | None = None
        replica.progress.waits_for_room = self._waits_for_room

    def wake(self) -> None:
        """Looks for work again, as something has changed."""
        self._waits.wake()

    def log_advanced(self) -> None:
        """The log is safe further than before. On a primary hardly anything waits here, so this is cheap after each batch."""
        if self._replica.applying or self._drained or self._replica.to_apply or self._replica.forgotten_queues:
            self._waits.wake()

    async def run(self) -> None:
        """Applies until cancelled.

        Raises:
            LrqError: The broker's connection is lost, or the broker refuses an entry of the log.
        """
        self._read_upto = self._replica.node.log.end
        try:
            if self.refused:
                await self._waits.hold("message", self.refused, MESSAGE_AGAIN_S, urgent=lambda: self.hurry)
                self._replica.shortfall.hold("message", "")
                self.refused = ""
            await self._carry_out(self._replica.forgotten, self._replica.progress.tracker.applied)
            self._replica.forgotten = []
            while True:
                self._waits.clear()
                if self._replica.forgotten_queues and self._replica.node.following:
                    await self._remember_queues()
                pause = await self._tend()
                before = self._replica.to_apply_bytes
                pause = min(pause, await self._take(), await self._try_gaps_again())
                if self._replica.to_apply_bytes < before:
                    self._replica.progress.on_wake()  # peers that were held up may push again
                self._replica.progress.room_made()
                self._tell_drained()
                await self._waits.pause(pause)
        except BaseException as error:
            self._ended = error
            for lane in self._lanes.values():
                lane.judge_end()
                if lane.in_doubt:
                    self.doubt = SuspectEntries.over(lane.in_doubt, self.doubt)
            if isinstance(error, BrokerRefuses):
                self.refused = str(error)
            raise
        finally:
            for lane in self._lanes.values():
                lane.abort()
            for future in self._drained:
                if not future.done():
                    future.set_exception(LrqError(f"the applier has ended: {self._ended}", retriable=True))
                    future.exception()  # the future may have no waiter any more

    async def drained(self) -> None:
        """Returns when no safe entry waits and every publish is confirmed, but for those that a full queue
        refuses. Set `hurry` before.

        A full queue gets room from the consumers that the door will let in. (The primary's queue exceeded its limit
        if consumers vanished that held messages of it.)

        Raises:
            LrqError: The applier has ended.
        """
        if self._ended is not None:
            raise LrqError(f"the applier has ended: {self._ended}", retriable=True)
        if not self._is_drained():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(future)
            self.wake()
            await future

    def full(self) -> str:
        """For operators: missing vhosts and full queues, whose log entries are passed over or wait; empty if there are none."""
        found = [f"what the log has for vhost '{vhost}' was passed over, as this broker did not have that vhost" for vhost in self._absent]
        found += [each for lane in self._lanes.values() for each in lane.parked.full()]
        more = f"; and {len(found) - FULL_SHOWN_MAX} more" if len(found) > FULL_SHOWN_MAX else ""
        return "; ".join(found[:FULL_SHOWN_MAX]) + more

    def _waits_for_room(self, queue: QueueKey) -> list[tuple[int, bool]]:
        """Implements `Progress.waits_for_room`."""
        lane = self._lanes.get(queue[0])
        return lane.waits_for(queue[1]) if lane is not None and lane.parked.places else []

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        replica = self._replica
        if replica.forgotten or replica.applying or (replica.to_apply and replica.to_apply[0].last <= replica.progress.safe):
            return False
        return all(lane.settled for lane in self._lanes.values())

    def _tell_drained(self) -> None:
        if self._drained and self._is_drained():
            drained, self._drained = self._drained, []
            for future in drained:
                if not future.done():
                    future.set_result(None)

    async def _tend(self) -> float:
        pause = 3600.0
        for lane in list(self._lanes.values()):
            pause = min(pause, await lane.tend())
        return pause

    async def _lane(self, vhost: str, sequence: int) -> VhostWriter | None:
        """The writer of a vhost; None: the vhost is missing, and its entries from `sequence` on are to be passed over."""
        lane = self._lanes.get(vhost)
        while lane is None and time.monotonic() >= self._absent.get(vhost, 0.0):
            if not await self._may_write(vhost):
                await self._waits.rest(REFUSED_AGAIN_S)
                continue
            try:
                broker = replace(self._broker, vhost=vhost)
                lane = await VhostWriter.open(broker, self._replica, self._window, self._waits, self._sweeper.kick)
                self._lanes[vhost] = lane
                self._replica.entered.add(vhost)
            except VhostNotFound:
                if vhost not in self._replica.entered:
                    raise
                self._absent[vhost] = time.monotonic() + ABSENT_AGAIN_S
                log.error("this broker has no vhost '%s': what the log has for it is passed over, from entry %d on", vhost, sequence)
        return lane

    async def _try_gaps_again(self) -> float:
        """Tries refused declarations again that the log still declares; returns the seconds until the next try."""
        now, shortfall = time.monotonic(), self._replica.shortfall
        if not shortfall.refusals or self._replica.active:
            return 3600.0
        if now >= self._gaps_at:
            self._gaps_at = now + GAPS_AGAIN_S
            for vhost in shortfall.refusals.vhosts():
                lane = await self._lane(vhost, self._replica.progress.tracker.applied)
                if lane is not None:
                    await self._waits.insist(partial(lane.declarer.try_again, self._replica.declared.definitions.declares))
        return max(0.0, self._gaps_at - now)

    # ---- applying ----------------------------------------------------------------------------------------------------

    async def _take(self) -> float:
        """Applies all entries that may be applied now; returns the seconds until the next entry is old enough."""
        replica = self._replica
        waiting = replica.to_apply
        while waiting and waiting[0].last <= replica.progress.safe:
            if replica.shortfall.holds and not replica.active:
                with self._waits.counted():  # while an epoch is taken, one vhost must not delay the others
                    await self._waits.until(lambda: self.hurry or not replica.shortfall.holds)
            entry = waiting[0]
            if not (self.hurry or replica.active or self._too_much_waits()):
                young_s = entry.since + self._delay_s - time.monotonic()
                if young_s > 0:
                    return young_s
            waiting.popleft()
            replica.to_apply_bytes -= entry.size
            replica.applying = entry.first
            if replica.forgotten_queues:
                await self._remember_queues()
            if not self._follows and replica.follows:
                self._follows = True
                await self._on_follow()
            await self._apply(entry)
            replica.applying = 0
            self._turn += entry.count
            if self._turn >= TURN_MESSAGES_MAX:
                self._turn = 0
                replica.progress.room_made()
                await asyncio.sleep(0)
        return 3600.0

    def _too_much_waits(self) -> bool:
        """Whether more entries or bytes wait than the delay allows."""
        waiting = self._replica.to_apply
        return waiting[-1].last - waiting[0].first >= self._delay_entries_max or self._replica.to_apply_bytes > self._delay_bytes_max

    def overdue(self) -> int:
        """How many safe entries exceed the delay's limit; estimated where their bytes exceed it.

        0 while the applier waits for anything but its broker: a sweeper, before a purge or a declaration.
        """
        replica = self._replica
        if not replica.to_apply or self._waits.lasts_s() > WAITS_S:
            return 0
        entries = max(0, min(replica.to_apply[-1].last, replica.progress.safe) - replica.reached())
        too_many = entries - self._delay_entries_max if self._delay_s else entries
        if replica.to_apply_bytes > self._delay_bytes_max:
            too_many = max(too_many, entries - entries * self._delay_bytes_max // replica.to_apply_bytes)
        return max(0, too_many)

    def waited_s(self) -> float:
        """Total seconds of waits for anything but the broker's confirms."""
        return self._waits.counted_s()

    async def _remember_queues(self) -> None:
        """Declares queues that the broker has lost: by now this node follows or leads."""
        replica = self._replica
        if not replica.node.leading:
            await self._carry_out(replica.forgotten_queues, replica.progress.tracker.applied)
        replica.forgotten_queues = []

    async def _apply(self, entry: Entry) -> None:
        run, first = entry.run, entry.first
        kind = run.WhichOneof("kind")
        if entry.last <= self._replica.progress.tracker.applied:
            return
        if kind == "enqueues":
            await self._enqueues(run.enqueues, first)
        elif view := _view(run):
            await self._views.append(*view, first, self._replica.node.log.epoch_at(first))
        else:
            await self._other(run, first)
            self._replica.progress.applied(first, entry.last)
            if kind == "purge":
                await self._waits.until(lambda: self._is_applied(first))
                with self._waits.counted():
                    await self._replica.barrier.write_record()

    async def _other(self, run: pb.Run, sequence: int) -> None:
        """Carries out any other kind of entry."""
        kind = run.WhichOneof("kind")
        if kind == "purge":
            if (lane := await self._lane(run.purge.vhost, sequence)) is not None:
                await self._purge(lane, run.purge, sequence)
        elif kind == "topology":
            if (lane := await self._lane(run.topology.vhost, sequence)) is not None:
                await self._topology(lane, run.topology, sequence)
        elif kind == "definitions":
            await self._change_objects(run.definitions, sequence)
        elif kind == "checkpoint" and sequence == self._replica.begins_at:
            await self._change_objects(run.checkpoint.broker_objects, sequence)
            await self._carry_out(rows_of(run.checkpoint), sequence)

    async def _change_objects(self, entry: pb.DefinitionsChange, sequence: int) -> None:
        """An entry that this node itself wrote before it started again came from its broker: an old deletion would take what is there since."""
        wrote_it = sequence <= self._read_upto and owner_of(self._replica.node.log.epoch_at(sequence)) == self._replica.node.me
        if self._set_objects is not None and not wrote_it:
            with self._waits.counted():
                await self._set_objects(entry, sequence)

    async def _carry_out(self, rows: Iterable[Row], sequence: int) -> None:
        """Carries out the declarations of the log up to an entry."""
        for vhost, declares in rows:
            method = frames.method_id(declares)
            level = LEVELS[self._replica.declared.level((vhost, first_name(declares)))] if method in _OF_QUEUES else pb.LEVEL_ALL
            lane = await self._lane(vhost, sequence)
            if lane is not None and method not in _NOT_HERE.get(level, ()):
                await self._waits.insist(partial(lane.declarer.execute, declares))

    async def _purge(self, lane: VhostWriter, purge: pb.Purge, sequence: int) -> None:
        await self._waits.until(lambda: not lane.open_messages)
        with self._waits.counted():
            await self._rejected.wait_moved(purge.vhost, sequence)
        if purge.spared:  # a purge would also remove messages that clients held
            self._sweeper.suspect([(purge.vhost, purge.queue)], sequence)
        else:
            await self._waits.insist(partial(lane.declarer.purge, purge.queue))

    async def _topology(self, lane: VhostWriter, topology: pb.Topology, sequence: int) -> None:
        method = frames.method_id(topology.method)
        # Messages that a full queue refuses are not waited for: they may stay refused until a client consumes, and
        # everything behind would wait as well.
        await self._waits.until(lambda: lane.settled)
        await self._waits.until(lambda: self._is_applied(sequence - 1))
        barrier = self._replica.barrier
        with self._waits.counted():
            await self._rejected.wait_moved(topology.vhost, sequence)
            await barrier.settle_record(sequence)
        key = (topology.vhost, first_name(topology.method))
        if method == frames.QUEUE_DELETE:
            if self._is_superseded(key, sequence):
                return
            with self._waits.counted():
                await self._rejected.forget_parked(lane, key, sequence)
            barrier.deleted(key, sequence)
        elif method == frames.QUEUE_DECLARE:
            with self._waits.counted():
                await barrier.settle_deletion(key)
        if method not in _NOT_HERE.get(topology.level, ()):
            await self._waits.insist(partial(lane.declarer.execute, topology.method))

    def _is_applied(self, upto: int) -> bool:
        """Whether everything up to `upto` is in the queues, or parked messages remain."""
        return self._replica.progress.tracker.applied >= upto or any(lane.parked.places for lane in self._lanes.values())

    def _is_superseded(self, key: QueueKey, sequence: int) -> bool:
        """Whether entry `sequence`, carried out by an earlier incarnation that led, would delete a queue whose
        messages are in no log.
        """
        declared = self._replica.declared
        if sequence > self._read_upto or declared.queues.get(key, sequence) or declared.replicates(key):
            return False
        return owner_of(self._replica.node.log.epoch_at(sequence)) == self._replica.node.me

    async def _enqueues(self, run: pb.Enqueues, first: int) -> None:
        replica, last = self._replica, first + len(run.lengths) - 1
        replica.barrier.published(last)
        lane = await self._lane(run.vhost, first)
        if lane is not None:
            await lane.write(run, first, self.doubt)
            return
        for sequence in range(max(first, replica.progress.tracker.applied + 1), last + 1):
            replica.passes_over(sequence)
        replica.progress.applied(first, last)


def _view(run: pb.Run) -> tuple[str, bytes] | None:
    """(stream, body) of an entry of a view."""
    match run.WhichOneof("kind"):
        case "transmission":
            return run.transmission.queue, run.transmission.body
        case "reception":
            return run.reception.queue, run.reception.body
        case "status":
            return names.STATUS, run.status.body
    return None
