"""The management client against a server on loopback: what it asks, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from aiohttp import web

from broker_plugin.definitions import management
from broker_plugin.definitions.management import ENABLE, Management, ManagementUnavailable, ObjectRefused
from lrq_ha.lab.ports import free_ports

T = TypeVar("T")
Answer = tuple[int, bytes]
QUOTED = b'{"error":"bad_request","reason":"Validation failed\\n\\n\\"amqx://u:hunter2@h/\\" not a valid URI"}'


def ask(do: Callable[[Management], Awaitable[T]], answer: Callable[[web.Request], Awaitable[Answer]] | None) -> tuple[T, list[Any]]:
    """Runs `do` against a server that answers so (None: there is none); returns also what was asked: (method, raw path, login, body)."""
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.method, request.rel_url.raw_path, request.headers["Authorization"], await request.read()))
        assert answer is not None
        status, body = await answer(request)
        return web.Response(status=status, body=body)

    async def run() -> T:
        port = next(free_ports())
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        if answer is not None:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        client = Management(f"http://127.0.0.1:{port}", "lrq", "hunter2")
        try:
            return await do(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run()), asked


def always(status: int, body: bytes = b"") -> Callable[[web.Request], Awaitable[Answer]]:
    async def answer(_: web.Request) -> Answer:
        return status, body

    return answer


def test_names_are_percent_encoded_and_the_login_is_sent() -> None:
    _, asked = ask(lambda m: m.put(("policies", "/", "a/b %"), '{"x":1}'), always(204))
    login = base64.b64encode(b"lrq:hunter2").decode()
    assert asked == [("PUT", "/api/policies/%2F/a%2Fb%20%25", f"Basic {login}", b'{"x": 1}')]


def test_topic_permissions_have_the_exchange_in_the_body_or_in_the_path() -> None:
    key = ("topic_permissions", "/", "app", "amq.topic")
    _, [asked] = ask(lambda m: m.put(key, '{"read":"","write":""}'), always(204))
    assert (asked[1], json.loads(asked[3])) == ("/api/topic-permissions/%2F/app", {"exchange": "amq.topic", "read": "", "write": ""})
    _, [asked] = ask(lambda m: m.delete(key), always(204))
    assert asked[:2] == ("DELETE", "/api/topic-permissions/%2F/app/amq.topic")


def test_an_object_that_is_not_there_is_deleted_already() -> None:
    ask(lambda m: m.delete(("users", "x")), always(404, b'{"error":"Object Not Found"}'))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (("policies", "/", "p"), r"Validation failed .* not a valid URI \(400\)"),
        (("parameters", "shovel", "/", "s"), "^the broker answers 400$"),
        (("users", "u"), "^the broker answers 400$"),
        (("global_parameters", "g"), "^the broker answers 400$"),
    ],
)
def test_a_reason_is_kept_only_where_no_value_is_secret(key: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ObjectRefused, match=reason) as refused:
        ask(lambda m: m.put(key, '{"secret":1}'), always(400, QUOTED))
    assert ("hunter2" in str(refused.value)) is (key[0] == "policies")


async def never(_: web.Request) -> Answer:
    await asyncio.sleep(1)
    return 200, b""


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, rf"not reachable at http://127\.0\.0\.1:\d+ \(.+\): users and policies are not replicated; run: {ENABLE}$"),
        (always(401, b'{"error":"not_authorised"}'), "does not let user 'lrq' in: .*set_user_tags lrq administrator"),
        (always(503), "it answers 503"),
        (always(404, b"{}"), "it answers 404 to GET /api/"),
        (always(200, b"<html>"), "its answer is not JSON"),
        (never, r"no answer within 0\.2 s"),
    ],
)
def test_a_management_that_is_not_there_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[web.Request], Awaitable[Answer]] | None, text: str
) -> None:
    monkeypatch.setattr(management, "REQUEST_TIMEOUT_S", 0.2 if answer is never else 30.0)
    with pytest.raises(ManagementUnavailable, match=text) as error:
        ask(lambda m: m.read(), answer)
    assert "hunter2" not in str(error.value)
