"""Carries out the action that `declare_rules` chose for a declaration: pass on, answer, refuse, or bring into the log between two barriers.

Rules:
- A replicated declaration takes its place among the publishes of all connections. Before the broker is asked, all earlier publishes are in the
  queues; while it is asked, no frame is taken from any client; its entry follows. So a binding holds for identical publishes on every node.
- A purge is on record before it is answered, a deletion before the queue is declared again (`barrier`).
- The door also waits for the answer to a declaration of a node-local queue, or of one that the broker names: later frames may concern that queue, by
  its name or by none, and are not replicated then.
- A purge takes the messages in the queue, not those that clients hold: the log lists the held ones as of the moment when the broker had purged.
- A queue or exchange that was deleted around the door and is declared with other arguments, before the LengthReconciler has noticed, is deleted in
  the log first: the other nodes would refuse the declaration. An auto-delete exchange that has gone by itself and is declared again is also
  deleted first: the bindings to it have gone, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Level

from ..amqp import declarations, encode
from ..amqp.errors import ChannelClosed
from ..amqp.frames import EXCHANGE_DECLARE, EXCHANGE_DELETE, METHOD, QUEUE_DECLARE, QUEUE_DECLARE_OK, QUEUE_DELETE, Item, decode_method
from ..session.channel import ClientChannel, PendingDeclaration
from ..session.session import ClientSession
from . import closing, declare_rules, holds

log = logging.getLogger("lrq_ha.door")

BLOCKED_POLL_S = 0.05
_DELETES = {QUEUE_DECLARE: QUEUE_DELETE, EXCHANGE_DECLARE: EXCHANGE_DELETE}


def declare(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """A declaration, deletion, binding or purge of the client."""
    payload = declarations.as_named(kind, payload)
    method: Any = decode_method(payload)
    declarations.check_depth(getattr(method, "arguments", None), session.door.config.header_depth_max)
    action = declare_rules.classify(session, channel, kind, payload, method)
    if isinstance(action, declare_rules.Refuse):
        closing.refuse(session, channel, action.code, action.text, kind)
    elif isinstance(action, declare_rules.FindOut):
        session.from_client.stall()
        session.spawn(_find_out(session, channel, payload))
    elif isinstance(action, declare_rules.Answer):
        name = encode.short_string(action.queue)
        high, low = divmod(action.number, 1 << 32)
        counts = low.to_bytes(4, "big") + high.to_bytes(4, "big")
        session.to_client(encode.raw_method_frame(channel.number, QUEUE_DECLARE_OK, name, counts))
    elif isinstance(action, declare_rules.PassOn):
        session.ask(channel)
        if action.queue:
            channel.last_queue = action.queue
        passed = PendingDeclaration(action.queue, action.local, bool(getattr(method, "nowait", False)), action.known, asyncio.Event())
        needed = action.waited_for or action.known is not None
        if needed:  # a node-local queue is known once the broker has accepted it; the LengthReconciler also needs that moment
            payload = action.asked or declarations.answered(payload)
        if needed or not passed.silent:
            channel.passed.append(passed)
        session.outbox.put(encode.frame(METHOD, channel.number, payload))
        if action.waited_for:
            session.from_client.wait_for_answer(passed.over)
    else:
        session.from_client.stall()
        session.spawn(_replicate(session, channel, kind, payload, method, action))


async def _find_out(session: ClientSession, channel: ClientChannel, payload: bytes) -> None:
    await session.door.default_types.find_out(session.vhost)
    session.from_client.unstall(_again(session, channel, payload))


def _again(session: ClientSession, channel: ClientChannel, payload: bytes) -> Callable[[], None]:
    """Returns a function that handles a declaration again, from the beginning."""
    return lambda: session.from_client.take_again(encode.frame(METHOD, channel.number, payload))


async def _replicate(
    session: ClientSession, channel: ClientChannel, kind: int, payload: bytes, method: Any, action: declare_rules.Replicate
) -> None:
    number, replica = channel.number, session.replica
    again: Callable[[], None] | None = None
    try:
        async with _turn(session, kind, action.queue):
            if channel.closing:  # the broker has closed it meanwhile: no answer would come, and every client would wait
                return
            if (deletes := _DELETES.get(kind)) is not None:
                name = declarations.first_name(action.entry)
                if await _went(session, kind, name, action):
                    _log_deletion(session, deletes, name, action)
                    again = _again(session, channel, payload)
                    return
            if not await _ask(session, number, action.asked):
                return
            if action.purge:
                queue = (session.vhost, action.queue)  # deliveries on their way to clients count as purged a moment later
                sequence = replica.purge(queue, (delivery.sequence for delivery in session.door.held(queue)))
            else:
                sequence = replica.topology(session.vhost, action.entries, action.queue if kind == QUEUE_DECLARE else None)
            if kind == QUEUE_DECLARE:
                replica.declared.local_queues.discard((session.vhost, action.queue))
            if kind in (QUEUE_DECLARE, QUEUE_DELETE):
                session.door.forget_decisions()  # the level of the queue of this name may have changed
            elif kind in (EXCHANGE_DECLARE, EXCHANGE_DELETE):
                session.door.exchange_changed(session.vhost, method.exchange)
            if action.queue:
                channel.last_queue = action.queue
        await replica.progress.wait_safe(sequence)
        if action.purge:
            await replica.barrier.wait_settled(sequence)  # entries right before it that come from no client may not be applied yet
            await replica.barrier.write_record()
        if session.watch is not None:
            session.watch.declared(number, action.asked, True)
    finally:
        if not session.closed:
            session.from_broker.give_answer(number, silent=bool(getattr(method, "nowait", False)))
        session.from_client.unstall(again)


async def _went(session: ClientSession, kind: int, name: str, action: declare_rules.Replicate) -> bool:
    """Whether a declared queue or exchange is in the log with other arguments, or may go by itself, and has gone from the broker.

    False where the door cannot see it, or where it may be another node's.
    """
    definitions = session.replica.declared.definitions
    known = definitions.queue((session.vhost, name)) if kind == QUEUE_DECLARE else definitions.exchange(session.vhost, name)
    unchanged = known == action.entry and not action.may_have_gone
    if known is None or unchanged or (kind == QUEUE_DECLARE and declarations.level_of(known) is Level.NONE):
        return False
    try:
        channel = await (await session.door.vhosts.connection(session.vhost, anew=True)).channel()
        try:
            await (channel.queue_declare(name, passive=True) if kind == QUEUE_DECLARE else channel.exchange_declare(name, passive=True))
        finally:
            await channel.close()
    except ChannelClosed as error:
        return error.no_such_queue or error.no_such_exchange
    except LrqError as error:
        log.warning("whether '%s' in vhost '%s' is there, which is declared otherwise, cannot be seen: %s", name, session.vhost, error)
    return False


def _log_deletion(session: ClientSession, kind: int, name: str, action: declare_rules.Replicate) -> None:
    """Appends the deletion; to be called in a barrier. The next barrier has it on record."""
    if action.may_have_gone and session.replica.declared.definitions.exchange(session.vhost, name) == action.entry:
        what = "'%s' in vhost '%s' has gone, as it does with its last binding, and is declared again: on the backups, its bindings are deleted, too"
        log.info(what, name, session.vhost)
    else:
        what = "'%s' in vhost '%s' has gone, or was deleted at the broker, and is declared otherwise: it is deleted on the backups, too"
        log.warning(what, name, session.vhost)
    session.replica.append(pb.Run(topology=pb.Topology(vhost=session.vhost, method=declarations.deletion(kind, name))))
    if kind == QUEUE_DELETE:
        session.door.forget_decisions()
    else:
        session.door.exchange_changed(session.vhost, name)


@asynccontextmanager
async def _turn(session: ClientSession, kind: int, queue: str) -> AsyncIterator[None]:
    """A barrier in which the queue is not being moved (`holds`): a move may have begun while this waited. In an alarm this waits, alone."""
    while True:
        while session.door.alarmed():
            await asyncio.sleep(BLOCKED_POLL_S)
        moving = None
        async with session.replica.barrier.up(session.door.alarmed, (session.vhost, queue) if kind == QUEUE_DECLARE else None) as stands:
            if stands:
                moving = holds.queue_waits_for(session, kind, queue)
                if moving is None:
                    yield
                    return
        if moving is not None:
            await moving.over.wait()


async def _ask(session: ClientSession, number: int, payload: bytes) -> bool:
    """Whether the broker has accepted a declaration; its answer is withheld then (`BrokerReader.hold_answer`).

    Behind a publish of this connection, the broker does not read the question before an alarm is over.
    """
    reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    session.replies[number] = reply
    session.flow.asks(True)
    session.outbox.put(encode.frame(METHOD, number, payload))
    if session.alarm.reason:
        session.replica.barrier.ease()
    try:
        return await reply
    finally:
        del session.replies[number]
        session.flow.asks(False)


# ---- answers of the broker -------------------------------------------------------------------------------------------------


def declare_ok(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """queue.declare-ok, which names the queue. Skipped if the client named it: the client may have declared another one since, which is the last."""
    channel = session.channel(number)
    if channel.passed and not channel.passed[0].queue:
        start = item[2] + 4
        channel.last_queue = data[start + 1 : start + 1 + data[start]].decode("utf-8", "surrogateescape")
    return reply(session, number, data, item)


def reply(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """The answer to a declaration. The client gets a replicated one's answer later, and with it the frames behind it on the channel."""
    channel = session.channel(number)
    if channel.passed:
        passed = channel.passed.popleft()
        passed.over.set()
        if passed.local is not None:
            session.replica.declared.local_queues.add(passed.local)
            session.door.forget_decisions()
        return b"" if passed.silent else None
    future = session.replies.get(number)
    if future is None or future.done():
        return None
    future.set_result(True)
    session.from_broker.hold_answer(number, bytes(data[item[2] - 7 : item[3] + 1]))
    return b""
