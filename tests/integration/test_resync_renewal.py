"""A node of a sink that joined by a renewal, and is promoted, has receive queues without their snapshots: it demands full syncs (G6).

A test takes a minute or more: the log of the group has to lose its beginning.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import eventually, in_sync, renew, set_up, take_over, told
from patience import PATIENT_DOOR
from renewals import SMALL_LOG, discard, fall_off
from test_receiver import TABLE, Source, database

from lrq_ha.lab import Lab
from lrq_ha.receiver import Receiver, TableListener
from lrq_ha.routing.names import recv_queue

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6", "renewal")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """East is a pair, the sink of west."""
    groups = {"east": 2, "west": 1}
    found = Lab(groups, tmp_path_factory.mktemp("renewed") / "lab", broker_version, sites={"west": ["east"], "east": []}, door=PATIENT_DOOR)
    set_up(found, f"{SMALL_LOG}backup_timeout_s = 10.0")
    with found:
        yield found


def test_a_renewed_node_that_is_promoted_gets_a_whole_snapshot(lab: Lab, tmp_path: Path) -> None:
    primary, backup = in_sync(lab, applied=True)
    source = Source(lab, f"renewed{time.time_ns() % 10**9}", "w1", "east")
    queue = recv_queue(source.client_name, "west")
    source.change_many(0, 20)
    source.publisher.flush(60)
    eventually("a whole snapshot", lambda: told(lab, primary)["receiving"][queue]["snapshot"]["complete"], 60)
    fall_off(lab, primary, backup)
    discard(lab, backup)
    renew(lab)
    assert in_sync(lab, applied=True) == (primary, backup)
    source.change_many(20, 5)
    source.publisher.flush(60)
    before = told(lab, primary)["receiving"][queue]["snapshot"]["whole"]
    lab.kill(primary)
    take_over(lab, backup, primary)
    eventually("another whole snapshot", lambda: told(lab, backup)["receiving"][queue]["snapshot"]["whole"] not in (None, before), 60)
    path = database(tmp_path)
    listener = TableListener(lambda: sqlite3.connect(path, timeout=30), [TABLE])
    with Receiver([lab.nodes[backup].door], source.client_name, "renewed", listener) as receiver:
        receiver.start()
        source.change(1, 5)
        source.publisher.flush(60)
        assert receiver.wait_for("west", replication_id=source.last, timeout_s=60), receiver.status()
        with sqlite3.connect(path) as connection:
            assert dict(connection.execute("SELECT item, count FROM stock WHERE source = 'west'").fetchall()) == source.stock
    source.publisher.close(60)
    lab.start(primary)
