"""Reads the facts of a group: the sidecars' HTTP, their doors, and etcd. It reads all facts of a node, too (`read_facts`)."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker_plugin.amqp.connection import Connection
from broker_plugin.amqp.errors import AmqpError, AuthenticationFailed
from lrq_ha.coordination.etcd import Etcd
from lrq_ha.coordination.register import Register
from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, Target, ask
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.sidecar.config import Config

from ..list_nodes import fetch
from .broker import needed_vhosts, read_api, read_broker
from .facts import EtcdMember, Facts, Node, Unread
from .host import read_host

DOOR_TIMEOUT_S = 5.0
ETCD_TIMEOUT_S = 3.0


async def read_facts(path: Path, config: Config, targets: Sequence[Target]) -> Facts:
    """All facts of a node. `targets`: its own sidecar, then the others' of its group."""
    doors = {peer.name: peer.door for peer in config.peers}
    (host, api, levels, etcd), (own, *others) = await asyncio.gather(
        asyncio.gather(
            asyncio.to_thread(read_host, path, config),
            read_api(config),
            asyncio.to_thread(_read_levels, targets[0]),
            read_etcd(config, targets[0]),
        ),
        asyncio.gather(*(_read_node(config, target, doors.get(target.name, "")) for target in targets)),
    )
    broker = await read_broker(config, needed_vhosts(api, levels))
    return Facts(path, config, host, own, others, levels, broker, api, etcd)


async def _read_node(config: Config, target: Target, door: str) -> Node:
    report, ahead_s, uncertain_s = await asyncio.to_thread(_ask_with_clock, target)
    logins: Mapping[str, Any] | Unread = Unread(f"the sidecar of {target.name} does not answer")
    if report.status:
        logins = await asyncio.to_thread(_read_logins, target)
    node = Node(target.name, target.http, report.status, report.failure, ahead_s, uncertain_s, logins=logins)
    return replace(node, door=await _try_door(config, door)) if door else node


def _ask_with_clock(target: Target) -> tuple[Report, float | None, float]:
    """A node's status, how far its clock is ahead of this one's, and how wrong that may be."""
    began = time.time()
    report = ask(target)
    took_s = time.time() - began
    said = report.status.get("time")
    return report, said - (began + took_s / 2) if isinstance(said, float) else None, took_s / 2


def _read_logins(target: Target) -> Mapping[str, Any] | Unread:
    try:
        found = fetch(target, "definitions")
    except LrqError as error:
        return Unread(f"{target.name} tells no users and plugins: {error}")
    return found if isinstance(found, dict) else Unread(f"{target.name} tells no users and plugins")


def _read_levels(target: Target) -> Sequence[Mapping[str, str]] | Unread:
    try:
        found = fetch(target, "levels")
    except LrqError as error:
        return Unread(f"the log's queues are not known: {error}")
    return found if isinstance(found, list) else Unread("the log's queues are not known")


async def _try_door(config: Config, door: str) -> str:
    """Why another node's door is not reached from here; empty: it is. A backup's door answers, and refuses clients."""
    try:
        connection = await Connection.open(config.door_address(door, ROUTING_VHOST), connect_timeout_s=DOOR_TIMEOUT_S)
        await connection.close()
    except AuthenticationFailed as error:
        return str(error)
    except AmqpError:
        return ""
    except LrqError as error:
        return error.what
    return ""


# ---- etcd ------------------------------------------------------------------------------------------------------------


async def read_etcd(config: Config, own: Target) -> Sequence[EtcdMember] | Unread:
    """The members of etcd, each asked by itself."""
    table = config.coordination
    if table is None:
        return Unread('replication.coordination is "static": an operator promotes')
    return await asyncio.gather(*(_read_member(config, own, endpoint) for endpoint in table.endpoints))


async def _read_member(config: Config, own: Target, endpoint: str) -> EtcdMember:
    table, files = config.coordination, config.client_tls
    assert table is not None
    etcd = Etcd([endpoint], ETCD_TIMEOUT_S, table.user, config.etcd_password(), lambda: files.context if files else None)
    try:
        version = await asyncio.to_thread(_read_version, own, endpoint)
        found = await Register(etcd, table.namespace, config.node.group, config.names).read()
    except (LrqError, OSError, ValueError, http.client.HTTPException) as error:
        return EtcdMember(endpoint, failure=str(error))
    finally:
        await etcd.close()
    return EtcdMember(endpoint, version, log=found.log_id)


def _read_version(own: Target, endpoint: str) -> str:
    with own.access.open(f"{endpoint.rstrip('/')}/version", timeout=ETCD_TIMEOUT_S) as answer:
        return str(json.load(answer).get("etcdserver", ""))
