"""Two logs of one name are not taken for one (G6)."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from load import eventually, primary_of, set_up, told
from patience import PATIENT_DOOR
from stock_source import TABLE, Source, doors

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher
from lrq_ha.receiver import OtherLog, Receiver, TableListener

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    found = Lab({"east": 1, "west": 1}, tmp_path_factory.mktemp("identity") / "lab", broker_version, sites={"east": ["west"]}, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


def transmit(lab: Lab, client: str) -> None:
    with Publisher([lab.nodes["e1"].door], f"{client}-{time.time_ns()}", client) as publisher:
        publisher.transmit_log_entry_message(b"x", ["west"])
        publisher.flush(60)


def session_of(lab: Lab, client: str) -> dict[str, str]:
    return dict(told(lab, "e1")["sessions"]["west"]["clients"].get(client, {}))


def set_up_again(lab: Lab, *names: str) -> None:
    """New brokers under the old names, with nothing in them."""
    for name in names:
        lab.kill(name)
        shutil.rmtree(lab.directory / name / "data")
    for name in names:
        lab.start(name)
        assert primary_of(lab, lab.nodes[name].group) == name


@pytest.mark.quick
def test_a_group_that_is_set_up_again_under_its_name_is_refused(lab: Lab) -> None:
    """Its epoch and positions are those of the former log: the sink would pass over its first entries."""
    former = told(lab, "e1")["log"]
    transmit(lab, "orders")
    eventually("the site in step", lambda: session_of(lab, "orders").get("state") == "in_log_entry_sync", 60)
    received = told(lab, "w1")["receiving"]["LRQ_Recv_orders_east"]
    assert received["log"] == former

    set_up_again(lab, "e1")
    now = told(lab, "e1")["log"]
    assert now != former
    transmit(lab, "orders")
    eventually("the refusal", lambda: session_of(lab, "orders").get("state") == "error", 60, seen=lambda: session_of(lab, "orders"))
    problem = session_of(lab, "orders")["problem"]
    assert former in problem, problem
    assert now in problem, problem
    assert "another name" in problem, problem
    assert {**told(lab, "w1")["receiving"]["LRQ_Recv_orders_east"], "age_s": received["age_s"]} == received, "nothing came in"


def test_a_table_of_a_former_log_does_not_follow_another_one(lab: Lab, tmp_path: Path) -> None:
    """Both groups are set up again, and the application's database stays: its position is greater than any of the new log."""
    path, client = tmp_path / "stock.db", f"again{time.time_ns() % 10**9}"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE stock (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))")

    def receiver() -> Receiver:
        return Receiver(doors(lab), client, "stock-db", TableListener(lambda: sqlite3.connect(path, timeout=30), [TABLE]))

    def follow(changes: int) -> None:
        source = Source(lab, client)
        with closing(source.publisher), receiver() as following:
            following.start()
            source.change_many(0, changes)
            assert following.wait_for("east", replication_id=source.last, timeout_s=60.0), following.status()
        with closing(sqlite3.connect(path)) as connection:
            assert dict(connection.execute("SELECT item, count FROM stock WHERE source = 'east'")) == source.stock

    set_up_again(lab, "e1", "w1")
    follow(200)
    set_up_again(lab, "e1", "w1")
    source = Source(lab, client)
    with closing(source.publisher):
        source.change_many(0, 20)
        source.publisher.flush(60)
        with receiver() as stopped, pytest.raises(OtherLog, match="call its method forget"):
            stopped.run()
    assert receiver().forget("east")
    follow(20)
