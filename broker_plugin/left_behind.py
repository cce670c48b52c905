"""What a planned change of primary leaves behind: the messages in queues that are not replicated, for the operator to know before.

Rules: the broker is asked for the lengths of those queues that the log knows with another level than `all`; what has the level `none` by its name
is in no log, so nobody can tell. At most ASKED_MAX are asked, NAMED_MAX are named. A broker that does not answer holds up no switchover.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from lrq_ha.replication.errors import LrqError

from .channels import QueueKey
from .client import Connection
from .client_errors import Address, ChannelClosed
from .replica import Replica

ASKED_MAX = 1_000
NAMED_MAX = 5
TIMEOUT_S = 5.0


async def left_behind(replica: Replica, broker: Address) -> str:
    """The queues with messages that stay on this node, and how many; empty if there are none.

    Args:
        replica: Knows the queues and their levels.
        broker: The own broker; the vhost in it is replaced.
    """
    keys = _not_replicated(replica)
    counts: dict[QueueKey, int] = {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _count(broker, keys[:ASKED_MAX], counts)
    except (TimeoutError, LrqError) as error:
        return f"what is in {len(keys)} queues that are not replicated, of which the broker told nothing ({str(error) or 'no answer'})"
    found = [(key, count) for key, count in counts.items() if count]
    told = [f"{count} messages in '{key[1]}' ({replica.declared.level(key).value})" for key, count in found[:NAMED_MAX]]
    if len(found) > NAMED_MAX:
        told.append(f"{sum(count for _, count in found[NAMED_MAX:])} in {len(found) - NAMED_MAX} other queues that are not replicated")
    if len(keys) > ASKED_MAX:
        told.append(f"what is in {len(keys) - ASKED_MAX} queues that were not asked")
    return ", ".join(told)


def may_be_left_behind(replica: Replica) -> str:
    """The queues whose messages are on the node where they were published only; empty if there are none."""
    keys = _not_replicated(replica)
    more = [f"{len(keys) - NAMED_MAX} more"] if len(keys) > NAMED_MAX else []
    return ", ".join([*(f"'{key[1]}' ({replica.declared.level(key).value})" for key in keys[:NAMED_MAX]), *more])


def _not_replicated(replica: Replica) -> list[QueueKey]:
    declared = replica.declared
    return sorted(key for key in declared.partial if declared.definitions.queue(key) is not None and not declared.replicates(key))


async def _count(broker: Address, keys: list[QueueKey], counts: dict[QueueKey, int]) -> None:
    """Messages that are ready in each queue; those that this broker does not have are left out."""
    connection: Connection | None = None
    vhost = ""
    try:
        for key in keys:  # sorted by vhost
            if connection is None or key[0] != vhost:
                if connection is not None:
                    await connection.close()
                connection, vhost = await Connection.open(replace(broker, vhost=key[0])), key[0]
            channel = await connection.channel()
            try:
                counts[key] = (await channel.queue_declare(key[1], passive=True))[1]
                await channel.close()
            except ChannelClosed:
                continue
    finally:
        if connection is not None:
            await connection.close()
