"""Interceptors of a third party, for tests: a module that is installed, with its metadata, into a folder of the test's own (see `installed`)."""

from __future__ import annotations

import json
import socket
import threading
import time
from enum import Enum
from typing import Any

from lrq_ha.interceptors import Enqueue, Interceptor, Message, Point, Routing

SECRET = "not-it-hunter2"


def plain(value: Any) -> Any:
    """An event as JSON has it; bytes are left out."""
    if isinstance(value, Enum):
        return value.name
    if hasattr(value, "_asdict"):
        found = {name: plain(part) for name, part in value._asdict().items() if not isinstance(part, bytes)}
        if isinstance(value, Message):
            found["priority"] = value.properties.get("priority")
        if hasattr(value, "arguments"):
            found["arguments"] = {name: part for name, part in value.arguments.items() if isinstance(part, str | bool)}
        return found
    return value


class Recorder:
    """Writes down everything that it is told. It inherits from nothing: having the methods is enough."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def _record(self, point: Point, event: Any) -> None:
        self._file.write(json.dumps({"point": point.value, **plain(event)}) + "\n")


for each in Point:
    setattr(Recorder, each.value, lambda self, event, point=each: self._record(point, event))


class Gate(Interceptor):
    """Refuses publishes whose routing key or body has `word` in it."""

    refuses = True

    def __init__(self, word: str) -> None:
        self._word = word

    def routing(self, event: Routing) -> str | None:
        if self._word in event.message.routing_key or (event.body and self._word.encode() in event.body):
            return f"no {self._word} here"
        return None


class Failing(Interceptor):
    """Fails wherever it can; the text of its errors is nobody's business."""

    refuses = True

    def routing(self, event: Routing) -> str | None:
        if not event.body:
            raise SystemExit(SECRET)
        raise ValueError(SECRET)

    def enqueue(self, event: Enqueue) -> None:
        raise KeyError(SECRET)


class Slow(Interceptor):
    """Takes its time; `hang_at`: for ever, at this event."""

    def __init__(self, seconds: float = 0.0, hang_at: int = 0, path: str = "") -> None:
        self._seconds, self._hang_at, self._path = seconds, hang_at, path
        self._seen = 0

    def enqueue(self, event: Enqueue) -> None:
        self._seen += 1
        if self._seen == self._hang_at:
            threading.Event().wait()
        time.sleep(self._seconds)

    def close(self) -> None:
        if self._path:
            with open(self._path, "w") as file:
                file.write(str(self._seen))


class Hanging(Interceptor):
    """Does not come back from `routing` of a message whose body begins with a way not to."""

    refuses = True

    def routing(self, event: Routing) -> None:
        how = bytes(event.body or b"").partition(b" ")[0]
        if how == b"sleeps":
            time.sleep(3_600)
        elif how == b"waits":
            threading.Event().wait()
        elif how == b"reads":
            ours, _theirs = socket.socketpair()
            ours.recv(1)
        elif how == b"computes":
            while True:
                pass
        elif how == b"swallows":
            try:
                time.sleep(3_600)
            except BaseException:
                time.sleep(3_600)
