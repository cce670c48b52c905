"""The kill matrix of a receiver: a process that stands still in one state, and what is killed meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gated_receiver
from gated_receiver import SCHEMA, connector
from load import eventually, primary_of, take_over
from mending import is_whole
from stock_source import ITEMS, Source, doors

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest


class Recording(Source):
    """Knows each transaction that it transmitted. In a full sync an item is changed, so that a receiver replays deltas."""

    def __init__(self, lab: Lab, client_name: str) -> None:
        self.sent: list[str] = []
        self._order = threading.Lock()
        super().__init__(lab, client_name)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self.change(ITEMS + 1, len(self.sent))
        super()._provide(request, context)

    def change(self, item: int, count: int | None) -> None:
        with self._order:
            super().change(item, count)
            self.sent.append(self.last)


class Gate:
    """A receiver's process, and its database.

    Args:
        lab: Of the test.
        client_name: The source's client.
        folder: For the process's files.
        state: The one in which the process stands still.
        dsn: Of a PostgreSQL database; empty: SQLite.
    """

    def __init__(self, lab: Lab, client_name: str, folder: Path, state: str, dsn: str = "") -> None:
        self._folder, self._connect = folder, connector(folder, dsn)
        self._command = [sys.executable, gated_receiver.__file__, ",".join(doors(lab)), client_name, str(folder), state, *filter(None, [dsn])]
        with contextlib.closing(self._connect()) as connection:
            for statement in SCHEMA:
                connection.cursor().execute(statement)
            connection.commit()
        self._process = subprocess.Popen(self._command)

    def rows(self, query: str) -> list[Any]:
        with contextlib.closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(query)
            return list(cursor.fetchall())

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    def reached(self) -> None:
        eventually("the receiver in its state", (self._folder / "reached").exists, seen=lambda: self._process.poll())

    def open(self) -> None:
        (self._folder / "open").touch()

    def is_whole(self, source: Recording) -> bool:
        """Whether the tables equal the source's, which is silent."""
        return dict(self.rows("SELECT item, count FROM stock WHERE source = 'east'")) == source.stock and (
            self.rows(f"SELECT 1 FROM noted WHERE kind = 'delta' AND id = '{source.sent[-1]}.0'") != []
        )

    def check_tables(self, source: Recording) -> None:
        """The tables come to equal the source's, which has flushed; each list was applied once."""
        counts = "SELECT build, kind, count(*) FROM noted GROUP BY build, kind"
        eventually("the tables of the source", lambda: self.is_whole(source), seen=lambda: self.rows(counts))
        self._check_lists(source)

    def _check_lists(self, source: Recording) -> None:
        """No update was applied twice in a build of the tables, and in each no delta was left out."""
        noted = self.rows("SELECT build, kind, id FROM noted")
        assert len(set(noted)) == len(noted), "a list was applied twice"
        sent = {f"{name}.0": number for number, name in enumerate(source.sent)}
        for build in {build for build, _, _ in noted}:
            found = sorted(sent[name] for of, kind, name in noted if (of, kind) == (build, "delta"))
            assert found == list(range(found[0], found[0] + len(found))) if found else True, "a delta was left out"


@contextlib.contextmanager
def changing(source: Recording) -> Iterator[None]:
    """The source's application goes on."""
    done = threading.Event()

    def change() -> None:
        seed = 100
        while not done.wait(0.05):
            source.change_many(seed, 5)
            seed += 5

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def kill(lab: Lab, gate: Gate, victim: str) -> list[str]:
    """Kills a victim. Returns the nodes that are down."""
    groups = {"sink": ["west"], "source": ["east"], "both primaries": ["west", "east"], "all three": ["west", "east"]}.get(victim, [])
    if victim in ("receiver", "all three"):
        gate.kill()
    killed = []
    for group in groups:
        primary = primary_of(lab, group)
        [backup] = {name for name, node in lab.nodes.items() if node.group == group} - {primary}
        eventually("the backup in the set", lambda primary=primary: len(lab.status(primary)["members"]) == 2)
        lab.kill(primary)
        take_over(lab, backup, primary)
        killed.append(primary)
    gate.open()
    if victim in ("receiver", "all three"):
        gate.start()
    return killed


def run_through(lab: Lab, folder: Path, state: str, victim: str, dsn: str = "") -> None:
    """A receiver comes into a state, in which something is killed; then its tables get whole, and each list was applied once.

    Args:
        lab: Groups east, the source, and west.
        folder: For the receiver's files.
        state: Of the receiver; "waiting": before the source's client announces itself.
        victim: "receiver", "sink" or "source" (their groups' primaries), "both primaries", or "all three".
        dsn: Of a PostgreSQL database; empty: SQLite.
    """
    client_name = f"kills{time.time_ns() % 10**9}"
    source = Recording(lab, client_name) if state != "waiting" else None  # without a client the sink has no queue
    gate, killed = Gate(lab, client_name, folder, state, dsn), []
    try:
        if source is None:
            time.sleep(1)  # the process is about to ask, asks, or waits
            killed = kill(lab, gate, victim)
            source = Recording(lab, client_name)
        source.change_many(0, 20)
        with changing(source):
            if state != "waiting":
                gate.reached()
                killed = kill(lab, gate, victim)
            source.change_many(0, 100)
        source.publisher.flush(120)
        gate.check_tables(source)
    finally:
        gate.kill()
        if source is not None:
            source.publisher.close(60)
        for node in killed:
            lab.start(node)
    eventually("the lab to be whole", lambda: is_whole(lab))
