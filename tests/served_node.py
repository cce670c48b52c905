"""A node's HTTP server over a source of answers that a test sets, in an event loop of its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from lrq_ha.lab.ports import free_ports
from lrq_ha.overview.asking import Report, Target
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.http.group_watch import GroupWatch
from lrq_ha.sidecar.http.server import HttpServer

TIMEOUT_S = 60.0


class Node:
    """A source of answers that remembers what it was told."""

    def __init__(self, name: str, role: Role = Role.READY) -> None:
        self.port = next(free_ports())
        self.url = f"http://127.0.0.1:{self.port}"
        self.name, self.role = name, role
        self.told: list[tuple[object, ...]] = []
        self.answer: tuple[bool, str] = (True, "done")
        self.error: Exception | None = None
        self.epoch = 0x301
        self.peers: dict[str, Any] = {}
        self.opened = self.paused = False
        self.reason, self.end, self.since = "started", 120, "12:00:00"
        self.primary: str | None = "e1"
        self.closed_because = self.blocked = ""
        self.lag: dict[str, float] | None = None
        self.coordination: dict[str, Any] | None = None
        self.vhosts, self.users = ["/"], {"app": ["management"]}
        self.differences: list[dict[str, str]] = []
        self.others: list[Target] = []
        self.watch = GroupWatch(lambda: Report(Target(self.name, "east", self.url), self.status()), lambda: self.others)
        self.leaders: list[dict[str, Any]] = []

    def status(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return {
            "node": self.name, "group": "east", "role": self.role.value, "epoch": self.epoch, "end": self.end, "safe": 119,
            "applied": 100, "in_set": True,
            "members": ["e1"], "primary": self.primary, "peers": self.peers, "sessions": {}, "since": self.since, "rss_bytes": 1,
            "reason": self.reason, "paused": self.paused, "software": "0.1", "follower_lag": self.lag, "broker": {"blocked": self.blocked},
            "serving": self.opened or self.role is Role.ACTIVE,
            **({"coordination": self.coordination} if self.coordination else {}),
        }  # fmt: skip

    def refusal(self) -> str:
        return self.closed_because if self.status()["serving"] else "it is no primary"

    async def look_at_group(self) -> list[Report]:
        return await self.watch.look()

    async def history(self) -> list[dict[str, Any]]:
        if self.error:
            raise self.error
        return self.leaders

    def queues(self) -> list[str]:
        return ["LRQ_Recv_orders_west"]

    def levels(self) -> list[dict[str, str]]:
        return [{"vhost": "/", "queue": "orders", "level": "all"}]

    async def definitions(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return {"node": self.name, "vhosts": self.vhosts, "users": self.users}

    async def compare_definitions(self) -> list[dict[str, str]]:
        return self.differences

    async def take_definitions(self, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("take", dry_run))
        return self.answer

    async def promote(self, down: list[str], force: bool, without_etcd: bool, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("promote", down, force, without_etcd, dry_run))
        if self.error:
            raise self.error
        return self.answer

    async def remove(self, node: str, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("remove", node, dry_run))
        return self.answer

    async def reload(self) -> tuple[bool, str]:
        self.told.append(("reload",))
        return self.answer

    async def pause(self, paused: bool) -> tuple[bool, str]:
        self.told.append(("pause", paused))
        return self.answer

    async def resync(
        self, client: str, sites: list[str], to_all: bool, source: str | None, reason: str, dry_run: bool
    ) -> tuple[bool, str]:
        self.told.append(("resync", client, sites, to_all, source, reason, dry_run))
        return self.answer

    async def switchover(self, node: str | None, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("switchover", node, timeout_s, force, dry_run))
        return self.answer

    async def renew(self, timeout_s: float, force: bool, dead_letters_arrived: bool, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("renew", timeout_s, force, dead_letters_arrived, dry_run))
        return self.answer

    async def demote(self, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("demote", timeout_s))
        return self.answer

    async def reinit(self, force: bool, dry_run: bool) -> tuple[bool, str]:
        self.told.append(("reinit", force, dry_run))
        return self.answer

    async def tail(self) -> AsyncIterator[dict[str, Any]]:
        yield {"kind": "publish"}
        if self.error:
            raise self.error


@contextmanager
def serving() -> Iterator[Callable[..., Node]]:
    """Gives a function that serves a node, with further arguments of HttpServer."""
    loop = uvloop.new_event_loop()  # as a sidecar's
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[HttpServer] = []

    def start(node: Node, **options: Any) -> Node:
        servers.append(HttpServer(f"127.0.0.1:{node.port}", node, **options))
        asyncio.run_coroutine_threadsafe(servers[-1].start(), loop).result(TIMEOUT_S)
        return node

    try:
        yield start
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def call(url: str, body: bytes | None = None, content_type: str = "application/json", **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": content_type, **headers})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)
