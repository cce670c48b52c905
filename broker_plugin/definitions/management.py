"""A broker's management API: reads, sets and deletes objects.

Rules:
- Requests go directly, whatever proxies the environment names, and have a time limit.
- No error has a value in it: RabbitMQ quotes URIs with their passwords. Its reason to refuse an object is kept for
  kinds without secrets only.

Source: RabbitMQ's HTTP API (rabbitmq_management 3.10.8 and 4.3.6).
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
from typing import Any
from urllib.parse import quote as percent_encode

import aiohttp

from lrq_ha.errors import LrqError

from ..amqp.errors import impersonate
from .objects import KINDS, Key, Listing, canonical, read_listing

REQUEST_TIMEOUT_S = 5.0
LISTS = tuple(kind for kind in KINDS.values() if kind.name != "user_limits")  # those are in the list of users
ALL_RIGHTS = canonical({"configure": ".*", "write": ".*", "read": ".*"})
REASON_CHARS_MAX = 200
ENABLE = "rabbitmq-plugins enable rabbitmq_management"


class ManagementUnavailable(LrqError):
    """The management API does not answer, or not to the sidecar's user.

    Attributes:
        problem: What is wrong.
        command: The command that mends it.
    """

    def __init__(self, problem: str, command: str = ENABLE) -> None:
        super().__init__(f"{problem}: users and policies are not replicated; run: {command}", retriable=True)
        self.problem = problem
        self.command = command


class ObjectRefused(LrqError):
    """The broker refuses an object."""


class Management:
    """The management API of one broker. Create it in a running event loop, and close it.

    Args:
        url: "http://HOST:PORT".
        user, password: The sidecar's own, which needs the tag `administrator`.
    """

    def __init__(self, url: str, user: str, password: str) -> None:
        self.user = user
        self._url = url.rstrip("/")
        login = base64.b64encode(f"{user}:{password}".encode("utf-8", "surrogateescape")).decode()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Basic {login}"}, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S), trust_env=False
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()

    async def read(self) -> Listing:
        """The broker's objects.

        Raises:
            ManagementUnavailable: It does not answer.
            MalformedInput: Its answer is not whole, or has another form.
        """
        answers = await asyncio.gather(*(self._list(kind.path) for kind in LISTS))
        return read_listing(dict(zip((kind.name for kind in LISTS), answers)), self.user)

    async def fetch(self, path: str) -> Any:
        """The answer to GET /api/PATH. Raises ManagementUnavailable: It does not answer, or with an error."""
        return await self._list(path)

    async def plugins(self) -> list[str]:
        """The plugins that an operator has enabled at the broker. Raises ManagementUnavailable."""
        node = (await self.fetch("overview"))["node"]
        return sorted(next((each.get("enabled_plugins", []) for each in await self.fetch("nodes") if each["name"] == node), []))

    async def has_vhost(self, vhost: str) -> bool:
        """Whether the broker has a vhost. Raises ManagementUnavailable."""
        status, _ = await self._ask("GET", _path(("vhosts", vhost)))
        return status != 404

    async def put(self, key: Key, value: str) -> None:
        """Sets an object.

        Raises:
            ManagementUnavailable: It does not answer.
            ObjectRefused: The broker refuses it.
        """
        await self._change("PUT", key, value)

    async def delete(self, key: Key) -> None:
        """Deletes an object; one that does not exist is no error. Raises as `put`."""
        await self._change("DELETE", key, None)

    async def enter(self, vhost: str) -> None:
        """Gives the sidecar's own user all rights in a vhost. Raises as `put`."""
        await self._change("PUT", ("permissions", vhost, self.user), ALL_RIGHTS)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _list(self, path: str) -> Any:
        status, body = await self._ask("GET", f"/{path}")
        if status != 200:
            raise self._unavailable(f"it answers {status} to GET /api/{path}")
        return body

    async def _change(self, method: str, key: Key, value: str | None) -> None:
        body = None if value is None else json.loads(value)
        path = _path(key)
        if key[0] == "topic_permissions" and body is not None:
            path, body = _path(key[:-1]), {**body, "exchange": key[-1]}
        status, answer = await self._ask(method, path, body)
        if status < 300 or (method == "DELETE" and status == 404):
            return
        reason = answer.get("reason", "") if isinstance(answer, dict) and KINDS[key[0]].tells else ""
        said = " ".join(html.unescape(str(reason)).split())[:REASON_CHARS_MAX]
        raise ObjectRefused(f"{said} ({status})" if said else f"the broker answers {status}")

    async def _ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        try:
            async with self._session.request(method, f"{self._url}/api{path}", json=body) as answer:
                if answer.status == 401:
                    raise self._not_let_in()
                if answer.status == 503:
                    raise self._unavailable("it answers 503")
                raw = await answer.read()
                return answer.status, json.loads(raw) if raw else None
        except TimeoutError:
            raise self._unavailable(f"no answer within {REQUEST_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise self._unavailable(str(reason)) from None
        except ValueError:
            raise self._unavailable("its answer is not JSON") from None

    def _unavailable(self, why: str) -> ManagementUnavailable:
        return ManagementUnavailable(f"its broker's management API is not reachable at {self._url} ({why})")

    def _not_let_in(self) -> ManagementUnavailable:
        return ManagementUnavailable(f"its broker's management API does not let user '{self.user}' in", impersonate(self.user))


def _path(key: Key) -> str:
    return "/" + "/".join((KINDS[key[0]].path, *(percent_encode(name, safe="") for name in key[1:])))
