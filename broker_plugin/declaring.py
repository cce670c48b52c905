"""Carrying out what `topology` says of a declaration: passed on, answered, refused, or brought into the log between two barriers.

Rule: a declaration that is replicated takes its place among the publishes of all connections. Before the broker is asked, everything that was
published is in the queues; while it is asked, nothing is taken from any client; its entry follows. So bindings hold for the same publishes on
every node. A purge is on record before it is answered, a deletion before the queue is declared again (`barrier`). The answer to a declaration of a
queue of this node's own, or of one that the broker names, is waited for, too: what follows may concern that queue, by its name or by none, and is not
replicated then. Of an auto-delete exchange that is declared again the broker is asked whether it is still there: if it has gone, so have the bindings
to it, and the log hears of that first. A purge takes what is in the queue, not what clients hold: the log says what they held when the broker had
done it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pamqp import commands

from lrq_ha.replication.errors import LrqError

from . import building, closing, topology, waiting
from .channels import Channel, Passed
from .client_errors import ChannelClosed
from .frames import CHANNEL_CLOSE, EXCHANGE_DECLARE, EXCHANGE_DELETE, METHOD, QUEUE_DECLARE, QUEUE_DECLARE_OK, QUEUE_DELETE, Item, decode_method
from .vhosts import open_vhost

if TYPE_CHECKING:
    from .relay import Relay

log = logging.getLogger("lrq_ha.door")

NOT_FOUND = 404
BLOCKED_POLL_S = 0.05


def declare(relay: Relay, channel: Channel, kind: int, payload: bytes) -> None:
    """A declaration, deletion, binding or purge of the client."""
    method: Any = decode_method(payload)
    action = topology.classify(relay, channel, kind, payload, method)
    if isinstance(action, topology.Refuse):
        closing.refuse(relay, channel, action.code, action.text, kind)
    elif isinstance(action, topology.FindOut):
        relay.from_client.stall()
        relay.spawn(_find_out(relay, channel, payload))
    elif isinstance(action, topology.Answer):
        name = building.short_string(action.queue)
        high, low = divmod(action.number, 1 << 32)
        counts = low.to_bytes(4, "big") + high.to_bytes(4, "big")
        relay.to_client(building.raw_method_frame(channel.number, QUEUE_DECLARE_OK, name, counts))
    elif isinstance(action, topology.PassOn):
        relay.ask(channel)
        if action.queue:
            channel.last_queue = action.queue
        passed = Passed(action.queue, action.local, bool(getattr(method, "nowait", False)), action.known, asyncio.Event())
        needed = action.waited_for or action.known is not None
        if needed:  # whether the queue is this node's own is known when the broker has accepted it; and the census must know when it has
            payload = action.asked or topology.answered(payload)
        if needed or not passed.silent:
            channel.passed.append(passed)
        relay.outbox.put(building.frame(METHOD, channel.number, payload))
        if action.waited_for:
            relay.from_client.wait_for_answer(passed.over)
    else:
        relay.from_client.stall()
        relay.spawn(_replicate(relay, channel, kind, method, action))


async def _find_out(relay: Relay, channel: Channel, payload: bytes) -> None:
    await relay.door.default_types.find_out(relay.vhost)
    relay.from_client.unstall(lambda: relay.from_client.take_again(building.frame(METHOD, channel.number, payload)))


async def _replicate(relay: Relay, channel: Channel, kind: int, method: Any, action: topology.Replicate) -> None:
    number, replica = channel.number, relay.replica
    try:
        while relay.door.log_blocked:  # nothing gets safe now: a barrier would stop the consumers of all clients
            await asyncio.sleep(BLOCKED_POLL_S)
        async with _turn(relay, kind, action.queue):
            if channel.closing:  # by the broker, meanwhile: it would not answer, and nobody else could go on
                return
            if kind == QUEUE_DECLARE:
                await replica.barrier.settle_deletion((relay.vhost, action.queue))
            if action.may_have_gone and await _has_gone(relay, action.may_have_gone):
                deletes = building.encode_method(commands.Exchange.Delete(exchange=action.may_have_gone))
                action = replace(action, before=(deletes,))
            reply: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
            relay.replies[number] = reply
            relay.outbox.put(building.frame(METHOD, number, action.asked))
            answer, payload = await reply
            if answer == CHANNEL_CLOSE:
                return
            if action.purge:
                queue = (relay.vhost, action.queue)  # what is on its way to clients counts as purged a moment later
                sequence = replica.purge(queue, (delivery.sequence for delivery in relay.door.held(queue)))
            else:
                sequence = replica.topology(relay.vhost, action)
            if kind == QUEUE_DECLARE:
                replica.declared.local_queues.discard((relay.vhost, action.queue))
            if kind in (QUEUE_DECLARE, QUEUE_DELETE):
                relay.door.forget_decisions()  # of what level a queue of this name is may have changed
            elif kind in (EXCHANGE_DECLARE, EXCHANGE_DELETE):
                relay.door.exchange_changed(relay.vhost, method.exchange)
            if action.queue:
                channel.last_queue = action.queue
        await replica.progress.wait_safe(sequence)
        if action.purge:
            await replica.barrier.write_record()
        if relay.watch is not None:
            relay.watch.declared(number, action.asked, True)
        if not getattr(method, "nowait", False) and channel.speaks:  # the broker may have closed it meanwhile, and the client knows
            relay.to_client(building.frame(METHOD, number, payload))
    finally:
        relay.replies.pop(number, None)
        relay.from_client.unstall()


async def _has_gone(relay: Relay, exchange: str) -> bool:
    try:
        connection = await open_vhost(relay.door.broker, relay.vhost)
        try:
            await (await connection.channel()).exchange_declare(exchange, passive=True)
        finally:
            await connection.close()
    except LrqError as error:
        if isinstance(error, ChannelClosed) and error.code == NOT_FOUND:
            return True
        log.warning("it cannot be found out whether exchange '%s' in vhost '%s' has gone by itself: %s", exchange, relay.vhost, error)
    return False


@asynccontextmanager
async def _turn(relay: Relay, kind: int, queue: str) -> AsyncIterator[None]:
    """A barrier in which the queue is not being moved (`waiting`): that may have begun while this waited for it."""
    while True:
        async with relay.replica.barrier.up():
            moving = waiting.queue_waits_for(relay, kind, queue)
            if moving is None:
                yield
                return
        await moving.over.wait()


# ---- what the broker answers -----------------------------------------------------------------------------------------------


def declare_ok(relay: Relay, number: int, data: bytes, item: Item) -> bytes | None:
    """queue.declare-ok, which names the queue. Where the client did, it may have declared another one since, which is the last one then."""
    channel = relay.channel(number)
    if channel.passed and not channel.passed[0].queue:
        start = item[2] + 4
        channel.last_queue = data[start + 1 : start + 1 + data[start]].decode("utf-8", "surrogateescape")
    return reply(relay, number, data, item)


def reply(relay: Relay, number: int, data: bytes, item: Item) -> bytes | None:
    """The answer to a declaration; the client gets that of a replicated one later."""
    channel = relay.channel(number)
    if channel.passed:
        passed = channel.passed.popleft()
        passed.over.set()
        if passed.local is not None:
            relay.replica.declared.local_queues.add(passed.local)
            relay.door.forget_decisions()
        return b"" if passed.silent else None
    future = relay.replies.get(number)
    if future is None or future.done():
        return None
    future.set_result((item[0], bytes(data[item[2] : item[3]])))
    return b""
