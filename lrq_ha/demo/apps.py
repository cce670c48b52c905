"""The demo's applications: two ordinary ones in pika alone, which know of lrq-ha only the list of addresses, and one at each end of the log.

The publisher announces its producer name and numbers its messages (`x-lrq-id`), so that the door recognises its retries after a failover. Each
application runs in a process of its own and reports in a file of its own.
"""

from __future__ import annotations

import array
import json
import sqlite3
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from . import data

WINDOW_MESSAGES = 2_000
PREFETCH = 500
ACK_EVERY = 50
RETRY_S = 0.02
PRODUCER = "flights-app"
#: The tables at the other site: columns, the key first.
TABLES = {
    "flights": ("id", "carrier", "month", "dep_delay"),
    "airlines": ("carrier", "name"),
    "airports": ("faa", "name", "tz"),
    "planes": ("tailnum", "year", "seats"),
}


class PublisherApp:
    """Publishes every flight with confirms; messages without a confirm when a connection ends are sent again, in order, with their numbers."""

    def __init__(self, nodes: list[str], queue: str, flights: list[data.Row], report: Path) -> None:
        self.nodes, self.queue, self.report = nodes, queue, report
        self.bodies = [data.message(row) for row in flights]
        self.next = 0
        self.unconfirmed: deque[int] = deque()  # message numbers on this connection, in the order of their publish tags
        self.first_tag = 1
        self.answered: set[int] = set()
        self.confirmed = 0
        self.failovers: list[dict[str, float]] = []
        self.lost_at = 0.0
        self.resent = 0
        self.again: deque[int] = deque()
        self.channel: Any = None

    def run(self) -> None:
        """Runs until every flight is confirmed."""
        began, turn = time.time(), 0
        while self.confirmed < len(self.bodies):
            parameters = _parameters(self.nodes[turn % len(self.nodes)])
            parameters.client_properties = {"lrq_producer": PRODUCER}
            parameters.blocked_connection_timeout = 5
            connection = pika.SelectConnection(
                parameters, on_open_callback=self._opened, on_open_error_callback=self._stop, on_close_callback=self._stop
            )
            try:
                connection.ioloop.start()
            except (AMQPError, OSError):
                pass
            if self.confirmed < len(self.bodies):
                if not self.lost_at:
                    self.lost_at = time.time()
                again = [n for i, n in enumerate(self.unconfirmed) if self.first_tag + i not in self.answered]
                self.again = deque(sorted({*again, *self.again}))
                self.unconfirmed.clear()
                turn += 1
                time.sleep(RETRY_S)
        self._save(done=True, seconds=time.time() - began)

    def _stop(self, connection: Any, error: Any) -> None:
        connection.ioloop.stop()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._ready)

    def _ready(self, channel: Any) -> None:
        self.channel, self.first_tag, self.answered = channel, 1, set()
        channel.confirm_delivery(self._confirm, callback=lambda _frame: self._fill())

    def _fill(self) -> None:
        properties = pika.BasicProperties(delivery_mode=2, content_type="application/json")
        while len(self.unconfirmed) < WINDOW_MESSAGES and (self.again or self.next < len(self.bodies)) and self.channel.is_open:
            if self.again:
                number = self.again.popleft()
                self.resent += 1
            else:
                number = self.next
                self.next += 1
            properties.headers = {"x-lrq-id": f"{PRODUCER}/{number + 1}"}
            self.unconfirmed.append(number)
            self.channel.basic_publish("", self.queue, self.bodies[number], properties)

    def _confirm(self, frame: Any) -> None:
        method = frame.method
        if isinstance(method, pika.spec.Basic.Nack):
            raise SystemExit("the broker refused a flight")
        if self.lost_at:
            self.failovers.append({"lost_at": self.lost_at, "confirmed_at": time.time()})
            self.lost_at = 0.0
        tags = range(self.first_tag, method.delivery_tag + 1) if method.multiple else (method.delivery_tag,)
        self.answered.update(tags)
        while self.unconfirmed and self.first_tag in self.answered:
            self.answered.discard(self.first_tag)
            self.unconfirmed.popleft()
            self.first_tag += 1
            self.confirmed += 1
            if self.confirmed % 2_000 == 0:
                self._save()
        if self.confirmed == len(self.bodies):
            self.channel.connection.ioloop.stop()
            return
        if len(self.unconfirmed) < WINDOW_MESSAGES // 2:
            self._fill()

    def _save(self, done: bool = False, seconds: float = 0.0) -> None:
        report = {"confirmed": self.confirmed, "failovers": self.failovers, "resent": self.resent, "done": done, "seconds": seconds}
        _write(self.report, report)


class ConsumerApp:
    """Consumes and acks until it is told their number and has seen that many different ones."""

    def __init__(self, nodes: list[str], queue: str, expected: int, report: Path) -> None:
        self.nodes, self.queue, self.expected, self.report = nodes, queue, expected, report
        self.seen: dict[int, float] = {}  # message number -> time of its first ack
        self.twice: list[tuple[int, float, bool]] = []  # number, time of its ack before, whether it is marked as redelivered
        self.order_breaks = 0
        self.idle_since = time.time()

    def run(self) -> None:
        """Runs until every flight was seen and the queue stays empty for a moment."""
        turn = 0
        while True:
            try:
                connection = pika.BlockingConnection(_parameters(self.nodes[turn % len(self.nodes)]))
                channel = connection.channel()
                channel.basic_qos(prefetch_count=PREFETCH)
                if self._consume(channel):
                    connection.close()
                    break
            # ValueError: pika's, of a node that dies just after it has taken a connection; AMQPConnectorException: of a stalled node.
            except (AMQPError, AMQPConnectorException, OSError, ValueError):
                turn += 1
                time.sleep(RETRY_S)
        numbers = array.array("Q", sorted(self.seen))
        self.report.with_suffix(".seen").write_bytes(numbers.tobytes())
        self._save(done=True)

    def _consume(self, channel: Any) -> bool:
        held: list[tuple[int, int]] = []
        tag = last = 0
        for method, properties, _body in channel.consume(self.queue, inactivity_timeout=0.5):
            now = time.time()
            if method is None:
                if held:
                    self._ack(channel, tag, held, now)
                if len(self.seen) >= self.expected and now - self.idle_since > 2.0:
                    return True
                continue
            self.idle_since = now
            number = int(properties.headers["x-lrq-id"].rpartition("/")[2])
            if not method.redelivered:
                self.order_breaks += number < last
                last = number
            tag = method.delivery_tag
            held.append((number, int(method.redelivered)))
            if len(held) >= ACK_EVERY:
                self._ack(channel, tag, held, now)
        return False

    def _ack(self, channel: Any, tag: int, held: list[tuple[int, int]], now: float) -> None:
        channel.basic_ack(tag, multiple=True)
        for number, redelivered in held:
            if number in self.seen:
                self.twice.append((number, self.seen[number], bool(redelivered)))
            else:
                self.seen[number] = now
        held.clear()
        if len(self.seen) % 2_000 < ACK_EVERY:
            self._save()

    def _save(self, done: bool = False) -> None:
        _write(self.report, {"consumed": len(self.seen), "twice": self.twice, "order_breaks": self.order_breaks, "done": done})


class LogPublisherApp:
    """Transmits the flights to another site with lrq_ha.publisher: a full snapshot of the small tables, then a transaction per hour.

    It keeps in step with the publisher, whose report is `publisher`: both take until the end of the demo.
    """

    def __init__(self, nodes: list[str], destination: str, flights: list[data.Row], report: Path, publisher: Path) -> None:
        self.nodes, self.destination, self.flights, self.report, self.publisher = nodes, destination, flights, report, publisher

    def run(self) -> None:
        """Runs until everything is confirmed."""
        from lrq_ha.publisher import Publisher

        began = time.time()
        snapshots: list[str] = []

        def provide(request: Any, context: Any) -> None:
            for name in ("airlines", "airports", "planes"):
                rows = data.table(name)
                for start in range(0, len(rows), 500):
                    context.transmit(data.payload(name, rows[start : start + 500]), progress=name)
            context.complete()
            snapshots.append(request.reason)
            _write(self.report, {"done": False, "snapshots": snapshots, "transactions": 0, "ids": []})

        ids = []
        with Publisher(self.nodes, producer="flights-log", client_name="flights", confirm_timeout_s=120) as publisher:
            publisher.on_full_sync(provide)
            while not snapshots:
                time.sleep(0.05)
            sent = 0
            for count, rows in enumerate(data.hours(self.flights)):
                sent += len(rows)
                while sent > read_report(self.publisher).get("confirmed", 0):
                    time.sleep(0.02)
                confirm = publisher.transmit_log_entry_message(data.payload("flights", rows), [self.destination])
                ids.append(confirm.replication_id)
                if count % 200 == 0:
                    _write(self.report, {"done": False, "snapshots": snapshots, "transactions": count, "ids": []})
            publisher.flush(240)
        seconds = time.time() - began
        _write(self.report, {"done": True, "snapshots": snapshots, "transactions": len(ids), "ids": ids, "seconds": seconds})


class TablesApp:
    """Keeps the tables at the other site in SQLite with lrq_ha.receiver, until it is ended."""

    def __init__(self, nodes: list[str], database: Path) -> None:
        self.nodes, self.database = nodes, database

    def run(self) -> None:
        """Runs until it is killed."""
        from lrq_ha.receiver import Receiver, Table, TableListener

        tables = [Table(name, columns, columns[:1]) for name, columns in TABLES.items()]
        with closing(sqlite3.connect(self.database)) as connection:
            for table in tables:
                key = f"PRIMARY KEY (source, {table.key[0]})"
                connection.execute(f"CREATE TABLE {table.name} (source, {', '.join(table.columns)}, {key}) WITHOUT ROWID")
        listener = TableListener(lambda: sqlite3.connect(self.database, timeout=60), tables)
        Receiver(self.nodes, "flights", "flights-db", listener).run()


def _parameters(url: str) -> pika.URLParameters:
    """A node that dies or stalls must be noticed within seconds."""
    parameters = pika.URLParameters(url)
    parameters.heartbeat = parameters.socket_timeout = parameters.stack_timeout = 5
    return parameters


def read_report(path: Path) -> dict[str, Any]:
    """What an application has reported so far; nothing if it has not yet."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(report))
    temporary.replace(path)


def main(arguments: list[str]) -> None:
    """`python -m lrq_ha.demo.apps KIND`, settings as JSON on stdin, as they hold passwords: one application."""
    kind, settings = arguments[0], json.load(sys.stdin)
    flights = data.load_flights(Path(settings["flights"]))
    report = Path(settings["report"])
    if kind == "publisher":
        PublisherApp(settings["nodes"], settings["queue"], flights, report).run()
    elif kind == "tables":
        TablesApp(settings["nodes"], Path(settings["database"])).run()
    elif kind == "consumer":
        ConsumerApp(settings["nodes"], settings["queue"], len(flights), report).run()
    else:
        LogPublisherApp(settings["nodes"], settings["destination"], flights, report, report.with_name("publisher.json")).run()


if __name__ == "__main__":
    main(sys.argv[1:])
