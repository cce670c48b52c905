"""P4S: the sessions with other sites alone, as P4 without brokers: CPU time per entry and site from a view's messages to the batches that are sent.

Entries are of 100 B, 100 a transaction, each for all sites. The sites ack at once. The tenth site's cost is the slope between three and ten sites.
"""

from __future__ import annotations

import time

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import names
from lrq_ha.routing import view_readers as v
from lrq_ha.routing.route import Route
from lrq_ha.routing.session import Session
from lrq_ha.routing.shares import Packing, ViewEntry

from .measure import Figure, Row
from .sites import CLIENT, ENTRY_BYTES, GOAL_BYTES, GOAL_TENTH, PER_TRANSACTION

SITES = (1, 3, 10)
ROUNDS = 3
READ_MESSAGES = 8
TRANSACTIONS, SHORT_TRANSACTIONS = 1_000, 200


def p4s(transactions: int) -> Row:
    """The best of a few rounds counts: nothing is waited for."""
    runs = []
    for count in SITES:
        sites = [f"s{number}" for number in range(1, count + 1)]
        bodies = [_transaction(number, sites) for number in range(transactions)]
        us = min(_send(bodies, sites) for _ in range(ROUNDS)) * 1e6 / (transactions * PER_TRANSACTION)
        runs.append({"sites": count, "us": us, "bytes": sum(map(len, bodies)) / (transactions * PER_TRANSACTION * ENTRY_BYTES)})
    first, three, ten = (run["us"] for run in runs)
    figures = [Figure(f"site_us_{run['sites']}", run["us"] / run["sites"], digits=3) for run in runs]
    figures.append(Figure("tenth", (ten - three) / 7 / first, GOAL_TENTH))
    figures.append(Figure("bytes", max(run["bytes"] for run in runs), GOAL_BYTES, digits=3))
    return Row("P4S", figures, f"{transactions * PER_TRANSACTION:,} entries of {ENTRY_BYTES} B, {PER_TRANSACTION} a transaction", runs)


def _transaction(number: int, sites: list[str]) -> bytes:
    payload = f"{number:08d}".encode()
    entries = [(payload + row.to_bytes(ENTRY_BYTES - len(payload), "big"), sites) for row in range(PER_TRANSACTION)]
    return LogEntries.checked(entries).to_bytes(CLIENT, f"bench-app/{number}", 1_700_000_000_000_000)


def _send(bodies: list[bytes], sites: list[str]) -> float:
    """Seconds of CPU time from the messages of a view to all batches of the sites."""
    packing, readers = Packing(), v.ViewReaders[Session]()
    for site in sites:
        session = _session(site, packing)
        for effect in session.handle(m.SinkReport(Position(1, 1), "r", True)):
            if isinstance(effect, m.StartRead):
                readers.start(session, CLIENT, effect.reader, effect.from_sequence)
    sent, began = 0, time.process_time()
    for first in range(0, len(bodies), READ_MESSAGES):
        part = enumerate(bodies[first : first + READ_MESSAGES], first + 2)
        entries = tuple(ViewEntry(Position(1, sequence), pb.Transaction.FromString(body), len(body)) for sequence, body in part)
        for give in readers.take(m.Read(1, entries, entries[-1].position), 1):
            if isinstance(give, v.Give):
                for effect in give.session.handle(give.event):
                    if isinstance(effect, m.Send):
                        sent += len(effect.body)
                        give.session.handle(m.Acked(effect.last))
    used = time.process_time() - began
    assert sent > len(sites) * len(bodies) * PER_TRANSACTION * ENTRY_BYTES, "not all was sent"
    return used


def _session(site: str, packing: Packing) -> Session:
    session = Session(Route("east", CLIENT, site), Position(1, 1), 0.0, packing=packing)
    announced = pb.Status(key=names.client_key(CLIENT), client=pb.ClientStatus(client_name=CLIENT, full_sync_provider=True))
    session.handle(m.StatusEntry(Position(1, 1), announced))
    session.handle(m.Connected())
    return session
