"""Renews a group's log: publishes all live messages again behind a CHECKPOINT, so that a node with an empty log can begin there (R17).

Rules:
- The door stays open. One queue at a time is paused (`queue_pause`): no client holds a delivery of it, no message is published to it, and all of its
  messages are in it. They are moved from the front of the queue to its end, also those behind the CHECKPOINT: so the queue's order is kept.
- An entry MOVING marks where that begins, and another where it ends. A node that continues in the middle continues with that queue before any
  client may use it.
- The renewal ends when no old message can be left (`renewal_progress`): dead letters may be on their way from a queue that is looked at later to
  one that was looked at before. So queues are looked into again, those that dead-letter to others first. A queue that is too long to be looked
  through, and whose length does not show that no message came, is moved again. After ROUNDS_MAX rounds that found an old message it is given up.
- RabbitMQ's report on a queue is believed while it counts the pass's own consumer: it also reports a quorum queue that does not answer as empty.
- The renewal is given up if a message cannot be moved unchanged: its dead letter would take another routing key, or its deliveries would count
  (RabbitMQ 3.x). It is also given up if a vhost cannot be entered, if consumers do not finish their deliveries, and if a queue may hold hidden
  messages (`declarations`). Until hidden messages have come to light the queue is not used, if there is time. The operator asserts that no
  dead letters wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from lrq_ha.replication.levels import Level
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.renewal_progress import Rounds
from lrq_ha.routing.names import ROUTING_VHOST

from ..amqp import declarations
from ..amqp.address import Address
from ..amqp.connection import Connection
from ..amqp.errors import AccessRefused, ChannelClosed, ConnectionClosed, VhostNotFound
from ..amqp.reply_codes import INTERNAL_ERROR
from ..amqp.requeue import requeue_is_free
from ..amqp.vhosts import VhostConnections
from ..log.bindings import downstream_last
from ..log.replica import Replica
from ..log.streams import LARGER_LOG
from ..session.door_state import DoorState
from ..session.session import ClientSession
from .queue_move import KEPT_MAX, QUIET_S, STUCK_S, GivenUp, QueueMove
from .queue_pause import Busy, QueuePause, unused_at_most_s

log = logging.getLogger("lrq_ha.renewing")

ROUNDS_MAX = 10
UNFINISHED_S = 86_400.0  # clients may not use a half-moved queue
_GOES_BY_ITSELF = ("x-message-ttl", "x-max-length", "x-max-length-bytes")


def delivery_limit(key: QueueKey) -> GivenUp:
    what = "has a delivery limit, and this RabbitMQ counts what the sidecar gives back"
    return GivenUp(f"queue '{key[1]}' in vhost '{key[0]}' {what}", todo="let it be emptied first, or use RabbitMQ 4", retriable=True)


class Renewal:
    """Moves the live messages of a group.

    Args:
        replica, door: Those of this node, which is primary.
        broker: The own broker; its vhost is replaced.
        checkpoint: Sequence of the CHECKPOINT.
        timeout_s: Seconds in which the consumers of a queue have to finish their deliveries.
        force: Whether their channels are closed after that time.
        dead_letters_arrived: The operator asserts that no dead letters wait in queues that keep them until they arrive.

    Attributes:
        moved: Messages that were published again.
        longest_s, longest: The longest time for which a queue was paused, and its name.
    """

    def __init__(
        self,
        replica: Replica,
        door: DoorState[ClientSession],
        broker: Address,
        checkpoint: int,
        *,
        timeout_s: float,
        force: bool,
        dead_letters_arrived: bool,
    ) -> None:
        self.moved = 0
        self.longest_s, self.longest = 0.0, ""
        self._replica = replica
        self._door = door
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        self._force = force
        self._dead_letters_arrived = dead_letters_arrived
        self._pausing: QueueKey | None = None
        self._vhosts = VhostConnections(broker)
        self._visit: _Visit | None = None

    @property
    def doing(self) -> str:
        """The current step, for the operator; empty between two queues."""
        visit = self._visit
        if visit is None and self._pausing is not None:
            return f"queue '{self._pausing[1]}' in vhost '{self._pausing[0]}' gives nothing out until what it holds back unseen has come to light"
        return "" if visit is None else f"queue '{visit.key[1]}' in vhost '{visit.key[0]}' stands still, {visit.moved} messages of it have been moved"

    async def refusals(self) -> list[str]:
        """The reasons to give up, as far as they are known before: a dry run. Raises LrqError as `run`."""
        found: dict[str, None] = {}  # the reason of a vhost is given once
        try:
            for key, method in self._queues().items():
                try:
                    self._check(key, declarations.queue_arguments(method), self._timeout_s)
                    connection = await self._enter(key[0])
                    if connection is not None and "x-delivery-limit" in declarations.queue_arguments(method):
                        await self._check_limit(connection, key)
                except GivenUp as error:
                    found[str(error)] = None
        except GivenUp as error:
            found[str(error)] = None
        finally:
            await self._vhosts.close()
        return list(found)

    async def _enter(self, vhost: str) -> Connection | None:
        """The connection to a vhost; None: it was deleted, with its queues. Raises GivenUp if the sidecar has no rights there, or it is down."""
        try:
            return await self._vhosts.connection(vhost)
        except VhostNotFound:
            return None
        except (AccessRefused, ConnectionClosed) as error:
            if isinstance(error, ConnectionClosed) and error.code != INTERNAL_ERROR:
                raise
            raise GivenUp(f"vhost '{vhost}' cannot be entered: {error.text}", todo=error.todo, retriable=True) from error

    async def _check_limit(self, connection: Connection, key: QueueKey) -> None:
        """Raises GivenUp if a queue with a delivery limit has messages, and looking at them would count as deliveries."""
        if requeue_is_free(connection):
            return
        channel = await connection.channel()
        try:
            if (await channel.queue_declare(key[1], passive=True))[1]:
                raise delivery_limit(key)
        except ChannelClosed as error:
            if not error.no_such_queue:
                raise
        finally:
            await channel.close()

    async def run(self) -> None:
        """Runs until no live message is left before the CHECKPOINT and every moved one is in its queue.

        Raises:
            GivenUp: A live message may be left; the text names the queue.
            LrqError: The connection to the broker is lost, or this node is not primary any more.
        """
        passes = self._replica.index.passes
        rounds = Rounds(passes, ROUNDS_MAX)
        try:
            for key, method in self._queues().items():
                if passes.is_unfinished(key):
                    self._check(key, declarations.queue_arguments(method), UNFINISHED_S, half_done=True)
                    await self._renew(key, declarations.queue_arguments(method), UNFINISHED_S)
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
        """One round over all queues. Returns whether an old message was found."""
        queues, found = self._queues(), False
        for key, method in queues.items():
            self._check(key, declarations.queue_arguments(method), self._timeout_s)
        busy = []
        for key in downstream_last(self._replica.declared.definitions, list(queues)):
            try:
                found |= await self._renew(key, declarations.queue_arguments(queues[key]), self._timeout_s)
            except Busy:
                busy.append(key)
        for key in busy:
            found |= await self._renew(key, declarations.queue_arguments(queues[key]), self._timeout_s, force=self._force)
        return found

    def _check(self, key: QueueKey, arguments: Mapping[str, Any], timeout_s: float, *, half_done: bool = False) -> None:
        """Raises GivenUp if a queue may hold hidden messages, and there is no time to wait. `half_done`: dead letters are checked later."""
        queue = f"queue '{key[1]}' in vhost '{key[0]}'"
        held_back_s = declarations.held_back_s(arguments)
        if math.isinf(held_back_s):
            what = "may hold back unseen what consumers have given back (x-delayed-retry-type), for an unknown time"
            raise GivenUp(f"{queue} {what}", todo="let it be emptied first, and declare it again with x-delayed-retry-max")
        if held_back_s > unused_at_most_s(arguments, timeout_s):
            if held_back_s > unused_at_most_s(arguments, math.inf):
                todo = "it would expire if it was not used for so long: let it be emptied first, and delete it"
            else:
                todo = f"repeat with --timeout {math.ceil(held_back_s)}: no client can consume from it for so long, three times or more"
            raise GivenUp(f"{queue} holds back unseen what consumers have given back (x-delayed-retry-type), for up to {held_back_s:g} s", todo=todo)
        if declarations.keeps_dead_letters(arguments) and not self._dead_letters_arrived and not half_done:
            what = "has x-dead-letter-strategy at-least-once: dead letters wait in it unseen until their target takes them"
            todo = (
                "make sure that they have one that does, and that rabbitmqctl list_queues name messages messages_ready says one number twice "
                "while no client consumes; then repeat with --dead-letters-arrived"
            )
            raise GivenUp(f"{queue} {what}", todo=todo)

    def _queues(self) -> dict[QueueKey, bytes]:
        known = self._replica.declared.definitions.queues()
        unknown = [key for key in self._replica.declared.existing() if key not in known and key[0] != ROUTING_VHOST]
        if unknown:
            raise GivenUp(f"how queue '{unknown[0][1]}' in vhost '{unknown[0][0]}' was declared is not known", todo="declare it again, as it is")
        return {
            key: method
            for key, method in known.items()
            if declarations.level_of(method) is Level.ALL and not declarations.is_stream(method)
        }

    async def _all_applied(self) -> None:
        try:
            async with asyncio.timeout(STUCK_S):
                await self._replica.progress.wait_applied(self._checkpoint)
        except TimeoutError:
            raise GivenUp("what was published before is not in its queues (is one full?)", todo="make room in it", retriable=True) from None

    async def _renew(self, key: QueueKey, arguments: Mapping[str, Any], timeout_s: float, *, force: bool = False) -> bool:
        """Visits a queue. Returns whether an old message was in it. Raises Busy."""
        if self._replica.node.head > self._checkpoint:
            raise GivenUp("what is live, with what is published meanwhile, takes more than the log holds", todo=LARGER_LOG)
        connection = await self._enter(key[0])
        if connection is None:
            return False
        pause = QueuePause(self._door, self._replica, key, arguments)
        self._pausing = key if declarations.held_back_s(arguments) else None
        try:
            await pause.begin(timeout_s, force=force)
        finally:
            self._pausing = None
        self._visit = visit = _Visit(self._replica, connection, key, arguments, self._checkpoint)
        given_up: GivenUp | None = None
        found = False
        try:
            found = await visit.run()
        except ChannelClosed as error:
            if not error.no_such_queue:  # else the queue has gone by itself
                given_up = GivenUp(f"queue '{key[1]}' in vhost '{key[0]}' cannot be read: {error.text}")
        except GivenUp as error:
            given_up = error
        # Not after any other error, which ends this incarnation: the node that continues with a half-moved queue must be the first to use it.
        await pause.end()
        self._visit = None
        self.moved += visit.moved
        if pause.seconds > self.longest_s:
            self.longest_s, self.longest = pause.seconds, key[1]
        if given_up is not None:
            raise given_up
        return found


class _Visit:
    """The work on one queue, `key`, while it is paused."""

    def __init__(self, replica: Replica, connection: Connection, key: QueueKey, arguments: Mapping[str, Any], checkpoint: int) -> None:
        self.key = key
        self._replica = replica
        self._connection = connection
        self._arguments = arguments
        self._quorum = arguments.get("x-queue-type") == "quorum"
        self._holds_back = declarations.held_back_s(arguments) > 0
        self._limited = "x-delivery-limit" in arguments and not requeue_is_free(connection)
        self._checkpoint = checkpoint
        self._moved = 0  # in finished passes
        self._under_way: QueueMove | None = None

    @property
    def moved(self) -> int:
        """Messages that were published again."""
        return self._moved + (self._under_way.moved if self._under_way is not None else 0)

    async def run(self) -> bool:
        """Whether an old message was in the queue. Raises ChannelClosed, GivenUp."""
        passes = self._replica.index.passes
        mark = passes.is_unfinished(self.key)
        found = False
        if not mark:
            ready = await self._depth(0)
            if not ready and not self._quorum:
                return False
            if ready and self._limited:
                raise delivery_limit(self.key)
            if passes.begun(self.key) or not ready:
                if ready and (ready > KEPT_MAX or self._holds_back):  # a message that is looked at and given back could be held back for that
                    if ready == passes.holds(self.key) and not any(name in self._arguments for name in _GOES_BY_ITSELF):
                        return False
                else:
                    look = self._pass(0)
                    if await look.run(ready) and not look.found:
                        return False
                    found = look.found
            mark = await self._begin()
        return await self._move(mark) or found

    async def _begin(self) -> int:
        """Marks the beginning: all messages in the queue now are to be moved."""
        mark = self._replica.note_moving(self.key, done=False)
        self._replica.flush()
        await self._replica.progress.wait_safe(mark)
        return mark

    async def _move(self, mark: int) -> bool:
        found = once_more = False
        while True:
            self._under_way = one = self._pass(mark)
            whole = await one.run(await self._depth(0))
            self._moved, self._under_way = self.moved, None
            found |= one.found
            await one.applied()
            if whole:
                break
            if one.moved:
                continue
            holds = self._replica.index.passes.holds(self.key)
            if await self._depth(0) == holds:
                break
            if holds >= 0 or once_more:
                why = "holds too many messages to look behind them (priorities, or some have expired)"
                raise GivenUp(f"queue '{self.key[1]}' in vhost '{self.key[0]}' {why}", retriable=True)
            # The queue's length was counted by another primary, and is not known any more: messages which that primary had moved are moved again.
            once_more, mark = True, await self._begin()
        self._replica.note_moving(self.key, done=True)
        return found

    def _pass(self, mark: int) -> QueueMove:
        return QueueMove(self._replica, self._connection, self.key, self._arguments, self._checkpoint, mark, self._depth)

    async def _depth(self, consumers: int) -> int:
        """Messages that are ready in the queue when it has `consumers` consumers. Raises GivenUp if it does not have them after a while."""
        channel = await self._connection.channel()
        found = -1
        try:
            async with asyncio.timeout(STUCK_S):
                while True:
                    _, ready, found = await channel.queue_declare(self.key[1], passive=True)
                    if found == consumers:
                        return ready
                    await asyncio.sleep(QUIET_S)
        except TimeoutError:
            what = "does not answer" if found < consumers else "is consumed from by somebody who does not use the door"
            raise GivenUp(f"queue '{self.key[1]}' in vhost '{self.key[0]}' {what}", retriable=True) from None
        finally:
            await channel.close()
