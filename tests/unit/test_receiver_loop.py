"""A receiver on an event loop: the loop is never blocked, and every list comes once it was not taken, also when the loop itself ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from receive_node import CLIENT, NODES, PATIENCE_S, ReceiveNode, at, connect_receivers, sequences, until

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import (
    AsyncListener,
    AsyncReceiver,
    Fenced,
    Phase,
    Progress,
    Receiver,
    ReceiverError,
    Redelivery,
    Snapshot,
    SqlPositions,
    State,
    Stop,
    Table,
    TableListener,
    Update,
)
from lrq_ha.receiver.application_loop import LoopGone

pytestmark = pytest.mark.proves("G6")

Q = "LRQ_Recv_orders_east"
TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")
Answer = Callable[[list[Update]], Awaitable[object]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> ReceiveNode:
    return connect_receivers(monkeypatch)


@pytest.fixture
def positions(tmp_path: Path) -> SqlPositions:
    return SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30))


async def yes(_updates: list[Update]) -> bool:
    return True


class Coroutines(AsyncListener):
    """Notes what it is given and in which thread, and answers deltas as it is told."""

    def __init__(self, answer: Answer = yes) -> None:
        self.answer = answer
        self.given: list[list[Update]] = []
        self.taken: list[int] = []
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.told: list[ReceiverError] = []
        self.states: list[State] = []

    def _note(self, method: str) -> None:
        self.calls.append(method)
        self.threads.add(threading.get_ident())

    async def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(0)
        self._note("start")

    async def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        self._note("rows")
        return True

    def on_snapshot_sync_complete(self, snapshot: Snapshot) -> None:
        self._note("complete")

    async def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        self._note("deltas")
        self.given.append(updates)
        taken: Any = await self.answer(updates)
        if taken is True:
            self.taken += sequences(updates)
        return taken  # type: ignore[no-any-return]

    async def on_state(self, source: str, old: State, new: State, reason: str) -> None:
        self.states.append(new)

    def on_error(self, source: str, error: ReceiverError) -> None:
        self.told.append(error)


@contextlib.asynccontextmanager
async def receiving(listener: AsyncListener, positions: SqlPositions) -> Any:
    async with AsyncReceiver(NODES, CLIENT, "app", listener, positions=positions) as receiver:
        receiver.start()
        yield receiver
    assert not alive()


def alive() -> list[str]:
    """Threads of receivers."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lrq receiver")]


async def true(done: Callable[[], object]) -> None:
    """Waits on the loop until `done()`."""
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.sleep(0.002)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test as a coroutine."""

    def run(node: ReceiveNode, positions: SqlPositions) -> None:
        asyncio.run(test(node, positions))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_loop
async def test_coroutines_and_plain_methods_are_called_on_the_loop(node: ReceiveNode, positions: SqlPositions) -> None:
    tenants: list[str] = []

    async def answer(_updates: list[Update]) -> bool:
        tenants.append(TENANT.get())
        return True

    listener = Coroutines(answer)
    node.begin()
    TENANT.set("blue")
    async with receiving(listener, positions) as receiver:
        assert await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        node.delta(6, 7)
        assert await receiver.wait_for("east", replication_id="app/7", timeout_s=PATIENCE_S)
        assert receiver.status()["east"].consistent
        assert receiver.problem == ""
        await receiver.resync("east", "rows were lost")
        assert pb.Demand.FromString(node.demands[0]) == pb.Demand(queue=Q, reason="rows were lost")
    assert listener.calls == ["start", "rows", "complete", "deltas"]
    assert listener.threads == {threading.get_ident()}
    assert listener.states == [State.WAITING, State.BOOTSTRAP, State.NORMAL]
    assert tenants == ["blue"], "it has the context of the start"


@on_loop
async def test_a_list_that_is_not_taken_is_given_again_until_it_is(node: ReceiveNode, positions: SqlPositions) -> None:
    async def refuse() -> object:
        return False

    async def fail() -> object:
        raise TimeoutError("no database")

    async def be_cancelled() -> object:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        return await asyncio.sleep(PATIENCE_S)

    async def forget_to_answer() -> object:
        return None

    async def count() -> object:
        return 5

    turns = [refuse, fail, be_cancelled, forget_to_answer, count]

    async def answer(_updates: list[Update]) -> object:
        return await turns.pop(0)() if turns else True

    listener = Coroutines(answer)
    node.begin()
    async with receiving(listener, positions) as receiver:
        await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        node.delta(6, 7)
        assert await receiver.wait_for("east", at(7), timeout_s=PATIENCE_S)
    assert listener.given == [listener.given[0]] * 6
    assert all(isinstance(error, Redelivery) for error in listener.told)
    said = [str(error).partition(", attempt ")[2] for error in listener.told]
    assert said == [
        "1: the listener returned False",
        "2: TimeoutError: no database",
        "3: CancelledError: process_updates_in_log_entry_sync was cancelled",
        "4: TypeError: process_updates_in_log_entry_sync returned None: it must return True or False, or be a coroutine that does",
        "5: TypeError: process_updates_in_log_entry_sync returned 5: it must return True or False, or be a coroutine that does",
    ]
    assert positions.load("app", Q) == Progress(Phase.NORMAL, at(7))


@on_loop
async def test_a_slow_list_holds_up_neither_the_loop_nor_another_source(node: ReceiveNode, positions: SqlPositions) -> None:
    free = asyncio.Event()

    async def answer(updates: list[Update]) -> bool:
        if updates[0].source == "east":
            await free.wait()
        return True

    node.begin()
    node.begin("north")
    async with receiving(Coroutines(answer), positions) as receiver:
        for source in ("east", "north"):
            assert await receiver.wait_for(source, at(4), timeout_s=PATIENCE_S)
            node.delta(6, source=source)
        assert await receiver.wait_for("north", at(6), timeout_s=PATIENCE_S)
        assert not await receiver.wait_for("east", at(6), timeout_s=0.02)
        waiting = [asyncio.create_task(receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)) for _ in range(200)]
        await asyncio.sleep(0.02)
        waiting[0].cancel()
        began = time.monotonic()
        await asyncio.wait(waiting[:1])
        assert time.monotonic() - began < 1, "a cancelled wait leaves nothing behind"
        free.set()
        assert await asyncio.gather(*waiting[1:]) == [True] * 199


@on_loop
async def test_a_database_that_waits_does_not_hold_up_the_loop(node: ReceiveNode, positions: SqlPositions) -> None:
    """Here it waits for the loop: a loop that is held up would be so until the time limit."""
    loop, connect = asyncio.get_running_loop(), positions._database._connect
    waits: list[bool] = []

    def wait_for_loop() -> Any:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        waits.append(turned.wait(PATIENCE_S))
        return connect()

    positions._database._connect = wait_for_loop
    node.begin()
    async with receiving(Coroutines(), positions) as receiver:
        assert await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        await receiver.stop()
        assert await receiver.forget("east"), "it opens another connection, in another thread"
    assert waits == [True, True]


@on_loop
async def test_the_end_of_run(node: ReceiveNode, positions: SqlPositions) -> None:
    """By `stop` of another task, by `stop` of the listener, by Stop, and by another process."""
    node.begin()
    async with receiving(listener := Coroutines(), positions) as receiver:
        running = asyncio.create_task(receiver.run())
        waiting = asyncio.create_task(receiver.wait_for("east", at(99), timeout_s=10 * PATIENCE_S))
        await true(lambda: State.NORMAL in listener.states)  # nothing changes any more
        assert await receiver.stop()
        async with asyncio.timeout(PATIENCE_S):
            await running
            assert not await waiting
        with pytest.raises(ReceiverError, match="was stopped"):
            receiver.start()

    stopped: list[bool] = []

    async def stop(_updates: list[Update]) -> bool:
        stopped.append(await receiver.stop())
        return True

    node.delta(6)
    async with receiving(Coroutines(stop), positions) as receiver:
        await receiver.run()
        await true(lambda: stopped)
    assert stopped == [True], "it does not wait for itself"
    assert positions.load("app", Q) == Progress(Phase.NORMAL, at(6)), "the list under way counts"

    async def raise_stop(_updates: list[Update]) -> bool:
        raise Stop("enough")

    node.delta(7)
    async with receiving(listener := Coroutines(raise_stop), positions) as receiver:
        with pytest.raises(Stop, match="enough"):
            await receiver.run()
        assert (receiver.status()["east"].state, listener.states[-1]) == (State.ERROR, State.ERROR)
    async with receiving(Coroutines(), positions) as receiver:
        assert await receiver.wait_for("east", at(7), timeout_s=PATIENCE_S)
        await asyncio.to_thread(SqlPositions(positions._database._connect).load, "app", Q)
        node.delta(8)
        with pytest.raises(Fenced, match="Another process has taken over receiver 'app'"):
            await receiver.run()


@on_loop
async def test_a_cancelled_run_goes_on_until_stop(node: ReceiveNode, positions: SqlPositions) -> None:
    node.begin()
    async with receiving(Coroutines(), positions) as receiver:
        running = asyncio.create_task(receiver.run())
        assert await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        node.delta(6)
        assert await receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)


@on_loop
async def test_a_stop_that_takes_too_long_says_so(node: ReceiveNode, positions: SqlPositions) -> None:
    free = asyncio.Event()

    async def answer(_updates: list[Update]) -> bool:
        await free.wait()
        return True

    node.begin()
    node.delta(6)
    async with receiving(listener := Coroutines(answer), positions) as receiver:
        await true(lambda: listener.given)
        assert not await receiver.stop(0.05)
        free.set()
        assert await receiver.stop(PATIENCE_S)
    assert listener.taken == [6], "the list under way was not ended"


@on_loop
async def test_a_refused_list_is_skipped(node: ReceiveNode, positions: SqlPositions) -> None:
    async def answer(updates: list[Update]) -> bool:
        return 7 not in sequences(updates)

    class Skips(Coroutines):
        async def on_error(self, source: str, error: ReceiverError) -> None:  # type: ignore[override]
            receiver.skip(source, at(7))

    node.begin()
    node.delta(6, 7, 8)
    async with receiving(listener := Skips(answer), positions) as receiver:
        assert await receiver.wait_for("east", at(8), timeout_s=PATIENCE_S)
        assert receiver.status()["east"].skipped == 2
    assert listener.taken == [8]


@on_loop
async def test_a_listener_of_tables_is_called_in_threads(node: ReceiveNode, positions: SqlPositions) -> None:
    called: list[int] = []
    connect = positions._database._connect

    class Threads(TableListener):
        def on_state(self, source: str, old: State, new: State, reason: str) -> None:
            called.append(threading.get_ident())

    connect().execute("CREATE TABLE stock (source TEXT, item TEXT, PRIMARY KEY (source, item))")
    node.write((2, pb.SNAPSHOT_SYNC, b""), (3, pb.SNAPSHOT_SYNC, b'{"table": "stock", "rows": [{"item": "a"}]}'), (4, pb.LAST_FULL_SYNC_ENTRY, b""))
    async with AsyncReceiver(NODES, CLIENT, "app", Threads(connect, [Table("stock", ["item"], ["item"])])) as receiver:
        receiver.start()
        assert await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        assert connect().execute("SELECT * FROM stock").fetchall() == [("east", "a")]
    assert threading.get_ident() not in called


@on_loop
async def test_the_position_stands_in_the_groups_log_by_default(node: ReceiveNode, positions: SqlPositions) -> None:
    """`stop` writes it, also behind a list that was under way; another process fences; `forget` removes it."""
    given: list[bool] = []

    async def stop(_updates: list[Update]) -> bool:
        given.append(await receiver.stop())
        return True

    def committed() -> Progress:
        return Progress.from_text(node.commits.of("app", Q).value)

    node.begin()
    node.delta(6)
    async with AsyncReceiver(NODES, CLIENT, "app", Coroutines(stop)) as receiver:
        await receiver.run()
        await true(lambda: given)
    assert not alive()
    assert committed() == Progress(Phase.NORMAL, at(6))
    async with AsyncReceiver(NODES, CLIENT, "app", again := Coroutines()) as receiver:
        receiver.start()
        assert await receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)
        async with AsyncReceiver(NODES, CLIENT, "app", Coroutines()) as second:
            second.start()
            assert await second.wait_for("east", at(6), timeout_s=PATIENCE_S)
            node.delta(7)
            with pytest.raises(Fenced, match="Another process has taken over receiver 'app'"):
                await receiver.run()
    assert again.calls in ([], ["deltas"]), "it goes on where the first has stopped"
    assert await second.forget("east")
    assert node.commits.rows() == [], "its place is free"
    assert not await second.forget("east")
    async with AsyncReceiver(NODES, CLIENT, "app", again := Coroutines()) as receiver:
        receiver.start()
        assert await receiver.wait_for("east", at(7), timeout_s=PATIENCE_S)
    assert again.calls == ["start", "rows", "complete", "deltas"]


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_a_receiver_belongs_to_one_loop(node: ReceiveNode, positions: SqlPositions) -> None:
    receiver = AsyncReceiver(NODES, CLIENT, "app", Coroutines(), positions=positions)
    with pytest.raises(IllegalEvent, match=r"No event loop is running for receiver app\. Call it in a coroutine"):
        receiver.start()

    async def use() -> None:
        for call in (receiver.run, receiver.stop, lambda: receiver.wait_for("east", at(1)), receiver.resync, lambda: receiver.forget("east")):
            with pytest.raises(IllegalEvent, match=r"belongs to another event loop\. Make a receiver for each loop"):
                await call()
        with pytest.raises(IllegalEvent, match="another event loop"):
            await receiver.__aenter__()

    async def both() -> None:
        async with receiver:
            receiver.start()
            await asyncio.to_thread(asyncio.run, use())

    asyncio.run(both())
    assert not alive()


def test_a_listener_for_a_loop_is_refused_by_a_receiver_in_threads() -> None:
    with pytest.raises(MalformedInput, match=r"Coroutines is an AsyncListener\. Give it to an AsyncReceiver"):
        Receiver(NODES, CLIENT, "app", Coroutines())  # type: ignore[arg-type]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    found = asyncio.new_event_loop()
    yield found
    found.close()


async def started(node: ReceiveNode, positions: SqlPositions | None, listener: Coroutines) -> AsyncReceiver:
    """A receiver without a context manager: the application forgets to stop it."""
    node.begin()
    receiver = AsyncReceiver(NODES, CLIENT, "app", listener, positions=positions)
    receiver.start()
    assert await receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
    return receiver


@pytest.mark.parametrize("close", [True, False])
def test_an_idle_receiver_ends_when_its_loop_ends(
    node: ReceiveNode, positions: SqlPositions, loop: asyncio.AbstractEventLoop, close: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run_until_complete(started(node, positions, Coroutines()))
    if close:
        loop.close()
    until(lambda: not alive())
    assert "receiver app ends: its event loop was closed or has stopped" in caplog.text
    assert positions.load("app", Q) == Progress(Phase.NORMAL, at(4))


def test_positions_are_written_when_the_loop_ends(node: ReceiveNode, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrq_ha.receiver.group_positions.WRITE_EVERY_S", 10 * PATIENCE_S)
    loop.run_until_complete(started(node, None, Coroutines()))
    until(lambda: not alive())
    assert Progress.from_text(node.commits.of("app", Q).value) == Progress(Phase.NORMAL, at(4))


@pytest.mark.parametrize("close", [True, False])
def test_a_list_that_is_under_way_when_the_loop_ends_comes_again(
    node: ReceiveNode, positions: SqlPositions, loop: asyncio.AbstractEventLoop, close: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_updates: list[Update]) -> bool:
        under_way.set()
        await asyncio.sleep(3600)
        return True

    async def go() -> AsyncReceiver:
        receiver = await started(node, positions, listener)
        node.delta(6)
        await under_way.wait()
        return receiver

    under_way, listener = asyncio.Event(), Coroutines(answer)
    receiver = loop.run_until_complete(go())
    tasks = asyncio.all_tasks(loop)
    if close:
        for task in tasks:  # as asyncio.run does; some programs do not
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
    until(lambda: not alive())
    status = receiver.status()["east"]
    assert (status.state, "was closed or has stopped" in status.reason) == (State.ERROR, True)
    assert "a method of the listener failed" not in caplog.text, "nothing is left that could be told"
    if not close:
        loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE_S))
        assert all(task.cancelled() for task in tasks), "it does not go on beside a second receiver"
        with pytest.raises(LoopGone):
            raise receiver._threads.failure() or AssertionError

    async def again() -> None:
        async with receiving(listener, positions) as receiver:
            assert await receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)

    listener.answer = yes
    asyncio.run(again())
    assert listener.taken == [6]


def test_a_loop_that_stands_still_for_a_moment_ends_nothing(node: ReceiveNode, positions: SqlPositions, loop: asyncio.AbstractEventLoop) -> None:
    """As between two calls of run_until_complete."""
    receiver = loop.run_until_complete(started(node, positions, listener := Coroutines()))
    node.delta(6)
    until(lambda: not loop.is_running())
    time.sleep(0.1)
    assert loop.run_until_complete(receiver.wait_for("east", at(6), timeout_s=PATIENCE_S))
    assert loop.run_until_complete(receiver.stop())
    assert listener.taken == [6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_ends_the_program_ends_the_receiver(node: ReceiveNode, positions: SqlPositions) -> None:
    async def leave(_updates: list[Update]) -> bool:
        raise SystemExit(3)

    async def go() -> None:
        async with receiving(Coroutines(leave), positions) as receiver:
            node.begin()
            node.delta(6)
            await receiver.run()

    with pytest.raises(SystemExit):
        asyncio.run(go())
    until(lambda: not alive())
    assert positions.load("app", Q) == Progress(Phase.NORMAL, at(4))


# ---- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_every_delta_is_taken_in_order_whatever_the_listener_the_node_and_the_program_do(
    node: ReceiveNode, positions: SqlPositions, seed: int
) -> None:
    """Refusals, errors, cancellations, lost connections, and stops of the receiver in any place."""
    rng = random.Random(seed)
    last = 6

    async def answer(_updates: list[Update]) -> bool:
        await asyncio.sleep(rng.choice((0, 0, 0.001)))
        chance = rng.random()
        if chance < 0.1:
            raise ValueError("no")
        if chance < 0.2:
            raise asyncio.CancelledError
        return chance > 0.3

    async def life() -> None:
        nonlocal last
        async with receiving(listener, positions) as receiver:
            for _ in range(rng.randint(1, 6)):
                node.delta(*range(last, last + (count := rng.randint(1, 5))))
                last += count
                if rng.random() < 0.3:
                    node.cut()
                if rng.random() < 0.7:
                    assert await receiver.wait_for("east", at(rng.randint(2, last - 1)), timeout_s=PATIENCE_S)

    async def rest() -> None:
        listener.answer = yes
        async with receiving(listener, positions) as receiver:
            assert await receiver.wait_for("east", at(last - 1), timeout_s=PATIENCE_S)

    node.begin()
    listener = Coroutines(answer)
    for _ in range(4):
        asyncio.run(life())
    asyncio.run(rest())
    assert listener.taken == list(range(6, last))
