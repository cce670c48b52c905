"""The client of etcd against endpoints that hang, are away, refuse, or answer as etcd 3.4 does; and the register's JSON."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lrq_ha.coordination.etcd import Etcd, EtcdAway, EtcdRefused, KeyValue, LeaseGone
from lrq_ha.coordination.register import Register
from lrq_ha.errors import MalformedInput
from lrq_ha.replication.register import Record, RegisterView

TIMEOUT_S = 0.2
Answer = tuple[int, dict[str, Any]]


@asynccontextmanager
async def endpoint(answer: Callable[[str, dict[str, Any], str], Awaitable[Answer]]) -> Any:
    async def handle(request: web.Request) -> web.Response:
        status, body = await answer(request.path, await request.json(), request.headers.get("Authorization", ""))
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def stored(value: bytes, revision: int) -> dict[str, Any]:
    return {"response_range": {"kvs": [{"value": b64encode(value).decode(), "mod_revision": str(revision)}]}}


async def hangs(_path: str, _body: dict[str, Any], _token: str) -> Answer:
    await asyncio.sleep(10)
    return 200, {}


async def has_no_quorum(_path: str, _body: dict[str, Any], _token: str) -> Answer:
    return 503, {"error": "etcdserver: request timed out", "code": 14}


async def answers(_path: str, _body: dict[str, Any], _token: str) -> Answer:
    return 200, {"responses": [stored(b"1", 7), {"response_range": {}}]}


@pytest.mark.parametrize("first", [hangs, has_no_quorum, None])
def test_the_next_endpoint_is_asked_and_kept(first: Callable[..., Awaitable[Answer]] | None) -> None:
    asked = 0

    async def counted(*request: Any) -> Answer:
        nonlocal asked
        asked += 1
        return await (first or hangs)(*request)

    async def go() -> None:
        async with endpoint(counted) as bad, endpoint(answers) as good:
            etcd = Etcd([bad if first else "http://127.0.0.1:1", good], TIMEOUT_S)
            for _ in range(2):
                assert await etcd.read(["a", "b"]) == [KeyValue(b"1", 7), KeyValue()]
            await etcd.close()

    asyncio.run(go())
    assert asked == (1 if first else 0)


@pytest.mark.parametrize("good", [1, 2])
@pytest.mark.parametrize("requests", [2, 3, 8])
def test_requests_at_once_pass_a_dead_endpoint_once(good: int, requests: int) -> None:
    """Each finds the endpoint that answers, and the next request begins there: none puts the dead one back to the front."""
    asked = 0

    async def counted(*request: Any) -> Answer:
        nonlocal asked
        asked += 1
        return await hangs(*request)

    async def go() -> None:
        async with endpoint(counted) as dead, endpoint(answers) as alive:
            etcd = Etcd([dead, *[alive] * good], TIMEOUT_S)
            await asyncio.gather(*(etcd.read(["a"]) for _ in range(requests)))
            assert asked == requests
            await etcd.read(["a"])
            assert asked == requests
            await etcd.close()

    asyncio.run(go())


def test_no_endpoint_answers() -> None:
    async def go() -> None:
        async with endpoint(hangs) as one, endpoint(has_no_quorum) as other:
            etcd = Etcd([one, other], TIMEOUT_S)
            with pytest.raises(EtcdAway, match=r"has not answered within 0.2 s; .*request timed out"):
                await etcd.read(["a"])
            await etcd.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((200, {"result": {"ID": "5"}}), LeaseGone),
        ((404, {"error": "etcdserver: requested lease not found", "code": 5}), LeaseGone),
        ((403, {"error": "etcdserver: permission denied", "code": 7}), EtcdRefused),
        ((400, {"error": "etcdserver: user name is empty", "code": 3}), EtcdRefused),
    ],
)
def test_what_is_refused_is_final(answer: Answer, error: type[Exception]) -> None:
    async def told(_path: str, _body: dict[str, Any], _token: str) -> Answer:
        return answer

    async def go() -> None:
        async with endpoint(told) as one:
            etcd = Etcd([one], TIMEOUT_S)
            with pytest.raises(error):
                await etcd.keep_alive(5)
            await etcd.close()

    asyncio.run(go())


def test_a_login_that_is_over_is_repeated() -> None:
    logins: list[dict[str, Any]] = []

    async def with_logins(path: str, body: dict[str, Any], token: str) -> Answer:
        if path.endswith("authenticate"):
            logins.append(body)
            return 200, {"token": f"t{len(logins)}"}
        if token != "t2":
            return 401, {"error": "etcdserver: invalid auth token", "code": 16}
        return await answers(path, body, token)

    async def go() -> None:
        async with endpoint(with_logins) as one:
            etcd = Etcd([one, one], TIMEOUT_S, "lrq", "SECRET")
            assert (await etcd.read(["a", "b"]))[0].revision == 7
            await etcd.close()

    asyncio.run(go())
    assert logins == 2 * [{"name": "lrq", "password": "SECRET"}]


def test_a_change_that_has_landed_before_is_known() -> None:
    """The answer to the first try was lost: the second compares in vain, and the register has what was to be written."""
    record = Record(3, 257, 1, frozenset({1, 2}))
    sent: list[dict[str, Any]] = []

    async def landed_before(_path: str, body: dict[str, Any], _token: str) -> Answer:
        sent.append(body)
        state = b'{"v": 3, "epoch": 257, "leader": 1, "set": [1, 2], "log": "ab"}'
        return 200, {"responses": [stored(state, 9), stored(b"1", 9)]}

    async def go() -> None:
        async with endpoint(landed_before) as one:
            etcd = Etcd([one], TIMEOUT_S)
            register = Register(etcd, "/lrq-ha", "east", {1: "e1", 2: "e2"})
            done, found = await register.write(record, "ab", RegisterView(None, 0, 0, 0), 5)
            await etcd.close()
        assert (done, found.holder, found.revision) == (True, 1, 9)
        assert found.view("ab") == RegisterView(record, 9, 1, 9)
        assert found.view("cd").foreign

    asyncio.run(go())
    assert [each["mod_revision"] for each in sent[0]["compare"]] == ["0", "0"]
    assert len(sent[0]["success"]) == 5, "record, leader's key, history, and two reads"


def test_a_record_of_something_else_is_refused() -> None:
    async def other(_path: str, _body: dict[str, Any], _token: str) -> Answer:
        return 200, {"responses": [stored(b"[1]", 9), {"response_range": {}}]}

    async def go() -> None:
        async with endpoint(other) as one:
            etcd = Etcd([one], TIMEOUT_S)
            with pytest.raises(MalformedInput, match="choose another namespace"):
                await Register(etcd, "/lrq-ha", "east", {}).read()
            await etcd.close()

    asyncio.run(go())
