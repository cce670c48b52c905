"""Counts for the operator the messages that a change of primary leaves behind or delivers again, and those that a reinitialised node loses.

Rules:
- The broker is asked for the lengths of queues that the log knows. A queue with the level `none` by its name is in no log, so it is not counted.
- At most ASKED_MAX queues are asked, and NAMED_MAX are named.
- A broker that does not answer does not delay a switchover, and a vhost that is gone does not hide the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from lrq_ha.errors import LrqError
from lrq_ha.replication.levels import Level
from lrq_ha.replication.queues import QueueKey
from lrq_ha.routing.names import ROUTING_VHOST

from ..amqp.address import Address
from ..amqp.connection import Connection
from ..amqp.errors import ChannelClosed
from ..log.replica import Replica

ASKED_MAX = 1_000
NAMED_MAX = 5
TIMEOUT_S = 5.0


async def left_behind(replica: Replica, broker: Address) -> str:
    """The queues with messages that stay on this node, and their counts; empty if there are none.

    Args:
        replica: Knows the queues and their levels.
        broker: The own broker; its vhost is replaced.
    """
    return await _tell(replica, broker, _not_replicated(replica))


async def in_no_export(replica: Replica, broker: Address) -> str:
    """The queues whose messages are in no log and are lost when a node is reinitialised, and their counts. Arguments as of `left_behind`."""
    return await _tell(replica, broker, [key for key in _not_replicated(replica) if replica.declared.level(key) is Level.CONFIGURATION])


async def _tell(replica: Replica, broker: Address, keys: list[QueueKey]) -> str:
    counts, unknown = await _count_all(broker, keys)
    found = [(key, count) for key, count in counts.items() if count]
    told = [f"{count} messages in '{key[1]}' ({replica.declared.level(key).value})" for key, count in found[:NAMED_MAX]]
    if len(found) > NAMED_MAX:
        told.append(f"{sum(count for _, count in found[NAMED_MAX:])} in {len(found) - NAMED_MAX} other queues that are not replicated")
    return ", ".join([*told, *unknown])


async def delivered_again(replica: Replica, broker: Address) -> str:
    """The number of messages that clients would get as redelivered if this node led after a loss: all live ones, as any may have been delivered."""
    declared = replica.declared
    keys = sorted(key for key in declared.existing() if declared.replicates(key) and not declared.is_stream(key) and key[0] != ROUTING_VHOST)
    counts, unknown = await _count_all(broker, keys)
    waiting = sum(entry.count for entry in replica.to_apply)
    return ", ".join([f"about {sum(counts.values()) + waiting} messages", *unknown])


def may_be_left_behind(replica: Replica) -> str:
    """The queues whose messages exist only on the node that they were published to; empty if there are none."""
    keys = _not_replicated(replica)
    more = [f"{len(keys) - NAMED_MAX} more"] if len(keys) > NAMED_MAX else []
    return ", ".join([*(f"'{key[1]}' ({replica.declared.level(key).value})" for key in keys[:NAMED_MAX]), *more])


def _not_replicated(replica: Replica) -> list[QueueKey]:
    declared = replica.declared
    return sorted(key for key in declared.partial if declared.definitions.queue(key) is not None and not declared.replicates(key))


async def _count_all(broker: Address, keys: list[QueueKey]) -> tuple[dict[QueueKey, int], list[str]]:
    """Lengths of queues, sorted by vhost, and texts for the queues with unknown lengths."""
    counts: dict[QueueKey, int] = {}
    unknown: list[str] = []
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    for vhost, queues in groupby(keys[:ASKED_MAX], itemgetter(0)):
        asked = list(queues)
        try:
            async with asyncio.timeout_at(deadline):
                await _count(replace(broker, vhost=vhost), asked, counts)
        except (TimeoutError, LrqError) as error:
            count = sum(key not in counts for key in asked)
            unknown.append(f"what is in {count} queues of vhost '{vhost}', of which the broker told nothing ({str(error) or 'no answer'})")
    if len(unknown) > NAMED_MAX:
        unknown[NAMED_MAX:] = [f"what is in {len(unknown) - NAMED_MAX} other vhosts, of which it told nothing either"]
    if len(keys) > ASKED_MAX:
        unknown.append(f"what is in {len(keys) - ASKED_MAX} queues that were not asked")
    return counts, unknown


async def _count(broker: Address, keys: list[QueueKey], counts: dict[QueueKey, int]) -> None:
    """Sets the ready messages of each queue of a vhost; queues that this broker does not have are left out."""
    connection = await Connection.open(broker)
    try:
        for key in keys:
            channel = await connection.channel()
            try:
                counts[key] = (await channel.queue_declare(key[1], passive=True))[1]
                await channel.close()
            except ChannelClosed:
                continue
    finally:
        await connection.close()
