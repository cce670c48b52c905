"""A group of four, on real brokers: three backups, one of which joins, and one takes over. All else: test_three_nodes.py, tests/simulation."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from history import span
from load import command, declare, eventually
from test_faults import SETTLE_S
from test_stalls import RATE
from test_three_nodes import PATIENT_S, all_in_sync, equal, promoted
from traffic import Load

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 4}, tmp_path_factory.mktemp("four") / "lab", broker_version)
    found.prepare()
    for node in found.nodes.values():
        node.config.write_text(node.config.read_text() + f"backup_timeout_s = {PATIENT_S}\n")
    with found:
        yield found


def test_one_joins_and_the_primary_is_lost(lab: Lab) -> None:
    """Under load: a node that was made empty joins, then one of the three backups takes over, and who was killed follows."""
    primary, *backups = all_in_sync(lab)
    queue = f"four-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    time.sleep(SETTLE_S)
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        code, said = command("reinit", backups[0], "--discard", lab=lab)
        assert code == 0, said
        eventually("it to begin anew", lambda: "rebuilt by the operator" in lab.nodes[backups[0]].log.read_text())
        assert all_in_sync(lab)[0] == primary
        killed_at = time.time()
        lab.kill(primary)
        new = promoted(lab, backups, [primary])
        eventually("the other two to follow", lambda: lab.status(new)["members"] == sorted(backups))
        confirmed = load.confirmed
        eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)
        outage = span(killed_at, time.time())
        lab.start(primary)
        assert all_in_sync(lab)[0] == new
        load.finish()
    finally:
        load.stop()
    load.check([outage])
    equal(lab, queue)
