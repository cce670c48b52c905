"""More clients of other sites than a group serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from load import eventually
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab
from lrq_ha.publisher import NackedError, Publisher
from lrq_ha.publisher.messages import client_status
from lrq_ha.routing.statuses import CLIENTS_MAX

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("clients") / "lab"
    with Lab({"east": 1, "west": 1}, folder, sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR) as found:
        found.kill("w1")  # nobody is to send what so many have to say
        yield found


def test_the_first_thousand_are_served_and_the_next_is_told_also_after_a_restart(lab: Lab) -> None:
    """What it transmitted was confirmed, and sent nowhere; after a restart, or a failover, it was that of others."""
    door = lab.nodes["e1"].door
    with Publisher([door], "announcer", "client-0") as announcer:
        for confirm in [announcer._send_status(client_status(f"client-{number}", False)) for number in range(CLIENTS_MAX)]:
            confirm.result(120)
    for again in (False, True):
        if again:
            lab.kill("e1.sidecar")
            lab.start("e1.sidecar")
            lab.wait_role("e1", "active")
        for number in (0, CLIENTS_MAX - 1):
            with Publisher([door], f"known-{number}", f"client-{number}") as known:
                known.transmit_log_entry_message(b"x", ["west"]).result(120)
        with Publisher([door], "late-producer", "late") as late:
            confirm = late.transmit_log_entry_message(b"x", ["west"])
            with pytest.raises(NackedError, match="the log knows 1000 clients, and 'late' is none of them") as refused:
                confirm.result(120)
            assert refused.value.code == 406
            with pytest.raises(NackedError):
                late.flush(120)

        def served() -> bool:
            status = lab.status("e1")
            return len(status["sessions"]["west"]["clients"]) == status["clients"] == status["clients_max"] == CLIENTS_MAX

        eventually("all of them to have a session", served)
