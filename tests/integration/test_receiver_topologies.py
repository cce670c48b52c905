"""Receivers where groups send to each other: several sources at one sink, both ways, a chain, and a ring (G6)."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from load import eventually, set_up
from middle_site import SendsOn, start_application
from patience import PATIENT_DOOR
from stock_source import ITEMS, Source
from test_receiver import database, listener

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher
from lrq_ha.publisher.errors import NackedError
from lrq_ha.receiver import Listener, Receiver, SqlPositions, Update

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]

SITES = {"north": ["west"], "south": ["west"], "east": ["west"], "west": ["east", "north"]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """Three sources of west, and west is a source of east and north."""
    found = Lab(dict.fromkeys(SITES, 1), tmp_path_factory.mktemp("topologies") / "lab", broker_version, sites=SITES, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


def fresh(name: str) -> str:
    return f"{name}{time.time_ns() % 10**9}"


def rows(path: Path, source: str) -> dict[int, int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT item, count FROM stock WHERE source = ?", (source,)).fetchall())


@contextlib.contextmanager
def sources(lab: Lab, client: str, *groups: str, to: str = "west") -> Iterator[list[Source]]:
    found = [Source(lab, client, f"{group[0]}1", to) for group in groups]
    try:
        yield found
    finally:
        for each in found:
            each.publisher.close(60)


@pytest.mark.quick
def test_each_source_has_a_table_of_its_own(lab: Lab, tmp_path: Path) -> None:
    client, path = fresh("three"), database(tmp_path)
    groups = ("north", "south", "east")
    with sources(lab, client, *groups) as found, Receiver([lab.nodes["w1"].door], client, "three", listener(path)) as receiver:
        receiver.start()
        for number, each in enumerate(found):
            each.change_many(100 * number, 60)
            each.publisher.flush(60)
        for group, each in zip(groups, found, strict=True):
            assert receiver.wait_for(group, replication_id=each.last, timeout_s=60), receiver.status()
            assert rows(path, group) == each.stock


@pytest.mark.quick
def test_both_ways_nothing_comes_back(lab: Lab, tmp_path: Path) -> None:
    client = fresh("both")
    (tmp_path / "west").mkdir()
    (tmp_path / "east").mkdir()
    west, east = database(tmp_path / "west"), database(tmp_path / "east")
    with (
        sources(lab, client, "east") as [of_east],
        sources(lab, client, "west", to="east") as [of_west],
        Receiver([lab.nodes["w1"].door], client, "both", listener(west)) as at_west,
        Receiver([lab.nodes["e1"].door], client, "both", listener(east)) as at_east,
    ):
        at_west.start()
        at_east.start()
        of_east.change_many(0, 50)
        of_west.change_many(1000, 50)
        of_east.publisher.flush(60)
        of_west.publisher.flush(60)
        assert at_west.wait_for("east", replication_id=of_east.last, timeout_s=60), at_west.status()
        assert at_east.wait_for("west", replication_id=of_west.last, timeout_s=60), at_east.status()
        assert (rows(west, "east"), rows(east, "west")) == (of_east.stock, of_west.stock)
        assert (list(at_west.status()), list(at_east.status())) == (["east"], ["west"])


class SendsBack(Listener):
    """An application that transmits what it gets, wherever that has been."""

    def __init__(self, publisher: Publisher, *to: str) -> None:
        self._publisher = publisher
        self._to = to
        self.refused: list[str] = []

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        for update in updates:
            confirm = self._publisher.transmit_log_entry_message(update.opaque_payload, self._to, update.path)
            try:
                confirm.result(60)
            except NackedError as error:
                self.refused.append(str(error))
        return True


class Kept(Listener):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return self.process_updates_in_log_entry_sync(updates)

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        self.payloads += [update.opaque_payload for update in updates]
        return True


def test_a_chain_of_three_through_kills_in_the_middle(lab: Lab, tmp_path: Path) -> None:
    """The sidecar is killed once, the application six times, and each third list is refused: every delta is at the end, in order."""
    client, path = fresh("chain"), database(tmp_path)
    store, end = SqlPositions(lambda: sqlite3.connect(path, timeout=30)), Kept()
    west, east = lab.nodes["w1"].door, lab.nodes["e1"].door
    with (
        sources(lab, client, "north") as [source],
        Receiver([west], client, "look", Kept()) as at_west,
        Receiver([east], client, "end", listener(path)) as at_east,
        Receiver([east], client, "order", end, positions=store) as in_order,
    ):
        for receiver in (at_west, at_east, in_order):
            receiver.start()
        source.change(0, 0)
        assert at_west.wait_for("north", replication_id=source.last, timeout_s=60), "the snapshot of the source is over"
        application = start_application(west, client, "east")
        try:
            for turn in range(30):
                for number in range(turn * 10, turn * 10 + 10):
                    source.change(number % (ITEMS + 7), number)
                if turn == 12:
                    lab.kill("w1.sidecar")
                    lab.start("w1.sidecar")
                elif turn % 5 == 4:
                    application.kill()
                    application.wait(30)
                    application = start_application(west, client, "east")
                time.sleep(0.3)
            source.publisher.flush(60)
            eventually("the end of the chain to equal its beginning", lambda: rows(path, "west") == source.stock, 60, seen=at_east.status)
        finally:
            application.kill()
            application.wait(30)
        counts = [json.loads(payload)["rows"][0]["count"] for payload in end.payloads]
        assert list(dict.fromkeys(counts)) == list(range(300)), "no delta is missing, and none came before an earlier one"
        assert all(after - before <= 1 for before, after in pairwise(counts)), "what came again came with all behind it"


@pytest.mark.quick
def test_a_ring_ends_where_it_began_and_goes_on_to_other_sites(lab: Lab) -> None:
    client = fresh("ring")
    with (
        Publisher([lab.nodes["e1"].door], f"{client}-east", client) as east,
        Publisher([lab.nodes["w1"].door], f"{client}-west", client) as west,
        Receiver([lab.nodes["w1"].door], client, "back", back := SendsBack(west, "east")) as to_east,
        Receiver([lab.nodes["w1"].door], client, "on", SendsOn(west, "east", "north")) as to_both,
        Receiver([lab.nodes["n1"].door], client, "end", arrived := Kept()) as at_north,
    ):
        for receiver in (to_east, to_both, at_north):
            receiver.start()
        east.transmit_log_entry_message(b"x", ["west"])
        east.flush(60)
        eventually("the refusal", lambda: bool(back.refused), 60)
        assert "has had this transaction already, which has come by east > west" in back.refused[0]
        eventually("the payload at the other site", lambda: b"x" in arrived.payloads, 60, seen=at_north.status)
