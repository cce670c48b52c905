"""What the door does each second, and for whom: one that fails keeps nobody else from it. And who is behind longest."""

from __future__ import annotations

import asyncio
import tomllib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from broker_plugin.door.server import Door
from lrq_ha.sidecar import config as configuration

TICKS = 3
SECRET = "hunter2"


def new_door() -> Door:
    values = tomllib.loads(configuration.sample())
    values["door"] |= {"client_buffer_bytes_max": 1 << 12, "client_buffers_bytes_max": 1 << 20}
    return Door(configuration.Config.model_validate(values).door_settings)


def test_what_fails_each_second_keeps_nothing_else_from_being_done(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However often; and what it says of that is not said, as it may be what came from outside."""
    slept = 0

    async def sleep(_seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept > TICKS:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    door: Any = new_door()
    fails = MagicMock(side_effect=ValueError(SECRET))
    works = MagicMock()
    door.sessions = {SimpleNamespaceWithHash(flow=SimpleNamespace(tick=tick)) for tick in (fails, works)}
    door.peer_ends = {SimpleNamespaceWithHash(tick=tick) for tick in (fails, works)}
    door.interceptors, door.reload = MagicMock(check=fails), MagicMock(side_effect=OSError(SECRET))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(door._tick())
    assert (fails.call_count, works.call_count, door.reload.call_count) == (3 * TICKS, 2 * TICKS, TICKS)
    assert caplog.text.count("could not be done: ValueError at") == 3 * TICKS
    assert caplog.text.count("could not be done: OSError at") == TICKS
    assert SECRET not in caplog.text


class SimpleNamespaceWithHash(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_who_is_behind_longest_is_closed_however_often_the_door_is_told_how_far() -> None:
    door: Any = new_door()
    first, second, third = MagicMock(), MagicMock(), MagicMock()
    for client, waiting_bytes in ((first, 300_000), (second, 300_000), (first, 400_000), (third, 400_000)):
        first.cut_off.assert_not_called()
        door.client_full(client, waiting_bytes)
    first.cut_off.assert_called_once()
    second.cut_off.assert_not_called()
    assert door.counters["closed_slow"] == 1


def test_one_alone_is_not_closed_for_what_all_may_have() -> None:
    """It may be reading a single message that is larger than that."""
    door: Any = new_door()
    alone = MagicMock()
    door.client_full(alone, 2 << 20)
    alone.cut_off.assert_not_called()
