"""Reads the facts of the own broker: over AMQP, and from its management API.

Rule: what is tried out is undone: a queue of its own that ends with its connection, a stream that is deleted, a message without a queue.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Connection
from broker_plugin.amqp.errors import AccessRefused, AuthenticationFailed, ChannelClosed, VhostNotFound
from broker_plugin.amqp.reply_codes import PRECONDITION_FAILED
from broker_plugin.apply.broker_rights import MissingRight, lack_vhost, try_rights
from broker_plugin.definitions.management import Management, ManagementUnavailable
from lrq_ha.errors import LrqError
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.sidecar.config import Config

from .facts import Broker, BrokerApi, Unread

TRIAL_TIMEOUT_S = 15.0
#: RabbitMQ 4 takes no larger message by default.
DEFAULT_BYTES_MAX = 16 << 20
STREAM_PREFIX = "lrq-doctor."
_QUEUE_COLUMNS = "name,vhost,type,durable,exclusive,auto_delete,arguments,policy,effective_policy_definition,segments"
_CONNECTION_COLUMNS = "user,name,client_properties,protocol"


async def read_broker(config: Config, vhosts: Sequence[str]) -> Broker | Unread:
    """The facts of the own broker. `vhosts`: those in which the sidecar needs all rights; without ROUTING_VHOST."""
    address = config.broker_address(ROUTING_VHOST)
    user = quote(address.user)
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            return await _try_out(address, vhosts, config.door.message_bytes_max)
    except TimeoutError:
        why = f"its broker has not done within {TRIAL_TIMEOUT_S:g} s what a sidecar needs: in an alarm it takes no publishes"
        return Unread(why, "rabbitmq-diagnostics check_alarms")
    except AuthenticationFailed as error:
        exists = f"rabbitmqctl -q list_users </dev/null | cut -f1 | grep -qx {user}"
        return Unread(
            f"{error.what}. The command asks for the password, which is that of broker.url",
            f"if {exists}; then rabbitmqctl change_password {user}; else rabbitmqctl add_user {user}; fi",
        )
    except LrqError as error:
        return Unread(str(error))


async def _try_out(address: Address, vhosts: Sequence[str], message_bytes_max: int) -> Broker:
    version, missing, stream, refused = "", dict[str, MissingRight | None](), None, 0
    try:
        first: Connection | None = await Connection.open(address)
    except VhostNotFound:  # the others are tried when it is there: RabbitMQ 4 denies all of them while it starts
        return Broker("", {ROUTING_VHOST: lack_vhost(ROUTING_VHOST, address.user)}, None)
    except AccessRefused:
        first = None
    for vhost in (ROUTING_VHOST, *vhosts):
        missing[vhost], connection = await try_rights(address, vhost, first)
        first = None
        if connection is None:
            continue
        try:
            version = str(connection.server_properties.get("version") or "")
            if vhost == ROUTING_VHOST:
                stream, refused = await _try_stream(connection), await _try_message(connection, message_bytes_max)
        finally:
            await connection.close()
    return Broker(version, missing, stream, refused)


async def _try_stream(connection: Connection) -> str:
    """Why the broker makes no stream; empty: it does."""
    name = f"{STREAM_PREFIX}{uuid.uuid4().hex[:12]}"
    try:
        channel = await connection.channel()
        await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream", "x-max-length-bytes": 1 << 20})
        await channel.queue_delete(name)
        await channel.close()
    except ChannelClosed as error:
        return error.text
    return ""


async def _try_message(connection: Connection, bytes_max: int) -> int:
    """The size of a message that the door takes and the broker does not; 0: none was found. It goes to no queue."""
    size = min(bytes_max, DEFAULT_BYTES_MAX)
    try:
        channel = await connection.channel()
        await channel.confirm_select()
        channel.publish("", f"{STREAM_PREFIX}nowhere", bytes(size), {}, persistent=False)
        await channel.confirmed()
        await channel.close()
    except ChannelClosed as error:
        if error.code == PRECONDITION_FAILED:
            return size
        raise
    return 0


async def read_api(config: Config) -> BrokerApi | Unread:
    """What the own broker's management API says."""
    address = config.broker_address(ROUTING_VHOST)
    management = Management(config.definitions.management, address.user, address.password)
    try:
        overview, nodes, queues, connections, policies, users, vhosts = await asyncio.gather(
            management.fetch("overview"),
            management.fetch("nodes"),
            management.fetch(f"queues?columns={_QUEUE_COLUMNS}"),
            management.fetch(f"connections?columns={_CONNECTION_COLUMNS}"),
            management.fetch("policies"),
            management.fetch("users"),
            management.fetch("vhosts"),
        )
    except ManagementUnavailable as error:
        return Unread(error.problem, error.command)
    finally:
        await management.close()
    node: dict[str, Any] = next((each for each in nodes if each["name"] == overview["node"]), {})
    names = [each["name"] for each in users], [each["name"] for each in vhosts]
    return BrokerApi(overview, node, queues, connections, policies, *names)


def needed_vhosts(api: BrokerApi | Unread, levels: Sequence[Mapping[str, str]] | Unread) -> list[str]:
    """The vhosts in which the sidecar needs all rights, without ROUTING_VHOST: those of the broker and of the log, else "/"."""
    here = set(api.vhosts) if isinstance(api, BrokerApi) else {"/"}
    logged = set() if isinstance(levels, Unread) else {row["vhost"] for row in levels}
    return sorted((here | logged) - {ROUTING_VHOST})
