"""A client of etcd 3.4 or newer, over its JSON gateway.

Rules:

- Each request has a time limit. An endpoint that does not answer in time, or has no quorum, is left for the next one.
- A request that no endpoint has answered may have been carried out, and may be carried out later still: `EtcdAway`.
- Reads are linearizable. A serializable read may be old, and does not say so.
- A keepalive that is answered without a TTL is that of a lease that is gone.

Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from lrq_ha.errors import LrqError

_NOT_FOUND, _UNAUTHENTICATED = 5, 16
#: Codes of gRPC that say that the request is refused, wherever it goes: bad argument, not found, no right, failed precondition.
_FINAL = {3, _NOT_FOUND, 7, 9}


class EtcdError(LrqError):
    """Root of the errors of etcd."""


class EtcdAway(EtcdError):
    """No endpoint has answered: whether the request was carried out is unknown."""


class EtcdRefused(EtcdError):
    """etcd has refused the request."""


class LeaseGone(EtcdError):
    """The lease has ended."""


class KeyValue(NamedTuple):
    """A key's value, and the revision of its last change; 0 and empty: there is no such key."""

    value: bytes = b""
    revision: int = 0


class Etcd:
    """The client.

    Args:
        endpoints: "http://HOST:PORT" or "https://HOST:PORT" of each member.
        timeout_s: Time limit of a request at one endpoint.
        user, password: Of etcd's own authentication; empty: none.
        tls: Gives the context for https; None: the system's authorities.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float,
        user: str = "",
        password: str = "",
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._timeout_s = timeout_s
        self._user, self._password = user, password
        self._tls = tls
        self._token = ""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- keys --------------------------------------------------------------------------------------------------------

    async def read(self, keys: Sequence[str]) -> list[KeyValue]:
        """The values of several keys, at one moment. Raises EtcdError."""
        answer = await self._call("kv/txn", {"success": [_range(key) for key in keys]})
        return _values(answer["responses"])

    async def change(
        self, unchanged: dict[str, int], puts: dict[str, tuple[bytes, int]], read: Sequence[str]
    ) -> tuple[bool, list[KeyValue]]:
        """Puts values in one transaction, if keys have not changed.

        Args:
            unchanged: Keys, each with the revision that it must have (0: it must not be there).
            puts: Keys, each with its new value and its lease (0: none).
            read: Keys that are read in this transaction, after the puts.

        Returns:
            Whether it was done, and the values of `read`.

        Raises:
            LeaseGone: A lease has ended; nothing was changed.
            EtcdError: As `EtcdAway` and `EtcdRefused`.
        """
        ranges = [_range(key) for key in read]
        answer = await self._call("kv/txn", {
            "compare": [{"target": "MOD", "result": "EQUAL", "key": _b64(key), "mod_revision": str(at)} for key, at in unchanged.items()],
            "success": [*(_put(key, value, lease) for key, (value, lease) in puts.items()), *ranges],
            "failure": ranges,
        })  # fmt: skip
        return bool(answer.get("succeeded")), _values(answer["responses"])

    async def read_all(self, prefix: str) -> list[tuple[str, KeyValue]]:
        """All keys that begin with `prefix`, in order, with their values. Raises EtcdError."""
        answer = await self._call("kv/range", {"key": _b64(prefix), "range_end": _b64(_end(prefix)), "sort_order": "ASCEND", "sort_target": "KEY"})
        return [(b64decode(each["key"]).decode(), _value(each)) for each in answer.get("kvs", [])]

    async def delete_before(self, prefix: str, key: str) -> None:
        """Deletes the keys that begin with `prefix` and come before `key`. Raises EtcdError."""
        await self._call("kv/deleterange", {"key": _b64(prefix), "range_end": _b64(key)})

    async def delete(self, key: str, revision: int) -> bool:
        """Deletes a key if its last change is of this revision; returns whether it did. Raises EtcdError."""
        answer = await self._call("kv/txn", {
            "compare": [{"target": "MOD", "result": "EQUAL", "key": _b64(key), "mod_revision": str(revision)}],
            "success": [{"request_delete_range": {"key": _b64(key)}}],
        })  # fmt: skip
        return bool(answer.get("succeeded"))

    # ---- leases ------------------------------------------------------------------------------------------------------

    async def grant(self, ttl_s: float) -> int:
        """A new lease. Raises EtcdError."""
        return int((await self._call("lease/grant", {"TTL": str(round(ttl_s))}))["ID"])

    async def keep_alive(self, lease: int) -> None:
        """Renews a lease. Raises LeaseGone, or EtcdError."""
        answer = await self._call("lease/keepalive", {"ID": str(lease)})
        if not int(answer.get("result", {}).get("TTL", 0)):
            raise LeaseGone("the lease in etcd has ended")

    async def revoke(self, lease: int) -> None:
        """Ends a lease. Raises EtcdError; not if it has ended already."""
        try:
            await self._call("lease/revoke", {"ID": str(lease)})
        except LeaseGone:
            pass

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first endpoint that gives one. The next request begins there."""
        problems = []
        for endpoint in list(self._endpoints):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(endpoint, path, body)
            except TimeoutError:
                problems.append(f"{endpoint} has not answered within {self._timeout_s:g} s")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                reason = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else error
                problems.append(f"{endpoint}: {reason}")
            except _Unavailable as error:
                problems.append(f"{endpoint}: {error.what}")
            if self._endpoints[0] == endpoint:  # else another request has moved it already
                self._endpoints.append(self._endpoints.pop(0))
        raise EtcdAway(f"etcd does not answer: {'; '.join(problems)}", retriable=True)

    async def _ask(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._user and not self._token:
            self._token = str((await self._post(endpoint, "auth/authenticate", {"name": self._user, "password": self._password}))["token"])
        try:
            return await self._post(endpoint, path, body)
        except _TokenOver:
            self._token = ""
            raise

    async def _post(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {"Authorization": self._token} if self._token else {}
        async with self._session.post(f"{endpoint}/v3/{path}", json=body, headers=headers, ssl=self._tls() or True) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
        if response.status == 200 and "error" not in answer:
            return answer
        told = answer.get("error", answer)
        code = answer.get("code", told.get("grpc_code") if isinstance(told, dict) else None)
        text = str(answer.get("message") or told)
        if code == _NOT_FOUND and "lease" in text:
            raise LeaseGone("the lease in etcd has ended")
        if code == _UNAUTHENTICATED:
            raise _TokenOver(text)
        if code in _FINAL:
            raise EtcdRefused(f"etcd refuses the request: {text}", todo="see [coordination] user and password_file, and the user's rights in etcd")
        raise _Unavailable(text)


class _Unavailable(LrqError):
    """The endpoint cannot answer now."""


class _TokenOver(_Unavailable):
    """The login has to be repeated."""


def _b64(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _range(key: str) -> dict[str, Any]:
    return {"request_range": {"key": _b64(key)}}


def _put(key: str, value: bytes, lease: int) -> dict[str, Any]:
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def _values(responses: Sequence[dict[str, Any]]) -> list[KeyValue]:
    found = [answer["response_range"].get("kvs", []) for answer in responses if "response_range" in answer]
    return [_value(kvs[0]) if kvs else KeyValue() for kvs in found]


def _value(told: dict[str, Any]) -> KeyValue:
    return KeyValue(b64decode(told.get("value", "")), int(told["mod_revision"]))


def _end(prefix: str) -> str:
    """The first key after all that begin with `prefix`, which ends in an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
