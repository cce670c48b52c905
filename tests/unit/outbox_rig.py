"""An outbox in SQLite, and a log that drops repeats by their numbers, without a broker: what a relay is tried with."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.publisher import FencedError, NackedError
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.outbox import Outbox, OutboxRelay


class Killed(BaseException):
    """The process ends here."""


class Steps:
    """Counts the steps of a relay that another process, or the disk, can see; kills it behind one of them."""

    def __init__(self, last: int = 0) -> None:
        self.count, self.last = 0, last

    def take(self, locked: bool = False) -> None:
        """A step is done; `locked`: and the database is locked by its commit, which follows."""
        self.count += 1
        if self.count == self.last:
            raise Killed


class Log:
    """A group's log. `sites` are the destinations that it knows; None: any."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, tuple[bytes, ...]]] = []  # (replication ID, payloads), in log order
        self.last: dict[str, int] = {}
        self.seen: set[str] = set()
        self.sites: set[str] | None = None
        self.repeats = 0

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payloads in self.entries for payload in payloads]

    def take(self, producer: str, number: int, entries: LogEntries) -> LrqError | None:
        name = f"{producer}/{number}"
        if name in self.seen:
            self.repeats += 1
            return None
        unknown = {each for _, to in entries.entries for each in to} - (self.sites if self.sites is not None else {"west", "south", "north"})
        if unknown:
            return NackedError(name, 312, f"destination {min(unknown)!r} is not known")
        self.seen.add(name)
        self.last[producer] = max(self.last.get(producer, 0), number)
        self.entries.append((name, tuple(payload for payload, _ in entries.entries)))
        return None


class Producer:
    """A NumberedProducer at a log; each transmission and each confirm is a step."""

    def __init__(self, log: Log, name: str, sent: int, steps: Steps) -> None:
        self._log, self._name, self._steps = log, name, steps
        self.failure: LrqError | None = None
        self.checked = True
        self.log_in(sent)

    @property
    def fenced(self) -> bool:
        return self.failure is not None

    def log_in(self, sent: int) -> None:
        """The connection is there, perhaps again."""
        known = self._log.last.get(self._name, 0)
        if known > sent:
            self.failure = FencedError(self._name, known, sent)

    def transmit(self, number: int, entries: LogEntries) -> Confirm:
        if self.failure is not None:
            raise self.failure
        confirm = Confirm(f"{self._name}/{number}", lambda: None)
        confirm.settle(self._log.take(self._name, number, entries))
        self._steps.take()
        return confirm


class FakePublisher:
    """A Publisher at a log."""

    def __init__(self, log: Log, steps: Steps) -> None:
        self._log, self._steps = log, steps
        self.producers: list[Producer] = []

    def open_producer(self, name: str, sent: int) -> Producer:
        self.producers.append(Producer(self._log, name, sent, self._steps))
        return self.producers[-1]

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""


class StepConnection(sqlite3.Connection):
    """A connection whose commits are steps."""

    steps = Steps()

    def commit(self) -> None:
        if self.in_transaction:
            self.steps.take(locked=True)
            super().commit()
            self.steps.take()


class Idle(threading.Event):
    """Calls a function where a relay finds its outbox empty."""

    def __init__(self, idle: Callable[[], object]) -> None:
        super().__init__()
        self._idle = idle

    def wait(self, timeout: float | None = None) -> bool:
        self._idle()
        return True


class Rig:
    """An outbox, an application that writes numbered payloads, and relays."""

    def __init__(self, path: Path, log: Log | None = None) -> None:
        self.path = path
        self.outbox = Outbox()
        self.log = log or Log()
        self.written: list[bytes] = []
        with closing(self.connect()) as connection:
            self.outbox.create(connection.cursor())
            connection.commit()

    def connect(self, **options: Any) -> sqlite3.Connection:
        found: sqlite3.Connection = sqlite3.connect(self.path, timeout=30, **options)
        return found

    def write(self, *sizes: int, to: tuple[str, ...] = ("west",), commit: bool = True) -> list[str]:
        """Database transactions of so many entries each. Returns their replication IDs."""
        found = []
        with closing(self.connect()) as connection:
            for size in sizes:
                payloads = [f"{len(self.written) + n}".encode() for n in range(size)]
                found.append(self.outbox.write_transaction(connection.cursor(), [(payload, to) for payload in payloads]))
                if commit:
                    connection.commit()
                    self.written += payloads
                else:
                    connection.rollback()
        return found

    def rows(self, statement: str = "SELECT number FROM lrq_outbox ORDER BY number, entry") -> list[Any]:
        with closing(self.connect()) as connection:
            return connection.execute(statement).fetchall()

    def relay(self, steps: Steps | None = None, **options: Any) -> OutboxRelay:
        """A relay that stops where it finds the outbox empty."""
        counted = steps or Steps()

        class Counted(StepConnection):
            steps = counted

        publisher: Any = FakePublisher(self.log, counted)
        relay = OutboxRelay(lambda: self.connect(factory=Counted), lambda: publisher, self.outbox, **options)
        relay._awake = Idle(relay._ending.set)
        return relay
