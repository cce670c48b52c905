"""The demo, step by step: starts, kills, and the claims that must hold afterwards. It fails loudly if one does not.

Rules:

- Everything that the demo starts it also ends, also after Ctrl-C or a failure.
- Every figure printed was measured in this run; a claim that does not hold ends the demo with a non-zero exit.
- A slow machine is no failure: a request without an answer in time is repeated.
"""

from __future__ import annotations

import array
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab, LabError
from lrq_ha.lab.keeper import end_with_parent
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline import store

from . import check, data
from .apps import read_report
from .tables import pipeline_config

QUEUE = "flights"
RECEIVE_QUEUE = "LRQ_Recv_flights_east"
KILL_AT_SHARE = 0.4  # of the flights confirmed
LAG_MAX_S = 2.0  # a message delivered twice must have been acked no longer than this before the kill
STEP_TIMEOUT_S = 300.0
PROMOTION_TIMEOUT_S = 30.0
POLL_S = 0.05


class DemoFailed(LrqError):
    """A claim of the demo does not hold."""


def say(text: str) -> None:
    print(text, flush=True)


def require(holds: bool, claim: str) -> None:
    """Prints the claim, or fails with it."""
    if not holds:
        raise DemoFailed(f"NOT TRUE: {claim}")
    say(f"   ok: {claim}")


def tell(report: Path, flights: int, broker: str | None) -> int:
    """Runs the whole demo.

    Args:
        report: Folder for report and chart.
        flights: Number of flights to use; 0 for all.
        broker: RabbitMQ series; None for the distribution's.
    """
    began = time.monotonic()
    # SIGTERM ends the demo in the order of Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with tempfile.TemporaryDirectory(prefix="lrq-demo-") as folder:
        demo = Demo(Path(folder), report, flights, broker)
        try:
            demo.run()
        finally:
            demo.end()
    say(f"\nDone in {time.monotonic() - began:.0f} s. Report and chart: {report}/report.json, {report}/delays.png")
    return 0


class Demo:
    """The demo's lab, applications and steps."""

    def __init__(self, folder: Path, report: Path, flights: int, broker: str | None) -> None:
        self.folder, self.report = folder, report
        self.flights = data.table("flights")[: flights or None]
        self.lab = Lab(groups={"east": 2, "west": 1}, directory=folder / "lab", broker=broker, sites={"east": ["west"], "west": []})
        self.apps: dict[str, subprocess.Popen[bytes]] = {}
        self.memory: dict[str, list[int]] = {}
        self.figures: dict[str, Any] = {"flights": len(self.flights)}
        self._watching = threading.Event()
        self._status: dict[str, Any] = {}  # the last status of a primary
        self._last = Position(0, 0)  # of the last transaction at west

    def run(self) -> None:
        """All steps."""
        self.start()
        self.publish()
        self.kill_and_promote()
        self.kill_query()
        self.finish_and_rejoin()
        self.prove()
        self.tables()
        (self.report / "report.json").write_text(json.dumps(self.figures, indent=2))

    def end(self) -> None:
        """Ends everything that the demo started."""
        self._watching.set()
        for process in self.apps.values():
            _kill(process)
        self.lab.down()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        say("1. Starting three private RabbitMQ brokers with their sidecars on loopback: e1 and e2 (group east), w1 (site west).")
        self.lab.up()
        self._require_soon("e1 is primary of east, e2 its in-sync backup", lambda: self._in_sync("e1"))
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def publish(self) -> None:
        say(f"\n2. An ordinary pika application publishes {len(self.flights):,} flights (persistent, confirmed) to the quorum queue '{QUEUE}';")
        say("   another consumes and acks them. They know the addresses of the two doors; the publisher also announces its producer name and")
        say("   numbers its messages (x-lrq-id), so that what it sends again is recognised. lrq_ha.publisher transmits these flights to")
        say("   site west: the small tables as a full snapshot, then one transaction per date and hour. There, lrq_ha.receiver keeps the")
        say("   tables in SQLite, and lrq-ha-pipeline, a streaming query of PySpark, keeps them in Parquet.")
        import pika

        connection = pika.BlockingConnection(pika.URLParameters(self.lab.nodes["e1"].door))
        connection.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        connection.close()
        data.save_flights(self.folder / "flights", self.flights)
        doors = [self.lab.nodes[name].door for name in ("e1", "e2")]
        settings = {"nodes": doors, "queue": QUEUE, "destination": "west"}
        self._spawn("log", settings)
        self._wait("the receive queue at west", lambda: check.depth(check.with_vhost(self.lab.nodes["w1"].door, "lrq"), RECEIVE_QUEUE) >= 0)
        (self.folder / "pipeline.toml").write_text(pipeline_config(RECEIVE_QUEUE, self.folder / "tables"))
        self._start_pipeline()
        self._wait("the snapshot in the Parquet tables", lambda: self._version() > 0)
        self._spawn("tables", {"nodes": [self.lab.nodes["w1"].door], "database": str(self.folder / "west.db")})
        for kind in ("publisher", "consumer"):
            self._spawn(kind, settings)
        at = int(len(self.flights) * KILL_AT_SHARE)
        self._wait("confirmed flights", lambda: self._report("publisher").get("confirmed", 0) >= at)

    def kill_and_promote(self) -> None:
        e1 = self.lab.nodes["e1"]
        say(f"\n3. SIGKILL of e1's broker (pid {e1.broker_pid}) and sidecar (pid {e1.sidecar_pid}) in the middle of it.")
        self._wait("e2 in the set", lambda: self._in_sync("e1"))
        before = self._status
        killed = time.time()
        self.lab.kill("e1")
        say(f"   The operator's word: lrq-ha promote e2 --down e1 --dir {self.lab.directory}")
        asked = time.time()
        self._promote()
        promoted = time.time()
        self._require_soon("e2 is primary now", lambda: self.lab.primary("east") == "e2")
        self._wait("the first confirm on e2", lambda: bool(self._confirms_after_loss(asked)))
        first = self._confirms_after_loss(asked)[0]
        self.figures |= {
            "killed_at": killed,
            "unsafe_entries_at_kill": before["end"] - before["safe"],
            "failover_ms": round(1000 * (first - killed)),
            "promotion_ms": round(1000 * (promoted - asked)),
            "promote_to_first_confirm_ms": round(1000 * (first - asked)),
        }
        took = self.figures
        say(f"   Kill to first confirm on e2: {took['failover_ms']} ms, of which the promotion itself took {took['promotion_ms']} ms.")

    def _promote(self) -> None:
        """A promotion is refused until e2 has missed e1."""
        deadline = time.monotonic() + PROMOTION_TIMEOUT_S
        while True:
            try:
                say("   " + self.lab.promote("e2", down=["e1"]))
                return
            except LabError:
                if self.lab.primary("east") == "e2":  # only the answer came too late
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def _confirms_after_loss(self, instant: float) -> list[float]:
        """The confirm times after a lost connection, of the times after `instant`: it may have been lost before for another reason."""
        return [each["confirmed_at"] for each in self._report("publisher").get("failovers", ()) if each["confirmed_at"] > instant]

    def kill_query(self) -> None:
        made = self._version()
        self._wait("a version of the tables after the promotion", lambda: self._version() > made or self._ended("log"))
        query = self.apps.pop("pipeline")
        say(f"\n4. SIGKILL of the query behind the Parquet tables (pid {query.pid} and its JVM), after version {self._version()}. It starts again.")
        _kill(query)
        self.figures["query_killed_after_version"] = self._version()
        self._start_pipeline()

    def finish_and_rejoin(self) -> None:
        share = (1 + KILL_AT_SHARE) / 2
        self._wait("more confirmed flights", lambda: self._report("publisher").get("confirmed", 0) >= len(self.flights) * share)
        say("\n5. e1 is started again; it finds its epoch over and follows e2.")
        began = time.time()
        self.lab.start("e1")
        for kind in ("publisher", "log", "consumer"):
            self._wait(f"the {kind}'s end", partial(self._ended, kind))
            require(self.apps[kind].returncode == 0, f"the {kind} application came to its end without an error")
        self._wait("e1 in the set", lambda: self._in_sync("e2"))
        say(f"   e1 is an in-sync backup of e2 again ({time.time() - began:.1f} s after its start).")

    def prove(self) -> None:
        say("\n6. What must hold:")
        publisher, consumer = self._report("publisher"), self._report("consumer")
        count = len(self.flights)
        seen = array.array("Q")
        seen.frombytes((self.folder / "consumer.seen").read_bytes())
        lost = count - len(set(seen) & set(range(1, count + 1)))
        again = f"{publisher['resent']:,} were sent again after the kill, with their IDs"
        require(publisher["confirmed"] == count, f"all {count:,} flights were confirmed ({again})")
        require(lost == 0, f"0 of {count:,} confirmed flights lost")
        killed = self.figures["killed_at"]
        ages = [killed - before for _, before, _ in consumer["twice"]]
        late = [age for age in ages if not -0.5 <= age <= LAG_MAX_S]
        oldest = f"; the oldest of their acks was {max(0, 1000 * max(ages)):.0f} ms old then" if ages else ""
        require(not late, f"0 delivered twice, except {len(ages)} whose ack had not been replicated when e1 was killed{oldest}")
        require(all(marked for _, _, marked in consumer["twice"]), "each of those was marked as redelivered")
        require(consumer["order_breaks"] == 0, "each consumer connection saw the flights in the order they were published")
        rate = count / publisher["seconds"]
        self.figures |= {"lost": lost, "delivered_twice": len(ages), "resent": publisher["resent"], "confirmed_per_s": round(rate)}
        say(f"   {rate:,.0f} confirmed publishes/s over the whole run, failover included (everything on this one machine).")
        self._prove_west()
        self._prove_same()
        self._prove_memory()

    def _prove_west(self) -> None:
        log = self._report("log")
        door = self.lab.nodes["w1"].door
        wanted = log["ids"]

        def arrived() -> bool:
            return self.lab.status("e2")["sessions"] != {} and len(self._deltas(door)[0]) >= len(wanted)

        self._wait("everything at west", arrived)
        deltas, repeats, snapshot = self._deltas(door)
        skipped = f"{repeats} repeats for readers to skip"
        require(deltas == wanted, f"all {len(wanted):,} log entries are on {RECEIVE_QUEUE} at west, once and in order ({skipped})")
        require(snapshot > 0, f"the full snapshot of airlines, airports and planes is there ({snapshot} entries)")
        self.figures |= {"log_entries": len(wanted), "snapshot_entries": snapshot}

    def _deltas(self, door: str) -> tuple[list[str], int, int]:
        transactions, repeats = check.received(door, RECEIVE_QUEUE)
        if transactions:
            self._last = Position(transactions[-1].position.epoch, transactions[-1].position.sequence)
        deltas = [t.replication_id for t in transactions if t.type == pb.LOG_ENTRY_SYNC]
        return deltas, repeats, sum(len(t.payloads) for t in transactions if t.type == pb.SNAPSHOT_SYNC)

    def _prove_same(self) -> None:
        e1, e2 = self.lab.nodes["e1"], self.lab.nodes["e2"]
        self._wait("e1's last entry", lambda: self.lab.status("e1")["applied"] == self.lab.status("e2")["end"])
        logs = [check.log_digest(node.admin, "east", number) for number, node in ((1, e1), (2, e2))]
        require(logs[0] == logs[1] and len(logs[0]) > 0, f"e1 and e2 hold identical logs ({logs[0][-1][2]:,} entries in {len(logs[0]):,} batches)")
        for view in ("LRQ_Send_LogEntries", "LRQ_Send_SnapSync"):
            views = [check.view_digest(node.admin, view) for node in (e1, e2)]
            require(views[0] == views[1], f"e1 and e2 hold an identical {view} ({len(views[0]):,} entries)")
        self._wait("e1's queue to be swept", lambda: check.depth(e1.broker, QUEUE) == check.depth(e2.broker, QUEUE))
        require(check.depth(e1.broker, QUEUE) == check.depth(e2.broker, QUEUE) == 0, f"the queue '{QUEUE}' is empty on both brokers")

    def _prove_memory(self) -> None:
        peaks = {name: max(values) >> 20 for name, values in self.memory.items() if values}
        self.figures["sidecar_memory_peak_mb"] = peaks
        say("   Peak memory of the sidecars: " + ", ".join(f"{name} {peak} MB" for name, peak in sorted(peaks.items())))

    def tables(self) -> None:
        say("\n7. The tables at west, which followed the receive queue meanwhile. A PySpark job computes a report from the Parquet ones.")
        self._wait("the last transaction in the Parquet tables", lambda: self._applied() == self._last)
        self.apps["pipeline"].terminate()
        self._wait("the pipeline's end", partial(self._ended, "pipeline"))
        self.figures["table_versions"] = self._version()
        ended = self.apps["pipeline"].returncode == 0
        require(ended, f"the query that was started again reached the last entry, in version {self._version()}, and ended in order")
        command = [sys.executable, "-m", "lrq_ha.demo.delays", str(self.folder / "tables"), "--out", str(self.report)]
        done = subprocess.run(command, timeout=STEP_TIMEOUT_S, preexec_fn=end_with_parent)
        if done.returncode:
            raise DemoFailed(f"the report failed with status {done.returncode}: it says why above")
        found = json.loads((self.report / "results.json").read_text())
        wanted = data.expected(self.flights)
        for group, rows in (("carrier", found["by_carrier"]), ("month", found["by_month"])):
            spark = {str(row[group]): (row["sum"], row["count"], row["mean"]) for row in rows if row["count"]}
            plain = {key: (total, count, total / count) for key, (total, count) in wanted[group].items()}
            same = f"Spark's {len(spark)} figures equal those computed from the package's files to the last digit"
            require(spark == plain, f"mean departure delay by {group}: {same}")
        sizes = {"flights": len(self.flights), **{name: len(data.table(name)) for name in ("airlines", "airports", "planes")}}
        require(found["rows"] == sizes, f"the tables have the right number of rows: {sizes}")
        self._compare_tables(found, sizes)

    def _compare_tables(self, found: dict[str, Any], sizes: dict[str, int]) -> None:
        """The tables of the receiver equal those of Spark."""
        with closing(sqlite3.connect(self.folder / "west.db", timeout=60)) as connection:

            def rows() -> dict[str, int]:
                return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in sizes}

            self._wait("the receiver's tables", lambda: rows() == sizes)
            for group in ("carrier", "month"):
                query = f"SELECT {group}, sum(dep_delay), count(dep_delay) FROM flights GROUP BY {group} HAVING count(dep_delay) > 0"
                spark = {row[group]: (row["sum"], row["count"]) for row in found[f"by_{group}"] if row["count"]}
                kept = {key: (total, count) for key, total, count in connection.execute(query)}
                require(kept == spark, f"the {len(kept)} sums of delays by {group} in the receiver's SQLite tables equal those of Spark")

    # ---- tools -------------------------------------------------------------------------------------------------------

    def _spawn(self, kind: str, settings: dict[str, Any]) -> None:
        settings = settings | {"flights": str(self.folder / "flights"), "report": str(self.folder / f"{kind}.json")}
        process = self._start(kind, "lrq_ha.demo.apps", kind)
        if process.stdin is not None:
            with process.stdin as told:
                told.write(json.dumps(settings).encode())

    def _start_pipeline(self) -> None:
        """All its files are in the demo's folder: a killed JVM removes none."""
        scratch = self.folder / "spark"
        scratch.mkdir(exist_ok=True)
        places = {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={scratch}"}
        self._start("pipeline", "lrq_ha.spark.pipeline", str(self.folder / "pipeline.toml"), LRQ_NODES=self.lab.nodes["w1"].door, **places)

    def _start(self, kind: str, module: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts an application; it and its children are a process group."""
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        with (self.folder / f"{kind}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent, start_new_session=True
            )
        self.apps[kind] = process
        return process

    def _ended(self, kind: str) -> bool:
        return self.apps[kind].poll() is not None

    def _report(self, kind: str) -> dict[str, Any]:
        return read_report(self.folder / f"{kind}.json")

    def _version(self) -> int:
        """The newest version of the Parquet tables; 0 if there is none."""
        return max(store.list_versions(self.folder / "tables"), default=0)

    def _applied(self) -> Position:
        """The position of the receive queue in that version."""
        return store.read_version(self.folder / "tables").queues[RECEIVE_QUEUE].position

    def _in_sync(self, primary: str) -> bool:
        """Whether both nodes of east are in the set, by its primary's status."""
        self._status = self.lab.status(primary)
        return self._status["role"] == "active" and set(self._status["members"]) == {"e1", "e2"}

    def _require_soon(self, claim: str, holds: Callable[[], bool]) -> None:
        self._wait(claim, holds)
        require(True, claim)

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        deadline, shown = time.monotonic() + STEP_TIMEOUT_S, 0.0
        while not _holds(done):
            now = time.monotonic()
            for kind, process in self.apps.items():
                if process.poll() not in (None, 0):
                    tail = (self.folder / f"{kind}.log").read_text(errors="replace")[-2000:]
                    raise DemoFailed(f"the {kind} application failed: {tail}")
            if now > deadline:
                raise DemoFailed(f"{what}: not within {STEP_TIMEOUT_S:g} s")
            if now - shown > 5:
                shown = now
                publisher, consumer, log = (self._report(kind) for kind in ("publisher", "consumer", "log"))
                counts = f"{publisher.get('confirmed', 0):,} confirmed, {consumer.get('consumed', 0):,} consumed"
                say(f"   … {counts}, {log.get('transactions', 0):,} transactions, tables in version {self._version()}")
            time.sleep(POLL_S)

    def _watch_memory(self) -> None:
        while not self._watching.wait(1.0):
            for name in self.lab.nodes:
                try:
                    self.memory.setdefault(name, []).append(self.lab.status(name)["rss_bytes"])
                except (LrqError, OSError, KeyError):
                    continue


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _holds(done: Callable[[], bool]) -> bool:
    """A check without an answer in time does not hold yet."""
    try:
        return done()
    except LrqError as error:
        if not error.retriable:
            raise
    except (AMQPError, AMQPConnectorException, OSError):
        pass
    return False
