"""Renewing a group's log: everything live is published again behind a CHECKPOINT, so that a node with an empty log can begin there (R17).

Rules:
- The door is open. One queue at a time stands still (`pausing`): nobody holds anything of it, nothing is published to it, and all that was is in it.
  What stands in it then is moved, from the front of the queue to its end, also what came after the CHECKPOINT: so the queue's order is kept.
- An entry MOVING says where that begins, and one where it ends. Whoever has to go on in the middle goes on with that queue before anybody may use
  it.
- A message and the DEQUEUE of its old copy stand in one batch; the old copy is acked when that is safe. The applier publishes the new one.
- A moved message begins anew in its queue: its position is new, its time to live begins again, what RabbitMQ counts of it (x-death, deliveries) too.
- It ends when nothing old can be left (`passes`): dead letters may be on their way from a queue that is looked at later to one that was looked at
  before. So queues are looked into again, those before that dead-letter to others; one too long to be looked behind, and whose length does not say
  that nothing came, is moved again. After ROUNDS_MAX rounds that found something it is given up.
- What RabbitMQ says of a queue is believed while it counts the pass's own consumer: of a quorum queue that does not answer it says that it is empty.
- Given up is what cannot be moved unchanged: to another routing key for its dead letters, or at the cost of its deliveries (RabbitMQ 3.x). Also where
  consumers do not finish what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.filter import Verdict
from lrq_ha.replication.levels import Level
from lrq_ha.replication.passes import Rounds
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.visits import Deaths

from . import topology
from .channels import QueueKey
from .client import Channel, Connection
from .client_errors import Address, ChannelClosed
from .endpoints import ROUTING_VHOST
from .headers import cut, deaths
from .keeping import has_a_free_way_back
from .pausing import Busy, Pause
from .reaching import downstream_last
from .replica import BATCH_BYTES_MAX, Replica
from .sweeper import ack_all, all_arrived, give_back
from .vhosts import Vhosts

if TYPE_CHECKING:
    from .door import Door

log = logging.getLogger("lrq_ha.renewing")

WINDOW_MESSAGES = 500
KEPT_MAX = 1_500  # quorum queues give no more than 2,000 to one consumer
WINDOWS_UNDER_WAY = 2
ROUNDS_MAX = 10
UNFINISHED_S = 86_400.0  # nobody may use a queue that is half done
QUIET_S = 0.1
STUCK_S = 20.0
_GOES_BY_ITSELF = ("x-message-ttl", "x-max-length", "x-max-length-bytes")
TO_APPLY_BYTES_MAX = 32 << 20
POLL_S = 0.01
#: What RabbitMQ and the door have written into the headers, and further routing keys, which have been followed.
NOT_MOVED = (b"x-lrq-pos", b"x-death", b"x-first-death-queue", b"x-first-death-exchange", b"x-first-death-reason", b"x-last-death-queue",
             b"x-last-death-exchange", b"x-last-death-reason", b"x-delivery-count", b"CC")  # fmt: skip


class GivenUp(LrqError):
    """Something live may be left before the CHECKPOINT."""


class _Copy(NamedTuple):
    """A delivery. `key`: its routing key; `sequence`: None if it has no position."""

    tag: int
    redelivered: bool
    key: str
    sequence: int | None
    generation: int
    deaths: Deaths
    header: bytes
    body: bytes


class Renewal:
    """Moves what is live.

    Args:
        replica, door: Of this node, which is primary.
        broker: The own broker; the vhost in it is replaced.
        checkpoint: Sequence of the CHECKPOINT.
        timeout_s: How long the consumers of a queue may take to finish what they hold.
        force: After that their channels are closed.

    Attributes:
        moved: Messages that were published again.
        longest_s, longest: The longest time for which a queue stood still, and its name.
    """

    def __init__(self, replica: Replica, door: Door, broker: Address, checkpoint: int, *, timeout_s: float, force: bool) -> None:
        self.moved = 0
        self.longest_s, self.longest = 0.0, ""
        self._replica = replica
        self._door = door
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        self._force = force
        self._vhosts = Vhosts(broker)

    async def run(self) -> None:
        """Returns when nothing live is left before the CHECKPOINT and everything moved is in its queue.

        Raises:
            GivenUp: There may be something left; the text names the queue.
            LrqError: The connection to the broker is lost, or this node is not primary any more.
        """
        passes = self._replica.passes
        rounds = Rounds(passes, ROUNDS_MAX)
        try:
            for key, method in self._queues().items():
                if key in passes.unfinished():
                    await self._renew(key, topology.queue_arguments(method), UNFINISHED_S)
            await self._all_applied()
            while not rounds.done:
                if rounds.too_many:
                    raise GivenUp(f"dead letters keep arriving: not all was moved in {ROUNDS_MAX} rounds", todo="try again later", retriable=True)
                rounds.ended(found=await self._round())
        except Busy as error:
            raise GivenUp(
                f"{error.what}, after {self._timeout_s:g} s", todo="wait longer with --timeout, or repeat with --force: they are then delivered again"
            ) from error
        finally:
            await self._vhosts.close()

    async def _round(self) -> bool:
        """Whether anything old was found."""
        queues, found = self._queues(), False
        busy = []
        for key in downstream_last(self._replica.definitions, list(queues)):
            try:
                found |= await self._renew(key, topology.queue_arguments(queues[key]), self._timeout_s)
            except Busy:
                busy.append(key)
        for key in busy:
            found |= await self._renew(key, topology.queue_arguments(queues[key]), self._timeout_s, force=self._force)
        return found

    def _queues(self) -> dict[QueueKey, bytes]:
        known = self._replica.definitions.queues()
        unknown = [key for key, gone in self._replica.declared.items() if not gone and key not in known and key[0] != ROUTING_VHOST]
        if unknown:
            raise GivenUp(f"how queue '{unknown[0][1]}' in vhost '{unknown[0][0]}' was declared is not known", todo="declare it again, as it is")
        return {
            key: method
            for key, method in known.items()
            if topology.level_of(method) is Level.ALL and topology.queue_arguments(method).get("x-queue-type") != "stream"
        }

    async def _all_applied(self) -> None:
        try:
            async with asyncio.timeout(STUCK_S):
                await self._replica.wait_applied(self._checkpoint)
        except TimeoutError:
            raise GivenUp("what was published before is not in its queues (is one full?)", todo="make room in it", retriable=True) from None

    async def _renew(self, key: QueueKey, arguments: Mapping[str, Any], timeout_s: float, *, force: bool = False) -> bool:
        """A visit to a queue; whether anything old was in it. Raises Busy."""
        if self._replica.node.head > self._checkpoint:
            raise GivenUp("what is live, with what is published meanwhile, takes more than the log holds", todo="raise log_bytes_max")
        pause = Pause(self._door, self._replica, key, arguments)
        connection = await self._vhosts.connection(key[0])
        await pause.begin(timeout_s, force=force)
        visit = _Visit(self._replica, connection, key, arguments, self._checkpoint)
        given_up: GivenUp | None = None
        found = False
        try:
            found = await visit.run()
        except ChannelClosed as error:
            if not error.no_such_queue:  # else it has gone by itself
                given_up = GivenUp(f"queue '{key[1]}' in vhost '{key[0]}' cannot be read: {error.text}")
        except GivenUp as error:
            given_up = error
        # Not after any other error, which ends this incarnation: whoever goes on with a queue that is half done must be the first to use it.
        await pause.end()
        self.moved += visit.moved
        if pause.seconds > self.longest_s:
            self.longest_s, self.longest = pause.seconds, key[1]
        if given_up is not None:
            raise given_up
        return found


class _Visit:
    """What is done with a queue while it stands still.

    Attributes:
        moved: Messages that were published again.
    """

    def __init__(self, replica: Replica, connection: Connection, key: QueueKey, arguments: Mapping[str, Any], checkpoint: int) -> None:
        self.moved = 0
        self._replica = replica
        self._connection = connection
        self._key = key
        self._arguments = arguments
        self._quorum = arguments.get("x-queue-type") == "quorum"
        self._limited = "x-delivery-limit" in arguments and not has_a_free_way_back(connection)
        self._checkpoint = checkpoint
        self._published = RangeSet()

    async def run(self) -> bool:
        """Whether anything old was in the queue. Raises ChannelClosed, GivenUp."""
        passes = self._replica.passes
        mark = passes.unfinished().get(self._key, 0)
        if not mark:
            ready = await self._depth(0)
            if not ready and not self._quorum:
                return False
            if ready and self._limited:
                raise GivenUp(
                    f"queue '{self._key[1]}' in vhost '{self._key[0]}' has a delivery limit, and this RabbitMQ counts what the sidecar gives back",
                    todo="let it be emptied first, or use RabbitMQ 4",
                    retriable=True,
                )
            if passes.begun(self._key) or not ready:
                if ready and ready == passes.holds(self._key) and not any(name in self._arguments for name in _GOES_BY_ITSELF):
                    return False
                if ready <= KEPT_MAX:
                    look = self._pass(0)
                    if await look.run(ready) and not look.found:
                        return False
            mark = self._replica.note_moving(self._key, done=False)
            self._replica.flush()
            await self._replica.wait_safe(mark)
        return await self._move(mark)

    async def _move(self, mark: int) -> bool:
        found = False
        while True:
            one = self._pass(mark)
            whole = await one.run(await self._depth(0))
            found |= one.found
            self.moved += one.moved
            await self._applied(one.published)
            if whole:
                break
            if not one.moved and await self._depth(0) != self._replica.passes.holds(self._key):
                why = "holds too many messages to look behind them (priorities, or some have expired)"
                raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' {why}", retriable=True)
            if not one.moved:
                break
        self._replica.note_moving(self._key, done=True)
        return found

    def _pass(self, mark: int) -> _Pass:
        return _Pass(self._replica, self._connection, self._key, self._arguments, self._checkpoint, mark, self._depth)

    async def _applied(self, published: RangeSet) -> None:
        """Returns when what was moved is in the queue."""
        tracker, until = self._replica.tracker, time.monotonic() + STUCK_S
        while any(tracker.needs(first, last) for first, last in published):
            if time.monotonic() > until:
                what = f"queue '{self._key[1]}' refuses messages (a length limit?)"
                raise GivenUp(what, todo="make room in it, or raise its limit", retriable=True)
            await asyncio.sleep(POLL_S)

    async def _depth(self, consumers: int) -> int:
        """Messages that are ready in the queue, when it has so many consumers. Raises GivenUp if it has not after a while."""
        channel = await self._connection.channel()
        found = -1
        try:
            async with asyncio.timeout(STUCK_S):
                while True:
                    _, ready, found = await channel.queue_declare(self._key[1], passive=True)
                    if found == consumers:
                        return ready
                    await asyncio.sleep(QUIET_S)
        except TimeoutError:
            what = "does not answer" if found < consumers else "is consumed from by somebody who does not use the door"
            raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' {what}", retriable=True) from None
        finally:
            await channel.close()


class _Pass:
    """One pass over a queue.

    Args:
        mark: What stands before this entry is moved; 0: nothing is, it is only looked at, up to the first that is old.
        depth: Asks how many messages are ready, as `_Visit._depth`.

    Attributes:
        found: Whether a live message from before the CHECKPOINT was met.
        moved: How many were moved.
        published: Their entries.
    """

    def __init__(
        self,
        replica: Replica,
        connection: Connection,
        key: QueueKey,
        arguments: Mapping[str, Any],
        checkpoint: int,
        mark: int,
        depth: Callable[[int], Awaitable[int]],
    ) -> None:
        self.found = False
        self.moved = 0
        self.published = RangeSet()
        self._replica = replica
        self._connection = connection
        self._key = key
        self._dies_by_key = bool(arguments.get("x-dead-letter-exchange")) and "x-dead-letter-routing-key" not in arguments
        self._checkpoint = checkpoint
        self._mark = mark
        self._depth = depth
        self._kept = 0
        self._arrived: asyncio.Queue[_Copy] = asyncio.Queue()
        self._done: deque[tuple[int, list[int], bool]] = deque()  # (safe when this entry is, delivery tags, nothing else is held before them)
        self._channel: Channel

    async def run(self, ready: int) -> bool:
        """Whether everything that was in the queue at the beginning was met. Raises ChannelClosed; GivenUp if the queue gives nothing."""
        upto = self._mark or self._replica.end
        self._channel = await self._connection.channel()
        await self._channel.qos(KEPT_MAX + WINDOW_MESSAGES)
        tag = await self._channel.consume(self._key[1], self._take)
        left = max(ready, await self._depth(1) + self._arrived.qsize(), 1)  # it may not have answered before, and some may be under way
        whole = True
        while left > 0:
            window = await self._window(left)
            if not window:
                break  # the rest has expired
            left -= sum(copy.sequence is None or copy.sequence <= upto for copy in window)
            await self._judge(window)
            if self.found and not self._mark:
                whole = False
                break
            if self._kept >= KEPT_MAX and left > 0:
                whole = False
                break
        await self._settle(0)
        if self._kept or not self._arrived.empty():  # it goes back in order
            await all_arrived(self._channel, self._key[1], self._arrived.qsize, lambda: False)
        while not self._arrived.empty():  # given back with what was kept
            self._arrived.get_nowait()
            self._kept += 1
        await give_back(self._connection, self._channel, tag, self._kept, self._key[1])
        return whole

    def _take(self, tag: int, redelivered: bool, _exchange: str, key: str, header: bytes, body: bytes) -> None:
        sequence, generation = self._replica.stamp_of(header) or (None, 0)
        self._arrived.put_nowait(_Copy(tag, redelivered, key, sequence, generation, deaths(header), header, body))

    async def _window(self, most: int) -> list[_Copy]:
        """What has come; empty if there is nothing more."""
        window: list[_Copy] = []
        silent_s = 0.0
        while not window:
            try:
                async with asyncio.timeout(QUIET_S):
                    window.append(await self._arrived.get())
            except TimeoutError:
                silent_s += QUIET_S
                if not await self._depth(1):
                    if self._arrived.empty():
                        return []
                elif silent_s >= STUCK_S:
                    raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' gives nothing to the sidecar", retriable=True) from None
        size = len(window[0].body)
        while not self._arrived.empty() and len(window) < min(WINDOW_MESSAGES, most) and size < BATCH_BYTES_MAX:
            window.append(self._arrived.get_nowait())
            size += len(window[-1].body)
        return window

    async def _judge(self, window: list[_Copy]) -> None:
        replica = self._replica
        done: list[int] = []
        last = kept = 0
        for copy in window:
            verdict = await self._verdict(copy)
            if verdict is not Verdict.ACK:
                self.found |= copy.sequence is not None and copy.sequence <= self._checkpoint
            before = copy.sequence is None or copy.sequence < self._mark
            if verdict is Verdict.GIVE and before and self._mark:
                last = self._move(copy)
            elif verdict is Verdict.REJECT and before and self._mark:
                self._channel.reject(copy.tag)
                continue
            elif verdict is not Verdict.ACK:
                kept += 1
                continue
            done.append(copy.tag)  # what a killed sidecar has published counts no more, and goes
        if last:
            replica.flush()
        self._done.append((last, done, not self._kept and len(done) == len(window)))
        self._kept += kept
        await self._settle(WINDOWS_UNDER_WAY)
        while replica.to_apply_bytes > TO_APPLY_BYTES_MAX:
            await asyncio.sleep(POLL_S)

    async def _verdict(self, copy: _Copy) -> Verdict:
        replica = self._replica
        for _ in range(2):
            verdict = Verdict.GIVE
            if copy.sequence is not None:
                verdict = replica.filter.verdict(self._key, copy.sequence, copy.generation, copy.deaths)
            if verdict is not Verdict.HOLD:
                return verdict
            await replica.wait_safe(replica.end)  # a refusal of another queue's copy, as it is
        raise GivenUp(f"an operation on entry {copy.sequence} is not safe, although nobody works on queue '{self._key[1]}'")

    def _move(self, copy: _Copy) -> int:
        """Returns the last entry of it."""
        if self._dies_by_key and (copy.key != self._key[1] or cut(copy.header, b"CC") != copy.header):
            raise GivenUp(
                f"queue '{self._key[1]}' in vhost '{self._key[0]}' dead-letters by routing key, which a moved message does not keep",
                todo="let it be emptied first, or give it x-dead-letter-routing-key",
            )
        self.moved += 1
        header = copy.header
        for key in NOT_MOVED:
            header = cut(header, key)
        sequence = self._replica.next_sequence
        self.published.add(sequence, sequence)
        if copy.sequence is None or self._replica.may_have_been_given(copy.sequence, copy.redelivered):
            self._replica.moved_again.add(sequence, sequence)
        return self._replica.move(self._key, (header, copy.body), copy.sequence, copy.deaths)

    async def _settle(self, most: int) -> None:
        """Acks what has been moved, until no more than so many windows wait for that."""
        while len(self._done) > most:
            last, tags, alone = self._done.popleft()
            await self._replica.wait_safe(last)
            await ack_all(self._channel, tags, alone=alone)
