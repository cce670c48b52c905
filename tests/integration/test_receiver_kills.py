"""The kill matrix of a receiver that keeps its position with its data: in each state, each of the processes between source and tables is killed (G6).

A receiver stands still in the middle of a list's transaction, in the state that the test names; then the test kills. At the end no list was applied
twice, none is missing, and the tables equal those of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import postgresql
import pytest
from kill_gate import run_through
from load import set_up
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab

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
