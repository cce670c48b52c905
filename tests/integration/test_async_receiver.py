"""A receiver on an event loop keeps a table in step with a source, while the sink's primary is killed and lists are refused (G6)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from load import eventually, primary_of, set_up, take_over
from patience import PATIENT_DOOR
from stock_source import Source, doors

from lrq_ha.lab import Lab
from lrq_ha.receiver import AsyncListener, AsyncReceiver, Redelivery, Snapshot, SqlPositions, State, Update
from lrq_ha.receiver.errors import ReceiverError

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """One node as the source, and a pair as the sink."""
    groups = {"east": 1, "west": 2}
    folder = tmp_path_factory.mktemp("async_receiver") / "lab"
    found = Lab(groups, folder, sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


@pytest.fixture
def source(lab: Lab) -> Iterator[Source]:
    found = Source(lab, f"async{time.time_ns() % 10**9}")
    yield found
    found.publisher.close(60)


async def take(_updates: list[Update]) -> bool:
    return True


class Stock(AsyncListener):
    """A table in memory, whose methods are coroutines."""

    def __init__(self) -> None:
        self.stock: dict[int, int] = {}
        self.snapshots = 0
        self.answer: Callable[[list[Update]], Awaitable[bool]] = take
        self.given: list[list[str]] = []
        self.told: list[ReceiverError] = []

    async def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        self.stock = {}
        self.snapshots += 1

    async def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        for update in updates:
            payload = json.loads(update.opaque_payload)
            for row in payload["rows"]:
                self.stock.pop(row["item"], None)
                if payload.get("op", "put") == "put":
                    self.stock[row["item"]] = row["count"]
            await asyncio.sleep(0)
        return True

    async def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        self.given.append([update.replication_id for update in updates])
        return await self.answer(updates) and await self.process_updates_in_snapshot_sync(updates)

    async def on_error(self, source: str, error: ReceiverError) -> None:
        self.told.append(error)


def receiver_of(lab: Lab, source: Source, listener: Stock, folder: Path | None = None) -> AsyncReceiver:
    """Its position stands in a database in `folder`, or else in the group's log."""
    positions = SqlPositions(lambda: sqlite3.connect(folder / "positions.db", timeout=30)) if folder else None
    return AsyncReceiver(doors(lab), source.client_name, "stock-async", listener, positions=positions)


async def change(source: Source, seed: int, count: int) -> None:
    def change_and_flush() -> None:
        source.change_many(seed, count)
        source.publisher.flush(60)

    await asyncio.to_thread(change_and_flush)


async def arrive(receiver: AsyncReceiver, source: Source) -> None:
    assert await receiver.wait_for("east", replication_id=source.last, timeout_s=120), receiver.status()


async def be_normal(receiver: AsyncReceiver) -> None:
    await asyncio.to_thread(eventually, "the receiver in step", lambda: receiver.status()["east"].consistent, 30, seen=receiver.status)


@pytest.mark.quick
def test_the_sinks_primary_is_killed_under_a_receiver_on_a_loop(lab: Lab, source: Source, tmp_path: Path) -> None:
    listener, loop_steps = Stock(), 0

    async def count_steps() -> None:
        nonlocal loop_steps
        while True:
            await asyncio.sleep(0.01)
            loop_steps += 1

    async def go() -> None:
        primary = await asyncio.to_thread(primary_of, lab, "west")
        backup = "w2" if primary == "w1" else "w1"
        async with receiver_of(lab, source, listener, tmp_path) as receiver:
            running, counting = asyncio.create_task(receiver.run()), asyncio.create_task(count_steps())
            await be_normal(receiver)
            await change(source, 0, 200)
            await asyncio.to_thread(eventually, "the sink's backup in the set", lambda: len(lab.status(primary)["members"]) == 2)
            steps = loop_steps
            await asyncio.to_thread(lab.kill, primary)
            took_over = asyncio.create_task(asyncio.to_thread(take_over, lab, backup, primary))
            await change(source, 200, 200)
            await took_over
            await arrive(receiver, source)
            assert listener.stock == source.stock
            await be_normal(receiver)
            assert loop_steps > steps + 20, "the loop turns while no node takes the receiver"
            counting.cancel()
            await receiver.stop()
            await running
        lab.start(primary)
        eventually("both in the set again", lambda: len(lab.status(backup)["members"]) == 2)

    asyncio.run(go())
    given = [name for each in listener.given for name in each]
    assert len(set(given)) == len(given) == 400, "no delta is left out, or given twice"


def test_a_list_is_refused_for_a_while_and_its_coroutine_cancelled(lab: Lab, source: Source) -> None:
    """Then comes the very list again; behind a restart what was not taken; and once the position is forgotten, a snapshot."""
    listener, refusing = Stock(), True
    waits: list[asyncio.Task[object]] = []

    async def refuse(_updates: list[Update]) -> bool:
        return not refusing

    async def wait(_updates: list[Update]) -> bool:
        current = asyncio.current_task()
        assert current is not None
        waits.append(current)
        await asyncio.sleep(3600)
        return True

    async def go() -> None:
        nonlocal refusing
        async with receiver_of(lab, source, listener) as receiver:
            receiver.start()
            await be_normal(receiver)
            listener.answer = refuse
            await change(source, 0, 1)
            assert not await receiver.wait_for("east", replication_id=source.last, timeout_s=2)
            assert receiver.status()["east"].state is State.NORMAL
            refusing = False
            await arrive(receiver, source)
            assert len(listener.told) >= 3
            listener.answer = wait
            await change(source, 1, 1)
            for number in (1, 2):
                await asyncio.to_thread(eventually, "the coroutine", lambda count=number: len(waits) == count)
                waits[-1].cancel()
            await asyncio.to_thread(eventually, "the third time", lambda: len(waits) == 3)
            assert all("was cancelled" in str(error) for error in listener.told[-2:])
            waits[-1].cancel()
            assert await receiver.stop()
        listener.answer = take
        async with receiver_of(lab, source, listener) as receiver:
            receiver.start()
            await arrive(receiver, source)
            assert listener.stock == source.stock
            assert await receiver.stop()
            assert listener.snapshots == 1
            assert await receiver.forget("east")
        listener.stock = {}
        async with receiver_of(lab, source, listener) as receiver:
            receiver.start()
            await be_normal(receiver)
            await asyncio.to_thread(eventually, "the deltas behind the snapshot", lambda: listener.stock == source.stock)
            assert listener.snapshots == 2

    asyncio.run(go())
    lists = [names for number, names in enumerate(listener.given) if number == 0 or listener.given[number - 1] != names]
    assert len(lists[0]) == len(lists[1]) == 1, "each list came as it was until it was taken"
    assert [error.attempt for error in listener.told if isinstance(error, Redelivery)][:3] == [1, 2, 3]
