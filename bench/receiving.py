"""P11: what a receiver costs: entries a second and CPU time, to a listener that does nothing and into SQLite exactly once, and from a kill to a list.

Rules: the queue is full before a receiver starts, so the source costs nothing meanwhile. The receiver runs in this process, alone: its CPU time is
the process's. A list counts when it is committed. Entries are of 100 B, 100 a transaction.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Listener, Progress, Receiver, SqlListener, Update

from .measure import WAIT_S, Figure, Row, note, until

GOAL_PER_S = 200_000
GOAL_AGAIN_S = 1.0
ENTRY_BYTES = 100
PER_TRANSACTION = 100
ENTRIES, SHORT_ENTRIES = 1_000_000, 100_000
CLIENT = "bench"
QUEUE = f"LRQ_Recv_{CLIENT}_east"


class Memory:
    """A position store that keeps nothing beyond the process."""

    def load(self, _name: str, _queue: str) -> Progress | None:
        return None

    def commit(self, _name: str, _queue: str, _before: Progress | None, _after: Progress) -> None: ...

    def forget(self, _name: str, _queue: str) -> bool:
        return False


class _Idle(Listener):
    """Does nothing."""

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        return True


class Rows(SqlListener):
    """Puts each entry into a table: a second application of an entry would be an error."""

    def clear(self, cursor: sqlite3.Cursor, source: str) -> None:
        cursor.execute("CREATE TABLE IF NOT EXISTS entries (id TEXT PRIMARY KEY, payload BLOB)")
        cursor.execute("DELETE FROM entries")

    def apply_snapshot(self, cursor: sqlite3.Cursor, updates: list[Update]) -> None: ...

    def apply_log_entries(self, cursor: sqlite3.Cursor, updates: list[Update]) -> None:
        cursor.executemany("INSERT INTO entries VALUES (?, ?)", [(update.replication_id, update.opaque_payload) for update in updates])


def p11(brokers: list[str], entries: int, rounds: int) -> Row:
    """Fills a receive queue of each version's sink, and reads the queue so many times in each way."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 1, "west": 1}, broker=broker, sites={"east": ["west"]}) as lab, tempfile.TemporaryDirectory() as folder:
            last = _fill(lab, entries)
            door = lab.nodes["w1"].door
            for number in range(rounds):
                database = Path(folder) / f"{number}.db"
                idle = _read(Receiver([door], CLIENT, f"idle-{number}", _Idle(), positions=Memory()), last)
                rows = _read(Receiver([door], CLIENT, f"rows-{number}", rows_of(database)), last)
                with sqlite3.connect(database) as connection:
                    [(found,)] = connection.execute("SELECT count(*) FROM entries")
                run = {"broker": broker, "idle": idle, "sqlite": rows, "missing": entries - found, "again_s": _again(door, folder)}
                runs.append(run)
                note(f"P11 {run}")
    return _summary(runs, entries)


def rows_of(database: Path) -> Rows:
    return Rows(lambda: sqlite3.connect(database, timeout=30))


def _fill(lab: Lab, entries: int) -> str:
    """Transmits the entries; returns the last replication ID when the sink has it."""

    def provide(_: FullSyncRequest, context: FullSyncContext) -> None:
        context.complete()

    payload = b"x" * ENTRY_BYTES
    with Publisher([lab.nodes["e1"].door], "bench-app", CLIENT) as publisher:
        publisher.on_full_sync(provide)
        until("a whole snapshot", lambda: lab.status("w1")["receiving"].get(QUEUE, {}).get("snapshot", {}).get("complete") is True)
        for number in range(entries // PER_TRANSACTION):
            same = number.to_bytes(4, "big") + payload[4:]
            confirm = publisher.transmit_log_entry_messages([(same, ["west"])] * PER_TRANSACTION)
        publisher.flush(WAIT_S)

        def has_come() -> bool:
            session = lab.status("e1")["sessions"]["west"]["clients"][CLIENT]
            return bool(session["in_flight_bytes"] == 0 and session["acked"] == session["sent"])

        until("the sink to have all", has_come)
    return confirm.replication_id


def _read(receiver: Receiver, last: str) -> dict[str, float]:
    with receiver:
        began, cpu = time.monotonic(), time.process_time()
        receiver.start()
        if not receiver.wait_for("east", replication_id=last, timeout_s=20 * WAIT_S):
            raise LrqError(f"{receiver.name} does not get all: {receiver.status()}")
        return {"s": time.monotonic() - began, "cpu_s": time.process_time() - cpu}


def _again(door: str, folder: str) -> float:
    """Seconds from the start of a process, after a kill, to its first list."""
    database = Path(folder) / f"again-{time.time_ns()}.db"
    command = [sys.executable, "-m", "bench.receiving", door, str(database)]
    process = subprocess.Popen(command)
    until("some lists", lambda: _count(database) > 0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before, began = _count(database), time.monotonic()
    process = subprocess.Popen(command)
    until("the next list", lambda: _count(database) > before)
    again_s = time.monotonic() - began
    process.kill()
    process.wait()
    return again_s


def _count(database: Path) -> int:
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM entries").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def _summary(runs: list[dict[str, Any]], entries: int) -> Row:
    figures: list[Figure] = []
    for broker in sorted({run["broker"] for run in runs}):
        those = [run for run in runs if run["broker"] == broker]
        for way, goal in (("idle", GOAL_PER_S), ("sqlite", None)):
            figures.append(Figure(f"{way}_per_s", median(entries / run[way]["s"] for run in those), goal, least=True, variant=broker, digits=0))
            figures.append(Figure(f"{way}_us", median(1e6 * run[way]["cpu_s"] / entries for run in those), variant=broker))
        figures.append(Figure("again_s", median(run["again_s"] for run in those), GOAL_AGAIN_S, variant=broker))
    figures.append(Figure("missing", sum(run["missing"] for run in runs), 0, digits=0))
    return Row("P11", figures, f"{entries:,} entries of {ENTRY_BYTES} B, {PER_TRANSACTION} a transaction", runs)


if __name__ == "__main__":
    Receiver([sys.argv[1]], CLIENT, "again", rows_of(Path(sys.argv[2]))).run()
