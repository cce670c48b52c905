"""Sessions that read a view of the own broker: one consumer serves all that keep up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from test_view_reader import _run, _Stream

from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.messages import Stream
from lrq_ha.sidecar.sites.shared_views import SharedViews
from lrq_ha.sidecar.sites.view_reader import READ_MESSAGES_MAX, View

LOG = Stream.LOG_ENTRIES


class Counting(_Stream):
    """Counts the readers that have attached."""

    attached = 0

    async def channel(self, on_close: Any) -> Any:
        self.attached += 1
        return await super().channel(on_close)


class Session:
    """Keeps what it is given; it has enough after `pause_after` entries."""

    client_name = "c"

    def __init__(self, views: SharedViews, broker: Any, pause_after: int = 0) -> None:
        self.broker = broker
        self.sequences: list[int] = []
        self.trimmed: list[int] = []
        self._views, self._pause_after = views, pause_after

    def feed(self, event: m.Event) -> None:
        if isinstance(event, m.Trimmed):
            self.trimmed.append(event.first_available)
        elif isinstance(event, m.Read):
            self.sequences += [entry.position.sequence for entry in event.entries]
            if self._pause_after and len(self.sequences) >= self._pause_after:
                self._pause_after = 0
                self._views.pause(self, LOG)


class Host:
    """The sessions of a node."""

    def __init__(self) -> None:
        self.replica: Any = SimpleNamespace(begins_at=0)
        self.tasks: list[asyncio.Task[None]] = []

    def written_to(self) -> Position:
        return Position(0, 0)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(coroutine))
        return self.tasks[-1]

    async def rest(self) -> None:
        for _ in range(300):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result


def test_one_consumer_serves_all_and_a_session_that_pauses_goes_on_where_it_was() -> None:
    async def go() -> None:
        stream, host = Counting(_run(1, 1000, ahead=-1), head=0), Host()
        views = SharedViews(host, {LOG: View(LOG.value)})
        quick, slow = Session(views, stream), Session(views, stream, pause_after=3 * READ_MESSAGES_MAX)
        for session in (quick, slow):
            views.start(session, m.StartRead(LOG, 1, 1))
        await host.rest()
        assert (quick.sequences, slow.sequences, stream.attached) == (list(range(1, 1001)), list(range(1, 3 * READ_MESSAGES_MAX + 1)), 1)
        views.resume(slow, LOG)
        assert (slow.sequences, stream.attached) == (list(range(1, 1001)), 1), "from what the reader keeps"
        late = Session(views, stream)
        views.start(late, m.StartRead(LOG, 400, 1))
        assert late.sequences == list(range(400, 1001))
        views.stop(quick, LOG)
        views.stop(slow, LOG)
        assert not any(task.cancelling() for task in host.tasks)
        views.stop(late, LOG)
        await host.rest()
        assert [task.cancelled() for task in host.tasks] == [True]
        await host.end()

    asyncio.run(go())


def test_a_reader_whose_entries_were_dropped_ends_for_all_that_follow_it() -> None:
    async def go() -> None:
        stream, host = Counting([*_run(1, 100), *_run(5000, 5010)], head=5000), Host()
        views = SharedViews(host, {LOG: View(LOG.value)})
        sessions = [Session(views, stream) for _ in range(3)]
        for session in sessions:
            views.start(session, m.StartRead(LOG, 1, 1))
        await host.rest()
        assert [session.trimmed for session in sessions] == [[5000]] * 3
        views.start(sessions[0], m.StartRead(LOG, 5000, 2))
        views.stop(sessions[1], LOG)
        await host.rest()
        assert sessions[0].sequences[-11:] == list(range(5000, 5011))
        await host.end()

    asyncio.run(go())
