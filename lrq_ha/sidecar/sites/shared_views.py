"""Reads the views of the own broker for all sessions: carries out what the pure `ViewReaders` decide.

Rules:

- A reader uses the connection to the broker of the site for whose session it began, until it ends.
- If a session's site has no such connection any more, the sessions have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from broker_plugin.amqp.connection import Connection
from broker_plugin.log.replica import Replica
from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import view_readers as v
from lrq_ha.routing.messages import Stream

from .view_reader import View, ViewReader


class Sessions(Protocol):
    """The sessions of this node (`sessions.Sites`)."""

    replica: Replica

    def written_to(self) -> Position: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class Reading(Protocol):
    """A session that reads (`session_driver.SessionDriver`)."""

    client_name: str

    @property
    def broker(self) -> Connection | None: ...
    def feed(self, event: m.Event) -> None: ...


class _SharedView:
    """One view, its readers, and the sessions that follow them."""

    def __init__(self, sessions: Sessions, view: View) -> None:
        self._sessions = sessions
        self._view = view
        self.readers: v.ViewReaders[Reading] = v.ViewReaders()
        self.running: dict[int, tuple[ViewReader, asyncio.Task[None]]] = {}

    def carry_out(self, effects: Iterable[v.Effect[Reading]]) -> None:
        for effect in effects:
            match effect:
                case v.Give():
                    effect.session.feed(effect.event)
                case v.StartReader():
                    self._start(effect)
                case v.StopReader():
                    _, task = self.running.pop(effect.reader)
                    task.cancel()
                case v.PauseReader():
                    self.running[effect.reader][0].pause()
                case v.ResumeReader():
                    self.running[effect.reader][0].resume()

    def _start(self, effect: v.StartReader[Reading]) -> None:
        broker = effect.session.broker
        if broker is None:
            raise LrqError("the sessions have ended", retriable=True)
        give = partial(self._take, effect.reader)
        begins, end = self._sessions.replica.begins_at, self._sessions.written_to
        reader = ViewReader(broker, self._view, effect.from_sequence, effect.reader, end, give, begins=begins)
        self.running[effect.reader] = reader, self._sessions.spawn(reader.run())

    def _take(self, number: int, event: m.Read | m.ReadEnd | m.Trimmed | m.Demand) -> None:
        if isinstance(event, m.Trimmed):
            self.running.pop(number, None)
        self.carry_out(self.readers.take(event, number))


class SharedViews:
    """The views, for the sessions.

    Args:
        sessions: This node's.
        views: The views.
    """

    def __init__(self, sessions: Sessions, views: Mapping[Stream, View]) -> None:
        self._views = {stream: _SharedView(sessions, view) for stream, view in views.items()}

    def start(self, session: Reading, effect: m.StartRead) -> None:
        """Begins to read for a session; its former reading of that view ends. Raises LrqError: the sessions have ended."""
        shared = self._views[effect.stream]
        shared.carry_out(shared.readers.start(session, session.client_name, effect.reader, effect.from_sequence))

    def stop(self, session: Reading, stream: Stream) -> None:
        """Ends the reading of a session, if there is one."""
        shared = self._views[stream]
        shared.carry_out(shared.readers.stop(session))

    def pause(self, session: Reading, stream: Stream) -> None:
        """Gives a session no more for now."""
        shared = self._views[stream]
        shared.carry_out(shared.readers.pause(session))

    def resume(self, session: Reading, stream: Stream) -> None:
        """Goes on with what a session was not given."""
        shared = self._views[stream]
        shared.carry_out(shared.readers.resume(session))

    def problem(self, session: Reading) -> str:
        """Why a view cannot be read for a session now; empty if there is nothing."""
        for shared in self._views.values():
            number = shared.readers.reader_of(session)
            if number in shared.running and (said := shared.running[number][0].problem):
                return said
        return ""
