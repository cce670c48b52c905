"""Runs one interceptor: its buffer, its thread, its failures, and its end.

Rules:

- No failure of an interceptor reaches a client: its exceptions are counted and their kind and place are logged (not their text, which may hold
  client data), and after `errors_max` failures in a row of one of its methods it is switched off, which is logged.
- Events go through a buffer to a thread of the interceptor's own. Only `routing` of one that refuses is called on the door's thread; there a call
  that takes longer than SLOW_S is a failure, too, and one that has not returned after HANGS_S is ended.
- A full buffer either drops events (`on_overflow = "drop"`: counted and logged) or makes clients wait ("wait"), but not without limit: an
  interceptor that finishes no event for `wait_max_s` is switched off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from lrq_ha.errors import place

from .events import Event, Interceptor, Point, Routing
from .hanging import HANGS_S, Hangs

log = logging.getLogger("lrq_ha.interceptors")

SLOW_S = 0.1
TELL_EVERY_S = 60.0
CLOSE_S = 5.0
EVENT_BYTES = 1024  # size of an event beside its message's header
RESUME_SHARE = 0.5
_MESSAGE_POINTS = (Point.ROUTING, Point.ENQUEUE, Point.ROUTED)


@dataclass(slots=True)
class _Side:
    """The counters of one thread: the door's, or the interceptor's own."""

    counters: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: Counter[str] = field(default_factory=Counter)  # by method: if events succeed, writing them to a full disk may still fail


class Runner:
    """One interceptor with its thread.

    Args:
        name: As in the configuration.
        interceptor: The object with the methods.
        priority: Lower ones are asked first.
        on_overflow: The action when the buffer is full.
        buffer_bytes_max: Size of the buffer.
        errors_max: Number of failures in a row of one method that switch it off.
        wait_max_s: Longest time in seconds that clients wait for it.

    Attributes:
        points: The points that it has methods for.
        off: Why it was switched off; empty while it runs.
    """

    def __init__(
        self,
        name: str,
        interceptor: Any,
        *,
        priority: int,
        on_overflow: Literal["drop", "wait"],
        buffer_bytes_max: int,
        errors_max: int,
        wait_max_s: float,
    ) -> None:
        self.name = name
        self.priority = priority
        self.refuses = bool(getattr(interceptor, "refuses", False))
        self.points = frozenset(point for point in Point if _has(interceptor, point.value))
        self.off = ""
        self._full = False
        self.on_room: Callable[[], None] = lambda: None  # called by the interceptor's thread when there is room again
        self._interceptor = interceptor
        self._waits = on_overflow == "wait"
        self._buffer_bytes_max = buffer_bytes_max
        self._errors_max = errors_max
        self._wait_max_s = wait_max_s
        self._buffer: SimpleQueue[tuple[Point, Event, int] | Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # of the number below, which two threads change
        self._bytes = 0
        self._asking, self._telling = _Side(), _Side()
        self._asked_at = 0.0  # start of the current call of `ask` (perf_counter); 0: none is under way
        self._moved_at = 0.0
        self._told: dict[tuple[str, str], tuple[float, int]] = {}
        self._thread = threading.Thread(target=self._run, name=f"interceptor-{name}", daemon=True)

    @property
    def full(self) -> bool:
        """Whether clients must wait. Never for one that is off: the buffer may fill at the very moment at which the other thread gives up."""
        return self._full and not self.off

    # ---- the door's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the interceptor, then its thread. Raises what the interceptor's `start` raises."""
        if _has(self._interceptor, "start"):
            self._interceptor.start()
        self._thread.start()

    def ask(self, event: Routing) -> str | None:
        """`routing` of an interceptor that refuses, called directly: the reason, or None."""
        if self.off:
            return None
        began = time.perf_counter()
        try:
            try:
                self._asked_at = began
                answer = self._interceptor.routing(event)
            finally:
                self._asked_at = 0.0
            if answer is not None and not isinstance(answer, str):
                raise TypeError
        except Hangs:
            self._asked_at = 0.0  # it may have come just before the line above
            self._failed(self._asking, "slow", Point.ROUTING.value, f"had not returned after {HANGS_S:g} s, and was ended: all clients waited")
            return None
        except BaseException as error:
            self._failed(self._asking, "errors", Point.ROUTING.value, place(error))
            return None
        took = time.perf_counter() - began
        self._asking.counters["events"] += 1
        if took > SLOW_S:
            self._failed(self._asking, "slow", Point.ROUTING.value, f"took {took:.2f} s, and all clients waited")
        else:
            self._asking.failed_in_a_row[Point.ROUTING.value] = 0
        if answer is not None:
            self._asking.counters["refused"] += 1
        return answer

    def end_what_hangs(self) -> None:
        """Called at any time, also during a call of `ask`. Raises Hangs, in that call, if it takes too long."""
        now = time.perf_counter()
        if self._asked_at and now - self._asked_at > HANGS_S:
            self._asked_at = now  # once more after as long, if it swallows this
            raise Hangs

    def put(self, point: Point, event: Any) -> None:
        """Passes an event to the interceptor. Never waits."""
        if self.off:
            return
        size = EVENT_BYTES
        if point in _MESSAGE_POINTS:
            size += len(event.message.header)
        if self._bytes >= self._buffer_bytes_max:
            if not self._waits:
                self._asking.counters["dropped"] += 1
                self._tell("dropped", point.value, "it is too slow: its buffer is full")
                return
            if not self._full:
                self._full = True
                self._moved_at = time.monotonic()
                self._tell("held up", point.value, "it is too slow: its buffer is full, and clients wait for it")
        with self._lock:
            self._bytes += size
        self._buffer.put((point, event, size))

    def check(self) -> None:
        """Once a second: clients do not wait for an interceptor without progress."""
        if self.full and time.monotonic() - self._moved_at > self._wait_max_s:
            self._switch_off(f"it has finished nothing for {self._wait_max_s:g} s while clients waited for it")

    def reload(self) -> None:
        """SIGHUP."""
        if not self.off and _has(self._interceptor, "reload"):
            self._buffer.put(self._interceptor.reload)

    def close(self) -> None:
        """Passes on the events in the buffer, then closes the interceptor. Blocks for CLOSE_S at most; harmless if never started."""
        if not self._thread.is_alive():
            return
        self._buffer.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("interceptor %s has not ended within %g s: %d events were not told", self.name, CLOSE_S, self._buffer.qsize())

    def status(self) -> dict[str, Any]:
        """Its part of GET /status."""
        counters = {key: self._asking.counters[key] + self._telling.counters[key] for key in ("events", "errors", "slow", "dropped", "refused")}
        points = [point.value for point in Point if point in self.points]
        return {"priority": self.priority, "points": points, "off": self.off, **counters, "waiting": self._buffer.qsize(), "holds_up": self.full}

    # ---- its own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        flush = self._interceptor.flush if _has(self._interceptor, "flush") else None
        clean = True
        while not self.off:
            try:
                item = self._buffer.get_nowait() if not clean else self._buffer.get()
            except Empty:
                clean = True
                if flush is not None:
                    self._call("flush", flush)
                continue
            if item is None:
                break
            clean = False
            if not isinstance(item, tuple):
                self._call("reload", item)
                continue
            point, event, size = item
            began = time.perf_counter()
            self._call(point.value, getattr(self._interceptor, point.value), event)
            took = time.perf_counter() - began
            if took > SLOW_S:
                self._telling.counters["slow"] += 1
                self._tell("slow", point.value, f"took {took:.2f} s")
            self._telling.counters["events"] += 1
            self._moved_at = time.monotonic()
            with self._lock:
                self._bytes -= size
            if self._full and self._bytes < self._buffer_bytes_max * RESUME_SHARE:
                self._full = False
                self.on_room()
        self._end(flush)

    def _end(self, flush: Callable[[], None] | None) -> None:
        close = self._interceptor.close if _has(self._interceptor, "close") else None
        for what, method in (("flush", flush), ("close", close)):
            try:
                if method is not None:
                    method()
            except BaseException as error:
                self._tell("errors", what, place(error))
        while not self._buffer.empty():  # events hold memory
            self._buffer.get()

    def _call(self, what: str, method: Callable[..., object], *arguments: object) -> None:
        try:
            method(*arguments)
        except BaseException as error:
            self._failed(self._telling, "errors", what, place(error))
        else:
            self._telling.failed_in_a_row[what] = 0

    # ---- failures --------------------------------------------------------------------------------------------------------

    def _failed(self, side: _Side, kind: str, what: str, why: str) -> None:
        side.counters[kind] += 1
        self._tell(kind, what, why)
        side.failed_in_a_row[what] += 1
        if side.failed_in_a_row[what] >= self._errors_max:
            self._switch_off(f"{what} failed {side.failed_in_a_row[what]} times in a row, the last time: {why}")

    def _switch_off(self, why: str) -> None:
        if self.off:
            return
        self.off = why
        log.error("interceptor %s is switched off until the sidecar is started again: %s", self.name, why)
        self._buffer.put(None)
        self.on_room()

    def _tell(self, kind: str, what: str, why: str) -> None:
        """Once per kind, point and TELL_EVERY_S."""
        now = time.monotonic()
        at, count = self._told.get((kind, what), (-TELL_EVERY_S, 0))
        if now - at < TELL_EVERY_S:
            self._told[kind, what] = at, count + 1
            return
        self._told[kind, what] = now, 0
        more = f" ({count} more since this was told last)" if count else ""
        log.error("interceptor %s, %s: %s: %s%s", self.name, what, kind, why, more)


def _has(interceptor: Any, method: str) -> bool:
    """Whether it has a method of its own by this name."""
    found = getattr(type(interceptor), method, None) or getattr(interceptor, method, None)
    return callable(found) and found is not getattr(Interceptor, method)
