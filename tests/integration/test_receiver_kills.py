"""The kill matrix of a receiver that keeps its position with its data: in each state, each of the processes between source and tables is killed (G6).

A receiver stands still in the middle of a list's transaction, in the state that the test names; then the test kills. At the end no list was applied
twice, none is missing, and the tables equal those of the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgresql
import pytest
from kill_gate import Gate, Recording, changing, kill, run_through
from load import command, eventually, primary_of, set_up, told
from mending import is_whole
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest
from lrq_ha.routing.names import recv_queue

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]

STATES = ("waiting", "bootstrap", "local-replay", "normal")
VICTIMS = ("receiver", "sink", "source", "both primaries", "all three")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """A pair at each side."""
    groups = {"east": 2, "west": 2}
    found = Lab(groups, tmp_path_factory.mktemp("kills") / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", STATES)
def test_a_kill_in_each_state(lab: Lab, state: str, victim: str, tmp_path: Path) -> None:
    run_through(lab, tmp_path, state, victim)


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    if reason := postgresql.why_not():
        pytest.skip(reason)
    with postgresql.server() as found:
        yield found


@pytest.mark.parametrize("state", STATES)
def test_a_receiver_with_postgresql_is_killed_in_each_state(lab: Lab, server: postgresql.Server, state: str, tmp_path: Path) -> None:
    run_through(lab, tmp_path, state, "receiver", server.create_database())


class Waiting(Recording):
    """Its full syncs wait in the middle while `go_on` is not set."""

    def __init__(self, lab: Lab, client_name: str) -> None:
        self.go_on, self.waits = threading.Event(), threading.Event()
        self.go_on.set()
        super().__init__(lab, client_name)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        context.transmit(b'{"table": "stock", "rows": []}')
        self.waits.set()
        self.go_on.wait(120)
        super()._provide(request, context)


@pytest.mark.parametrize("at", ["sink", "source"])
def test_a_demanded_full_sync_outlives_both_primaries_while_deltas_flow(lab: Lab, at: str, tmp_path: Path) -> None:
    """The primary that took the demand is killed at once, and the other side's primary in the middle of the snapshot."""
    source = Waiting(lab, f"demanded{time.time_ns() % 10**9}")
    queue, killed = recv_queue(source.client_name, "east"), list[str]()
    gate = Gate(lab, source.client_name, tmp_path, "no state")

    def receiving() -> dict[str, Any]:
        return dict(told(lab, primary_of(lab, "west"))["receiving"].get(queue, {}))

    def is_whole_again() -> bool:
        found = receiving()
        return bool(found) and found["demand"] is None and found["snapshot"]["complete"] and found["snapshot"]["whole"] != before

    try:
        source.change_many(0, 20)
        eventually("a whole snapshot", lambda: bool(receiving()) and receiving()["snapshot"]["complete"], seen=receiving)
        before = receiving()["snapshot"]["whole"]
        source.go_on.clear()
        source.waits.clear()
        with changing(source):
            ways = {"sink": ("--group", "west", "--from", "east"), "source": ("--group", "east", "--to", "west")}
            code, said = command("resync", source.client_name, *ways[at], lab=lab)
            assert code == 0, said
            killed += kill(lab, gate, at)
            assert source.waits.wait(120), "the source is asked"
            killed += kill(lab, gate, "source" if at == "sink" else "sink")
            source.go_on.set()
            eventually("another whole snapshot", is_whole_again, seen=receiving)
        source.publisher.flush(120)
        gate.check_tables(source)
    finally:
        source.go_on.set()
        gate.kill()
        source.publisher.close(60)
        for node in killed:
            lab.start(node)
    eventually("the lab to be whole", lambda: is_whole(lab))
