"""What operators do to the brokers of a lab with their management API."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from broker_plugin.definitions.management import ALL_RIGHTS, Management
from broker_plugin.definitions.objects import Key, Objects, canonical
from lrq_ha.lab import Lab

#: The objects of a new vhost with a user in it.
LOGIN = "a password of an application"


def api(config: Path) -> Management:
    """The management API that a sidecar uses, with its user."""
    tables: dict[str, Any] = tomllib.loads(config.read_text())
    url = urlsplit(tables["broker"]["url"])
    return Management(tables["definitions"]["management"], unquote(url.username or ""), unquote(url.password or ""))


def listed(lab: Lab, node: str) -> Objects:
    """What a broker has, but for its own."""

    async def read() -> Objects:
        management = api(lab.nodes[node].config)
        try:
            return (await management.read()).objects
        finally:
            await management.close()

    return asyncio.run(read())


def change(lab: Lab, node: str, sets: Objects | None = None, deletes: Sequence[Key] = ()) -> None:
    """Sets and deletes objects at a broker, one after the other."""

    async def do() -> None:
        management = api(lab.nodes[node].config)
        try:
            for key, value in (sets or {}).items():
                await management.put(key, value)
            for key in deletes:
                await management.delete(key)
        finally:
            await management.close()

    asyncio.run(do())


def a_login(vhost: str, user: str, password: str = LOGIN, *tags: str) -> Objects:
    """A vhost, and a user with all rights in it."""
    return {
        ("vhosts", vhost): canonical({}),
        ("users", user): canonical({"password": password, "tags": list(tags)}),
        ("permissions", vhost, user): ALL_RIGHTS,
    }


def value_of(lab: Lab, node: str, key: Key) -> Any:
    """The value of an object at a broker; None: there is none."""
    found = listed(lab, node).get(key)
    return None if found is None else json.loads(found)


def login_url(url: str, user: str, vhost: str, password: str = LOGIN) -> str:
    """The URL of a broker or a door for another user and vhost."""
    parts = urlsplit(url)
    return f"amqp://{user}:{password.replace(' ', '%20')}@{parts.hostname}:{parts.port}/{vhost.replace('/', '%2F')}"
