"""The sweeper: on a backup, removes from the queues the messages that clients took at the primary (R9, R11).

Rules:
- The sweeper consumes only while a message of the queue is due, through a small window, one queue at a time. A
  permanent consumer would break delivery limits, expiry and order.
- A removal counts only after a later reply on its channel has arrived. That reply does not prove that a quorum queue
  has carried out a reject. So before a pass ends, the queue has answered a command behind the rejects
  (`requeue.carried_out`): the target of dead letters is decided at that moment.
- Messages that are not due are requeued as a whole (`requeue`), when no more are on their way; else a quorum queue
  would change its order. So the window is no larger than the queue, removals from a shallow queue wait until all its
  messages are here, and the window is no smaller than the number of messages requeued to a quorum queue before. A
  message of higher priority that arrives meanwhile takes the place of another: nothing is concluded from messages
  that were not met then.
- A window that fills with messages that stay is widened once. Then the queue is left alone for a while; the door
  filters the rest.
- Copies that a TALLY of the primary shows as excess are rejected (`tally`), after all other due messages are gone.
  Messages that wait for room in the queue count as part of the queue: the queue may be full of excess copies. A tally
  is kept until the excess has arrived and is gone.
- Before RabbitMQ 4 each requeue counts as a delivery attempt. There a queue with a delivery limit is swept only when
  no message would have to be requeued. Such a queue counts as empty only where the queue itself says so (`is_empty`).
- A queue has one consumer at a time: the `QueueKeepAlive` is away during a pass, and a pass begins only when the
  messages left there by the sidecar's predecessor are back.
- A vhost that the sidecar may not access is left alone for a while. In a vhost that the broker does not have, nothing
  is due any more.
- `stop` waits only until held messages are requeued, including due messages that are not acked yet; the door filters
  those.
- A promotion waits a little longer (`take_over`): rejected messages become dead letters before clients are let in.
  The door would reject such a message only on meeting it: never without a consumer, and too late if the queue is
  purged or deleted first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.queue_filter import QueueFilter, Verdict
from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations
from ..amqp.address import Address
from ..amqp.channel import Carrier
from ..amqp.errors import AccessRefused, ChannelClosed, VhostNotFound
from ..amqp.requeue import WIDE_WINDOW_MESSAGES, RequeueDepths, all_arrived, carried_out, give_back, is_empty, requeue_is_free
from ..amqp.vhosts import VhostConnections
from ..log.replica import Replica
from ..log.tally import Tally
from .keepalive import QueueKeepAlive
from .sweep_pass import EVERYTHING, End, SweepPass, wait

log = logging.getLogger("lrq_ha.sweeper")

TAKEN_MAX_S = 20.0
ARRIVED_S = 0.25  # within this time rejected messages arrive at their dead-letter target
MOVES_MAX_S = 10.0  # a promotion waits at most so long for rejected messages
MOVES_POLL_S = 0.2
BACK_OFF_MIN_S = 1.0
BACK_OFF_MAX_S = 30.0
SUSPECT_BACK_OFF_MAX_S = 1_800.0  # for a queue of which nothing is due: it may stay deeper than any pass for years


class Sweeper:
    """Sweeps the queues of this node's broker, one after the other.

    Args:
        replica: Its filter says what is due.
        broker: The own broker; its vhost is replaced.
        window: Most messages held at once, at first; more for quorum queues to which more were requeued.
        interval_s: Seconds between two rounds.
    """

    def __init__(self, replica: Replica, broker: Address, *, window: int = 500, interval_s: float = 1.0) -> None:
        self._replica = replica
        self._window = min(window, WIDE_WINDOW_MESSAGES)
        self._interval_s = interval_s
        self._vhosts = VhostConnections(broker)
        self._event = asyncio.Event()
        self._stopping = False
        self._takes_over = False
        self._started = False
        self._ended = asyncio.Event()
        self._kicked: set[QueueKey | None] = set()
        self._suspects: dict[QueueKey, int] = {}  # suspect queues, each with the entry that must be applied first
        self._given_up: dict[QueueKey, float] = {}  # queues whose due messages were out of reach, and when that pass began
        self._back_off: dict[QueueKey, tuple[float, float]] = {}  # (not before, the pause after that)
        self._taken: dict[QueueKey, float] = {}  # since when another consumer was there
        self._rejected_at: dict[str, float] = {}  # by vhost: time of the last reject
        self._given_back = RequeueDepths()
        self._keeper = QueueKeepAlive(replica, broker, self._given_back)
        self._under_way: SweepPass | None = None

    def kick(self, queue: QueueKey | None = None) -> None:
        """Requests a pass at once over a full queue (None: an unknown one), whatever is due. May be called for
        each of thousands of messages.
        """
        self._kicked.add(queue)
        self._event.set()

    def suspect(self, queues: Iterable[QueueKey], upto: int) -> None:
        """Requests one full pass over these queues once everything up to `upto` is applied: copies may be left
        that are not due.

        Such copies are older copies, which do not count, of messages that a new generation publishes again; and
        messages that a purge removed while clients of the primary held other messages of the queue.
        """
        for queue in queues:
            self._suspects[queue] = max(upto, self._suspects.get(queue, 0))
        self._event.set()

    def given_up_at(self, queue: QueueKey) -> float:
        """When the last pass began that could not reach the queue's due messages (monotonic seconds); 0 if the
        last pass could, or none was tried.
        """
        return self._given_up.get(queue, 0.0)

    def is_rejecting(self, vhost: str) -> bool:
        """Whether messages rejected from a queue of the vhost may still be in that queue."""
        sweep = self._under_way
        return sweep is not None and sweep.rejects and sweep.target.key[0] == vhost

    async def run(self) -> None:
        """Sweeps until `stop` or cancelled.

        Raises:
            IllegalEvent: On an active node.
            LrqError: The broker's connection is lost.
        """
        self._started = True
        keeping = asyncio.create_task(self._keeper.run())
        try:
            while not self._stopping:
                if keeping.done():
                    keeping.result()
                if self._replica.active:
                    raise IllegalEvent("a sweeper runs on an active node")
                self._event.clear()
                for key, kicked in self._round():
                    if self._stopping:
                        break
                    await self._look_at(key, kicked)
                if not self._stopping and not self._kicked:  # a pass clears the event
                    await wait(self._event, self._interval_s)
            if self._takes_over:
                await self._move_what_was_rejected()
        finally:
            try:
                await self._keeper.stop()
            finally:
                self._ended.set()  # nothing is held any more; a promotion need not wait until the broker has answered connection closes
            await asyncio.gather(keeping, return_exceptions=True)
            await self._vhosts.close()

    async def _look_at(self, key: QueueKey, kicked: bool) -> None:
        target = self._replica.index.filter.queue(key)
        # `partial_queues` has the other queues; but a queue that is about to be deleted may be declared again as
        # partial by then.
        if not self._replica.declared.replicates(key) and not (kicked and target.due.count_moves(EVERYTHING)):
            return
        if self._vhosts.is_closed_to_us(key[0]):
            return
        try:
            await self._consider(target, kicked)
        except (VhostNotFound, AccessRefused) as error:
            self._vhosts.keep_out(key[0], error, "queues cannot be swept")
            if isinstance(error, VhostNotFound):
                self._without(key[0])

    async def _move_what_was_rejected(self) -> None:
        """Moves rejected messages out of the queues, for MOVES_MAX_S at most. Everything safe is applied, and no
        client uses the queues yet.
        """
        began, self._stopping = time.monotonic(), False
        timer = asyncio.get_running_loop().call_later(MOVES_MAX_S, self._stop)
        looked_at: list[QueueKey] = []
        while not self._stopping and (keys := self._within_reach(began)):
            if keys == looked_at:  # another consumer is in the way
                await asyncio.sleep(MOVES_POLL_S)
            for key in keys:
                await self._look_at(key, True)
            looked_at = keys
        timer.cancel()
        for target, count in self._moving():
            what = "%d messages that were rejected from queue '%s' in vhost '%s' have not become dead letters here"
            when = "they do when somebody consumes from it up to them, and not if it is purged or deleted before"
            log.warning(f"{what}: {when}", count, target.name, target.key[0])

    def _within_reach(self, since: float) -> list[QueueKey]:
        """Queues with messages to move in which no pass has given up since `since`."""
        keys = [target.key for target, _ in self._moving()]
        return [key for key in keys if self.given_up_at(key) < since and not self._vhosts.is_closed_to_us(key[0])]

    def _moving(self) -> list[tuple[QueueFilter, int]]:
        return self._replica.index.filter.moving(None, EVERYTHING, self._replica.progress.parked)

    def _round(self) -> Iterator[tuple[QueueKey, bool]]:
        """The queues to look at, each with whether it was kicked. A kicked queue waits for one other queue at
        most.

        Suspects come last: after a restart there may be ten thousand, and messages consumed meanwhile must not wait
        for all of them. Nor do these messages wait for the end of a round, as a full queue may be kicked all the
        time.
        """
        suspects = deque(self._suspects)
        others = self._pressing()
        looked = time.monotonic()
        while others or suspects or self._kicked:
            if time.monotonic() >= looked + self._interval_s:
                others, looked = others | self._pressing(), time.monotonic()
            for key in self._take_kicked():
                others.pop(key, None)
                yield key, True
            if others:
                key = next(iter(others))
                del others[key]
                yield key, False
            elif suspects:
                yield suspects.popleft(), False

    def _take_kicked(self) -> set[QueueKey]:
        kicked, self._kicked = self._kicked, set()
        keys = {key for key in kicked if key is not None}
        if None in kicked:
            keys.update((target.key for target in self._replica.index.filter.queues() if target.due.count(EVERYTHING)), self._suspects)
        return keys

    def _pressing(self) -> dict[QueueKey, None]:
        due = (target.key for target in self._replica.index.filter.queues() if target.due)  # may be of ten thousand queues
        return dict.fromkeys((*due, *self._replica.index.tallies.keys(), *(key for key in self._back_off if key not in self._suspects)))

    async def stop(self) -> None:
        """Ends `run`; returns when everything held has been requeued."""
        self._stop()
        if self._started:
            await self._ended.wait()

    async def take_over(self) -> None:
        """Like `stop`, after rejected messages within reach have become dead letters. Everything safe is applied."""
        self._takes_over = True
        await self.stop()

    def _stop(self) -> None:
        self._stopping = True
        self._event.set()

    async def _consider(self, target: QueueFilter, kicked: bool) -> None:
        key, progress = target.key, self._replica.progress
        upto = progress.tracker.applied
        if kicked or progress.parked:  # entries behind one that a full queue refuses are applied nevertheless
            upto = max(upto, self._replica.reached())
        # A full queue is gone through at once: older copies may fill it and keep out the messages that are published
        # again.
        whole_from = self._suspects.get(key)
        whole = whole_from is not None and (kicked or progress.tracker.applied >= whole_from)
        tally = self._replica.index.tallies.pending(key, progress.written)
        pressing = bool(target.due.count(upto)) or tally is not None
        if not pressing and not whole:
            for known in (self._back_off, self._taken, self._given_up):
                known.pop(key, None)
            return
        not_before, pause_s = self._back_off.get(key, (0.0, BACK_OFF_MIN_S))
        wait_s = not_before - time.monotonic()
        if wait_s > 0 and not kicked and not (pressing and wait_s > BACK_OFF_MAX_S):
            return
        began = time.monotonic()
        worth = await self._is_worth_it(target, upto, whole, tally)
        if worth is False:
            self._given_up[key] = began
            if tally is not None:
                self._replica.index.tallies.done(key, tally)
            return
        end, acted = End.STUCK, False
        if worth:
            window = max(self._window, self._given_back.least_window(key)) if self._is_quorum(key) else self._window
            end, acted = await self._pass(target, upto, window, whole, tally)
            if end is End.FULL and window < WIDE_WINDOW_MESSAGES and not self._stopping:
                end, acted = await self._pass(target, upto, WIDE_WINDOW_MESSAGES, whole, tally)
        if tally is not None and acted:
            self._replica.index.tallies.done(key, tally)
        if end is End.FULL:
            self._given_up[key] = began
        if end in (End.FULL, End.STUCK):
            pause_s = min(pause_s, BACK_OFF_MAX_S if pressing else SUSPECT_BACK_OFF_MAX_S)
            log.debug("queue '%s' in vhost '%s' is left alone for %.0f s: %s", key[1], key[0], pause_s, end.value)
            self._back_off[key] = (time.monotonic() + pause_s, 2 * pause_s)
        else:
            self._back_off.pop(key, None)
            if whole and end in (End.SEEN, End.GONE) and self._suspects.get(key) == whole_from:
                del self._suspects[key]

    def _without(self, vhost: str) -> None:
        """The vhost does not exist, so nothing is in its queues."""
        applied, tallies = self._replica.progress.tracker.applied, self._replica.index.tallies
        for target in [each for each in self._replica.index.filter.queues() if each.key[0] == vhost]:
            target.end_pass(target.due.expected(applied))
        for key in [key for key in (*self._suspects, *self._back_off, *tallies.keys()) if key[0] == vhost]:
            self._suspects.pop(key, None)
            self._back_off.pop(key, None)
            tally = tallies.pending(key, applied)
            if tally is not None:
                tallies.done(key, tally)

    async def _is_worth_it(self, target: QueueFilter, upto: int, whole: bool, tally: Tally | None) -> bool | None:
        """Whether a pass can remove anything and does no harm. None: unknown for now, as the queue does not answer
        or has another consumer.
        """
        vhost, queue = target.key
        due = target.due.count(upto)
        connection = await self._vhosts.connection(vhost)
        limited = self._uses_up_a_limit(connection, target.key)
        if not limited and (due or whole or tally is None):
            return True
        channel = await connection.channel()
        try:
            ready = (await channel.queue_declare(queue, passive=True))[1]
            if limited and not ready:
                async with self._keeper.away_from(target.key):
                    return await is_empty(channel, queue) or None
        except ChannelClosed:
            return not limited  # the pass finds out whether the queue exists
        finally:
            await channel.close()
        if limited:
            return ready <= self._there(target, upto)
        return tally is not None and ready + len(self._waiting(target, tally)) > tally.messages

    def _waiting(self, target: QueueFilter, tally: Tally) -> list[int]:
        """Entries counted by the tally whose copies wait for room in the queue, and that no later entry has dequeued."""
        newest = self._replica.index.generations.newest
        found = ((sequence, by_name) for sequence, by_name in self._replica.progress.waits_for_room(target.key) if sequence <= tally.upto)
        return [
            sequence for sequence, by_name in found if (by_name or not tally.messages) and target.verdict(sequence, newest) is Verdict.GIVE
        ]

    def _there(self, target: QueueFilter, upto: int) -> int:
        """How many of the due messages can be in the queue; messages that wait for room may wait for this queue."""
        return target.due.count(upto, self._replica.progress.parked)

    def _uses_up_a_limit(self, connection: Carrier, key: QueueKey) -> bool:
        """Whether a requeue counts against a delivery limit of the queue."""
        return not requeue_is_free(connection) and "x-delivery-limit" in self._arguments(key)

    def _is_quorum(self, key: QueueKey) -> bool:
        return self._arguments(key).get("x-queue-type") == "quorum"

    def _arguments(self, key: QueueKey) -> Mapping[str, Any]:
        return declarations.queue_arguments(self._replica.declared.declarations.get(key, b""))

    async def _pass(self, target: QueueFilter, upto: int, window: int, whole: bool, tally: Tally | None) -> tuple[End, bool]:
        """Goes through a queue once. Returns why the pass ended, and whether everything that the tally asks for was done."""
        async with self._keeper.away_from(target.key):
            return await self._pass_alone(target, upto, window, whole, tally)

    async def _pass_alone(self, target: QueueFilter, upto: int, window: int, whole: bool, tally: Tally | None) -> tuple[End, bool]:
        vhost, queue = target.key
        if target.has_dead_letters and (wait_s := self._rejected_at.get(vhost, 0.0) + ARRIVED_S - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)  # a pass before dead letters have arrived would count them as gone
        expected = target.due.expected(self._replica.progress.written, self._replica.progress.parked)
        waiting = self._waiting(target, tally) if tally is not None else []
        connection = await self._vhosts.connection(vhost)
        channel = await connection.channel()
        sweep = self._under_way = SweepPass(target, channel, self._replica, self._event, lambda: self._stopping, tally, waiting)
        try:
            end = await self._go_through(sweep, upto, window, whole)
            # Requeued messages stand behind the rejected ones, and are back by now. Another consumer that took some
            # would change their order.
            if sweep.rejects and not (sweep.kept or self._stopping or self._uses_up_a_limit(connection, target.key)):
                await carried_out(connection, queue)
        finally:
            self._under_way = None
            if sweep.rejects:
                self._rejected_at[vhost] = time.monotonic()
        if end is End.SEEN or end is End.GONE:
            missed = target.end_pass(expected, sweep.undecided)
            if missed:
                log.debug("%d messages due in queue '%s' in vhost '%s' are not there any more", len(missed), queue, vhost)
        return end, end is not End.STUCK and not (sweep.excess_waits or self._stopping)

    async def _go_through(self, sweep: SweepPass, upto: int, window: int, whole: bool) -> End:
        channel, target = sweep.channel, sweep.target
        vhost, queue = target.key
        end = End.STUCK
        try:
            _, ready, consumers = await channel.queue_declare(queue, passive=True)
            sweep.newest = self._replica.barrier.published_upto
            if self._uses_up_a_limit(channel.connection, target.key) and ready > self._there(target, upto):
                return end  # more messages have arrived since `_is_worth_it`
            if not self._is_taken(target.key, consumers):
                end = await sweep.run(upto, window, whole, ready)
                await sweep.leave()
                await sweep.settle()
                if sweep.is_cancelled:
                    await channel.queue_declare(queue, passive=True)  # the queue still exists: its consumer timed out or crashed
                    end = End.STUCK
                elif sweep.is_cut_short and end is End.SEEN:
                    end = End.DONE
                if end is End.SEEN:
                    await sweep.reject_excess()
                if sweep.tag and not self._stopping:
                    # The removals made room, and the queue has delivered more. These messages are requeued with the
                    # rest before the next pass begins: it would count messages that it does not meet as gone.
                    await all_arrived(channel, queue, lambda: sweep.met, lambda: sweep.held >= window or sweep.is_cancelled)
        except ChannelClosed as error:
            if error.no_such_queue:
                end = End.GONE
            else:  # 403: another client consumes exclusively; 406: the queue was deleted and declared again meanwhile
                log.debug("queue '%s' in vhost '%s' cannot be swept now: %s", queue, vhost, error.text)
                end = End.STUCK
        finally:
            if sweep.tag or sweep.met:
                # Of a deep queue more may be on their way; the number in a stuck queue is unknown.
                self._given_back.note(target.key, WIDE_WINDOW_MESSAGES if end is End.STUCK else max(sweep.held, sweep.deep_window))
            await give_back(channel.connection, channel, "" if sweep.is_cancelled else sweep.tag, 0 if sweep.is_cancelled else sweep.held, queue)
        if end is End.GONE:
            self._given_back.forget(target.key)
        return end

    def _is_taken(self, key: QueueKey, consumers: int) -> bool:
        """Whether another consumer is there; one that stays does not count for long.

        The consumer may be of this sidecar's predecessor, which held messages of the queue's head. A pass that
        consumed before these are back would requeue in another order.
        """
        if not consumers:
            self._taken.pop(key, None)
            return False
        return time.monotonic() - self._taken.setdefault(key, time.monotonic()) < TAKEN_MAX_S
