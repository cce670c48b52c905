"""Two logs of one name are not taken for one (G6)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest
from load import eventually, primary_of, set_up, told
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

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


@pytest.mark.quick
def test_a_group_that_is_set_up_again_under_its_name_is_refused(lab: Lab) -> None:
    """Its epoch and positions are those of the former log: the sink would pass over its first entries."""
    former = told(lab, "e1")["log"]
    transmit(lab, "orders")
    eventually("the site in step", lambda: session_of(lab, "orders").get("state") == "in_log_entry_sync", 60)
    received = told(lab, "w1")["receiving"]["LRQ_Recv_orders_east"]
    assert received["log"] == former

    lab.kill("e1")
    shutil.rmtree(lab.directory / "e1" / "data")
    lab.start("e1")
    assert primary_of(lab) == "e1"
    now = told(lab, "e1")["log"]
    assert now != former
    transmit(lab, "orders")
    eventually("the refusal", lambda: session_of(lab, "orders").get("state") == "error", 60, seen=lambda: session_of(lab, "orders"))
    problem = session_of(lab, "orders")["problem"]
    assert former in problem, problem
    assert now in problem, problem
    assert "another name" in problem, problem
    assert {**told(lab, "w1")["receiving"]["LRQ_Recv_orders_east"], "age_s": received["age_s"]} == received, "nothing came in"
