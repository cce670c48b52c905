"""Clients of other sites: one that has no full sync provider any more, and more of them than a group serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from load import eventually
from patience import PATIENT_DOOR
from test_sites import follows

from lrq_ha.demo.check import received
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, NackedError, Publisher
from lrq_ha.publisher.messages import client_status
from lrq_ha.routing.statuses import CLIENTS_MAX

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("clients") / "lab"
    found = Lab({"east": 1, "west": 1}, folder, sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    found.prepare()
    config = found.nodes["e1"].config
    config.write_text(config.read_text().replace("[[sites]]", "[[sites]]\nsnapshot_timeout_s = 3.0"))
    with found:
        yield found


@pytest.mark.quick
def test_a_site_whose_first_snapshot_nobody_supplies_any_more_begins_with_an_empty_one(lab: Lab) -> None:
    """It waited for a provider for ever, with deltas that no reader could make anything of."""
    name, door = "shipments", lab.nodes["e1"].door
    half, go = threading.Event(), threading.Event()

    def provide(_: FullSyncRequest, context: FullSyncContext) -> None:
        context.transmit(b"a row").result(120)
        half.set()
        go.wait(600)

    with Publisher([door], "first", name) as first:
        first.on_full_sync(provide)
        assert half.wait(120)
    go.set()
    found: list[pb.ReceivedTransaction] = []

    def begins() -> bool:
        found[:] = received(lab.nodes["w1"].admin, f"LRQ_Recv_{name}_east")[0]
        return any(each.type == pb.LAST_FULL_SYNC_ENTRY for each in found)

    with Publisher([door], "second", name) as second:  # it announces that it has none
        second.transmit_log_entry_message(b"a delta", ["west"]).result(120)
        eventually("an end marker", begins)
        follows(lab, name, "west")
        second.transmit_log_entry_message(b"another", ["west"]).result(120)
    eventually("the delta behind it", lambda: begins() and bool(found[-1].type == pb.LOG_ENTRY_SYNC))
    assert [payload for each in found for payload in each.payloads] == [b"a row", b"a delta", b"another"]
    [end] = [each for each in found if each.type == pb.LAST_FULL_SYNC_ENTRY]
    of_it = [each for each in found if each.request_id == end.request_id]
    assert [(each.type, list(each.payloads)) for each in of_it] == [(pb.SNAPSHOT_SYNC, []), (pb.LAST_FULL_SYNC_ENTRY, [])]


def test_a_provider_that_hangs_is_asked_again_also_where_deltas_flow(lab: Lab) -> None:
    """A delta always waited for the end of the other view, and was taken for a sink that is slow."""
    asked: list[str] = []
    go = threading.Event()

    def provide(request: FullSyncRequest, context: FullSyncContext) -> None:
        asked.append(request.request_id)
        if len(asked) == 1:
            go.wait(600)
            return
        context.transmit(b"a row").result(120)
        context.complete()

    def transmit(publisher: Publisher) -> None:
        while not go.wait(0.005):
            publisher.transmit_log_entry_message(b"a delta", ["west"])

    with Publisher([lab.nodes["e1"].door], "hangs", "parcels") as publisher:
        publisher.on_full_sync(provide)
        deltas = threading.Thread(target=transmit, args=(publisher,))
        deltas.start()
        try:
            eventually("the provider to be asked again", lambda: len(set(asked)) > 1)
            follows(lab, "parcels", "west")
        finally:
            go.set()
            deltas.join(120)


def test_the_first_thousand_are_served_and_the_next_is_told_also_after_a_restart(lab: Lab) -> None:
    """What it transmitted was confirmed, and sent nowhere; after a restart, or a failover, it was that of others."""
    lab.kill("w1")  # nobody is to send what so many have to say
    door = lab.nodes["e1"].door
    known = lab.status("e1")["clients"]
    with Publisher([door], "announcer", "client-0") as announcer:
        for confirm in [announcer._send_status(client_status(f"client-{number}", False)) for number in range(CLIENTS_MAX - known)]:
            confirm.result(120)
    for again in (False, True):
        if again:
            lab.kill("e1.sidecar")
            lab.start("e1.sidecar")
            lab.wait_role("e1", "active")
        for number in (0, CLIENTS_MAX - known - 1):
            with Publisher([door], f"known-{number}", f"client-{number}") as one:
                one.transmit_log_entry_message(b"x", ["west"]).result(120)
        with Publisher([door], "late-producer", "late") as late:
            confirm = late.transmit_log_entry_message(b"x", ["west"])
            with pytest.raises(NackedError, match="the log knows 1000 clients, and 'late' is none of them") as refused:
                confirm.result(120)
            assert refused.value.code == 406
            with pytest.raises(NackedError):
                late.flush(120)

        def served() -> bool:
            status = lab.status("e1")
            return bool(len(status["sessions"]["west"]["clients"]) == status["clients"] == status["clients_max"] == CLIENTS_MAX)

        eventually("all of them to have a session", served)
