"""What only asyncio has: cancellation, tasks, and a loop that must not be held up. What both publishers do is in the other test_publisher files.

Brokers without a door: nothing removes repeats, so an ID that was given twice would be seen.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aio_pika
import pika
import pytest
from publisher_api import PATIENCE_S, LoopThread

from lrq_ha.errors import IllegalEvent
from lrq_ha.lab import Lab
from lrq_ha.publisher import AsyncConfirm, AsyncPublisher, ConfirmTimeout, NackedError, NoPrimary, Publisher, PublisherClosed, Unconfirmed

pytestmark = [pytest.mark.broker, pytest.mark.quick, pytest.mark.one_version("4.3")]

BODY = b"x" * 1024
QUEUES = (("/", "q"), ("lrq", "LRQ_Send_LogEntries"), ("lrq", "LRQ_Status"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    with Lab({"east": 1}, tmp_path_factory.mktemp("async") / "lab", broker_version, brokers_only=True) as found:
        yield found


@contextmanager
def channel(lab: Lab, vhost: str = "/") -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    parameters = pika.URLParameters(lab.nodes["e1"].admin)
    parameters.virtual_host = vhost
    with pika.BlockingConnection(parameters) as connection:
        yield connection.channel()


@pytest.fixture(autouse=True)
def queues(lab: Lab) -> None:
    for vhost, queue in QUEUES:
        with channel(lab, vhost) as ch:
            ch.queue_declare(queue, durable=True)
            ch.queue_purge(queue)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.end()


def publisher(lab: Lab, **options: float) -> AsyncPublisher:
    """One that no pause of the machine makes connect again: nothing here would remove its repeats."""
    found = {"connect_timeout_s": PATIENCE_S, "confirm_timeout_s": 2 * PATIENCE_S, "heartbeat_s": 120, **options}
    return AsyncPublisher([lab.nodes["e1"].admin], "app-1", "orders", **found)  # type: ignore[arg-type]


def sequences(lab: Lab, vhost: str = "/", queue: str = "q") -> list[int]:
    """Of all messages in a queue, repeats included."""
    found: list[int] = []
    with channel(lab, vhost) as ch:
        for _ in range(ch.queue_declare(queue, passive=True).method.message_count):
            _, properties, _ = ch.basic_get(queue, auto_ack=True)
            found.append(int(properties.headers["x-lrq-id"].rpartition("/")[2]))
    return found


def test_confirms_are_awaited_in_every_way(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        async with publisher(lab) as p:
            confirms = [await p.publish("", "q", BODY) for _ in range(5)]
            assert await asyncio.gather(*confirms) == [f"app-1/{number}" for number in range(1, 6)]
            assert await asyncio.wait_for(confirms[0], PATIENCE_S) == await confirms[0] == await confirms[0].result(0) == "app-1/1"
            assert "confirmed" in repr(confirms[0])
            refused = await p.publish("", "nowhere", BODY)
            results = await asyncio.gather(refused, await p.publish("", "q", BODY), return_exceptions=True)
            assert isinstance(results[0], NackedError)
            assert results[1] == "app-1/7"
            assert "312 NO_ROUTE" in repr(refused)

    loop.run(main())
    assert sequences(lab) == [1, 2, 3, 4, 5, 7]


def test_callbacks_run_on_the_loop_in_the_publishers_context(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        seen: list[threading.Thread] = []
        follow_ups: list[asyncio.Task[AsyncConfirm]] = []
        async with publisher(lab) as p:

            def confirmed(_: AsyncConfirm) -> None:
                seen.append(threading.current_thread())
                follow_ups.append(asyncio.create_task(p.publish("", "q", b"2")))

            first = await p.publish("", "q", b"1")
            first.add_done_callback(confirmed)
            await first
            await (await follow_ups[0])
            assert seen == [threading.current_thread()]

    loop.run(main())
    assert sequences(lab) == [1, 2]


def test_many_tasks_publish_at_once(lab: Lab, loop: LoopThread) -> None:
    async def work(p: AsyncPublisher, count: int) -> list[AsyncConfirm]:
        return [await p.publish("", "q", b"x") for _ in range(count)]

    async def main() -> None:
        async with publisher(lab, window=50) as p:
            lists = await asyncio.gather(*(work(p, 20) for _ in range(200)))
            ids = [int((await confirm).rpartition("/")[2]) for confirms in lists for confirm in confirms]
            assert sorted(ids) == list(range(1, 4001))
            assert all([c.replication_id for c in confirms] == sorted((c.replication_id for c in confirms), key=number) for confirms in lists)

    def number(replication_id: str) -> int:
        return int(replication_id.rpartition("/")[2])

    loop.run(main())
    assert sequences(lab) == list(range(1, 4001))


def test_a_publish_that_is_cancelled_was_not_sent(lab: Lab, loop: LoopThread) -> None:
    """Cancelled at every moment, while others go on: no ID is lost, given twice, or sent without somebody who waits for it."""

    async def main() -> int:
        confirms: list[AsyncConfirm] = []

        async def work(p: AsyncPublisher) -> None:
            for _ in range(200):
                confirms.append(await p.publish("", "q", BODY))

        async with publisher(lab, window=20) as p:
            tasks = [asyncio.create_task(work(p)) for _ in range(20)]
            for task in tasks[::2]:
                await confirms[-1] if confirms else await asyncio.sleep(0.01)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(each) for each in results] == [asyncio.CancelledError, type(None)] * 10
            await p.flush(2 * PATIENCE_S)
            assert all(confirm.done and confirm.error is None for confirm in confirms)
            return len(confirms)

    count = loop.run(main())
    assert 2000 <= count < 4000, "some were cancelled before they were through"
    assert sequences(lab) == list(range(1, count + 1))


def test_waiting_for_a_confirm_may_be_cancelled(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        async with publisher(lab) as p:
            await (await p.publish("", "q", BODY))
            lab.stop("e1.broker")
            try:
                confirm = await p.publish("", "q", BODY)
                for _ in range(3):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(confirm, 0.05)
                with pytest.raises(ConfirmTimeout, match="app-1/2"):
                    await confirm.result(0.05)
                assert confirm._callbacks is None, "who has stopped waiting is forgotten"
            finally:
                lab.cont("e1.broker")
            assert await confirm == "app-1/2"

    loop.run(main())
    assert sequences(lab) == [1, 2]


def test_a_transaction_that_is_cancelled_is_discarded(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        async with publisher(lab) as p:
            entered = asyncio.Event()

            async def work() -> None:
                async with p.transaction() as tx:
                    tx.transmit_log_entry_message(b"never", ["west"])
                    entered.set()
                    await asyncio.sleep(60)

            task = asyncio.create_task(work())
            await entered.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with p.transaction() as tx:
                tx.transmit_log_entry_message(b"a", ["west"])
            assert await tx.confirm == "app-1.lrq/2"

    loop.run(main())
    assert sequences(lab, "lrq", "LRQ_Send_LogEntries") == [2]


def test_closing_while_publishes_are_open(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        p = await publisher(lab, window=1).connect()
        await (await p.publish("", "q", b""))
        lab.stop("e1.broker")
        try:
            unconfirmed = await p.publish("", "q", b"")
            waiting = [asyncio.create_task(p.publish("", "q", b"")) for _ in range(3)]
            await asyncio.sleep(0.05)
            with pytest.raises(TimeoutError, match="1 messages"):
                await p.close(timeout_s=0.2)
            assert [type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)] == [PublisherClosed] * 3
            with pytest.raises(Unconfirmed):
                await unconfirmed
            with pytest.raises(PublisherClosed):
                await p.publish("", "q", b"")
            await p.close()
        finally:
            lab.cont("e1.broker")

    loop.run(main())


def test_a_cancelled_close_closes(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        p = await publisher(lab).connect()
        await (await p.publish("", "q", b""))
        lab.stop("e1.broker")
        try:
            confirm = await p.publish("", "q", b"")
            closing = asyncio.create_task(p.close(timeout_s=60))
            await asyncio.sleep(0.05)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert isinstance(confirm.error, Unconfirmed)
        finally:
            lab.cont("e1.broker")

    loop.run(main())


def test_a_publisher_whose_tasks_are_cancelled_is_closed(lab: Lab, loop: LoopThread) -> None:
    """As by who ends all tasks of a loop: it took publishes that nobody sent, and `flush` waited for ever."""

    async def main() -> None:
        p = await publisher(lab).connect()
        await (await p.publish("", "q", b""))
        lab.stop("e1.broker")
        try:
            unconfirmed = await p.publish("", "q", b"")
            flushing = asyncio.create_task(p.flush())
            await asyncio.sleep(0.05)
            for task in asyncio.all_tasks() - {asyncio.current_task(), flushing}:
                task.cancel()
            with pytest.raises(Unconfirmed):
                await asyncio.wait_for(unconfirmed, PATIENCE_S)
            await asyncio.wait_for(flushing, PATIENCE_S)
            with pytest.raises(PublisherClosed, match="were cancelled"):
                await p.publish("", "q", b"")
            await p.close()
        finally:
            lab.cont("e1.broker")

    loop.run(main())


def test_a_publisher_that_no_longer_looks_at_full_syncs_is_closed(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        async with publisher(lab) as p:
            p.on_full_sync(lambda request, context: context.complete())
            await p.flush(PATIENCE_S)
            assert p._ticks is not None
            p._ticks.cancel()
            await asyncio.wait({p._ticks}, timeout=PATIENCE_S)
            await asyncio.sleep(0)  # those who are told of its end come then
            with pytest.raises(PublisherClosed, match="were cancelled"):
                await p.publish("", "q", b"")

    loop.run(main())


def test_connecting_may_be_cancelled_and_tried_again(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        lab.stop("e1.broker")
        try:
            p = publisher(lab)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(p.connect(), 0.2)
            with pytest.raises(PublisherClosed):
                await p.connect()
            with pytest.raises(NoPrimary, match="no answer yet"):
                await AsyncPublisher([lab.nodes["e1"].admin], "app-1", connect_timeout_s=0.2).connect()
        finally:
            lab.cont("e1.broker")
        async with publisher(lab) as again:
            await (await again.publish("", "q", b""))

    loop.run(main())


def test_a_loop_over_publish_lets_others_run(lab: Lab, loop: LoopThread) -> None:
    async def main() -> None:
        async with publisher(lab) as p:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            await asyncio.sleep(0)
            before = turns
            for _ in range(5000):  # half of the window: it never has to wait
                await p.publish("", "q", b"")
            assert turns - before >= 5000 // 64
            counting.cancel()

    loop.run(main())


def test_where_it_may_be_used(lab: Lab, loop: LoopThread) -> None:
    p = publisher(lab)
    with pytest.raises(IllegalEvent, match="async with"):
        loop.run(p.publish("", "q", b""))
    loop.run(p.connect())
    with pytest.raises(IllegalEvent, match="another event loop"):
        asyncio.run(p.publish("", "q", b""))
    with pytest.raises(IllegalEvent, match="another event loop"):
        asyncio.run(p.close())
    confirm = loop.run(p.publish("", "q", b""))
    assert confirm.replication_id == loop.run(confirm.result(PATIENCE_S)) == "app-1/1", "it is not closed"
    loop.run(p.close())
    never = publisher(lab)
    loop.run(never.close())
    with pytest.raises(PublisherClosed):
        loop.run(never.connect())


def test_a_confirm_is_awaited_in_another_loop(lab: Lab, loop: LoopThread) -> None:
    """Nothing woke that loop."""
    p = loop.run(publisher(lab).connect())
    loop.run(loop.run(p.publish("", "q", b"")).result())
    lab.stop("e1.broker")
    try:
        confirm = loop.run(p.publish("", "q", b""))
        found: list[str] = []
        other = threading.Thread(target=lambda: found.append(asyncio.run(confirm.result())), daemon=True)
        other.start()
        deadline = time.monotonic() + PATIENCE_S
        while confirm._callbacks is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # it sleeps by now
    finally:
        lab.cont("e1.broker")
    other.join(PATIENCE_S)
    assert found == ["app-1/2"]
    loop.run(p.close())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_an_async_publisher_alone(lab: Lab, loop: LoopThread) -> None:
    def child(said: multiprocessing.SimpleQueue[list[str]]) -> None:
        found = []
        for call in (p.flush, p.close):
            try:
                asyncio.run(call())
                found.append("")
            except BaseException as error:
                found.append(str(error))
        said.put(found)

    p = loop.run(publisher(lab).connect())
    context = multiprocessing.get_context("fork")
    said: multiprocessing.SimpleQueue[list[str]] = context.SimpleQueue()
    process = context.Process(target=child, args=(said,), daemon=True)
    process.start()
    process.join(2 * PATIENCE_S)
    process.kill()
    flushing, closing = said.get()
    assert "after the fork" in flushing
    assert closing == ""
    assert loop.run(loop.run(p.publish("", "q", b"")).result(PATIENCE_S)) == "app-1/1"
    loop.run(p.close())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told(lab: Lab) -> None:
    """It has the publisher's memory, and neither its I/O thread nor its connections; the locks as they were."""

    def child(said: multiprocessing.SimpleQueue[list[str]]) -> None:
        found = []
        for call in (lambda: p.publish("", "q", b""), p.flush, confirm.result, lambda: p.on_full_sync(lambda *_: None), p.close):
            try:
                call()
                found.append("")
            except PublisherClosed as error:
                found.append(str(error))
        said.put(found)

    with Publisher([lab.nodes["e1"].admin], "app-1", "orders") as p:
        lab.stop("e1.broker")
        try:
            confirm = p.publish("", "q", b"")
            context = multiprocessing.get_context("fork")
            said: multiprocessing.SimpleQueue[list[str]] = context.SimpleQueue()
            process = context.Process(target=child, args=(said,), daemon=True)
            with p._lock:
                process.start()
            process.join(2 * PATIENCE_S)
            process.kill()
            assert process.exitcode == 0
        finally:
            lab.cont("e1.broker")
        answers = said.get()
        assert ["after the fork" in answer for answer in answers] == [True] * 4 + [False]
        assert confirm.result(PATIENCE_S) == "app-1/1"


def test_the_applications_own_connections_keep_their_log(lab: Lab, loop: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    """aio-pika's errors are silenced for the publisher's connections alone, which say it in one line."""
    caplog.set_level(logging.INFO)

    def told(logger: str, what: str) -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.startswith(logger)]
        return [each for each in found if what in each]

    async def main() -> None:
        async with publisher(lab) as p:
            await (await p.publish("", "q", b""))
            own = await aio_pika.connect(lab.nodes["e1"].admin)
            lab.ctl("e1", "close_all_connections", "maintenance")
            deadline = time.monotonic() + 2 * PATIENCE_S
            while not told("lrq_ha", "320 CONNECTION_FORCED - maintenance") or not told("aiormq", "Unexpected connection close"):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            await (await p.publish("", "q", b""))
            await own.close()

    loop.run(main())
    assert len(told("aiormq", "Unexpected connection close")) == 1, "of two connections that were closed"
