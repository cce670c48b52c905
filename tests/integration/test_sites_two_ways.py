"""Two pairs that are each other's site: both ways at once, changes of primary in the middle of a snapshot, a source whose stream was trimmed.

Rule: the log and the views are small, so that RabbitMQ trims them within the test; what was sent before is no test's concern.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pika
import pytest
from load import depth, eventually, primary_of, set_up, take_over, told
from patience import PATIENT_DOOR
from test_sites import Source, arrived, deltas, follows, fresh

from lrq_ha.demo.check import received
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.publisher.messages import full_sync_status

pytestmark = pytest.mark.broker

LOG_BYTES_MAX = 8 << 20
NODES = {"east": ("e1", "e2"), "west": ("w1", "w2")}
ROWS = 40


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2, "west": 2}, tmp_path_factory.mktemp("two-ways") / "lab", door=PATIENT_DOOR)
    # Who is to take over is in the set, also after a pause.
    set_up(lab, f"log_bytes_max = {LOG_BYTES_MAX}\nbackup_timeout_s = 60.0")
    with lab:
        yield lab


def pair(lab: Lab, group: str) -> tuple[str, str]:
    """Primary and backup of a group, in sync."""
    found: list[str] = []

    def holds() -> bool:
        primary = lab.primary(group)
        if primary is None:
            return False
        found[:] = [primary, *(name for name in NODES[group] if name != primary)]
        return set(lab.status(primary)["members"]) == set(NODES[group]) and lab.status(found[1])["role"] == "ready"

    eventually(f"both nodes of {group} in the set", holds)
    return found[0], found[1]


def fail_over(lab: Lab, group: str) -> str:
    """The primary is killed and its backup promoted; returns the former."""
    primary, backup = pair(lab, group)
    lab.kill(primary)
    take_over(lab, backup, primary)
    return primary


class Gated(Source):
    """A source whose provider waits in the middle of a full sync until `go` is set; `half`: it has come so far."""

    def __init__(self, lab: Lab, client_name: str, group: str = "east") -> None:
        self.half, self.go = threading.Event(), threading.Event()
        super().__init__(lab, client_name, ROWS, group)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self.requests.append(request)
        for number in range(ROWS):
            if number == ROWS // 2:
                self.half.set()
                self.go.wait(600)
            context.transmit(b"%s row %d" % (self.client_name.encode(), number))
        context.complete()


def snapshot(found: list[pb.ReceivedTransaction]) -> tuple[list[bytes], list[bytes]]:
    """Rows of the last whole full sync in a receive queue, and the payloads of the log entries behind its end."""
    end = max(number for number, each in enumerate(found) if each.type == pb.LAST_FULL_SYNC_ENTRY)
    request = found[end].request_id
    rows = [p for each in found[:end] if each.type == pb.SNAPSHOT_SYNC and each.request_id == request for p in each.payloads if p]
    return rows, [payload for each in found[end:] if each.type == pb.LOG_ENTRY_SYNC for payload in each.payloads]


def test_both_ways_at_once(lab: Lab) -> None:
    """Clients of the same name on both sides, through a change of primary on both: each entry once, in order, and none comes back."""
    both = fresh("both")
    east, west = Source(lab, both, group="east"), Source(lab, both, group="west")
    follows(lab, both, "west", group="east")
    follows(lab, both, "east", group="west")
    for _ in range(100):
        east.send(1, "west")
        west.send(1, "east")
    killed = [fail_over(lab, group) for group in NODES]
    for _ in range(100):
        east.send(1, "west")
        west.send(1, "east")
    east.finish()
    west.finish()
    for name in killed:
        lab.start(name)
    for group, source in (("west", east), ("east", west)):
        pair(lab, group)
        for name in NODES[group]:
            arrived(lab, name, source)
    assert [len(source.requests) for source in (east, west)] == [1, 1], "no second full sync was needed"


@pytest.mark.parametrize("group", ["east", "west"])
def test_another_primary_in_the_middle_of_a_snapshot(lab: Lab, group: str) -> None:
    """Of the source (east) or of the sink (west): the snapshot is whole and in order, log entries that went on meanwhile are there once."""
    client_name = fresh(f"snapshot-{group}")
    source = Gated(lab, client_name)
    try:
        assert source.half.wait(240)
        queue = f"LRQ_Recv_{client_name}_east"
        before = primary_of(lab, "west")
        eventually("a part of it at the sink", lambda: len(received(lab.nodes[before].admin, queue)[0]) > 1)
        source.send(5, "west")
        killed = fail_over(lab, group)
        source.send(5, "west")
        source.go.set()
        follows(lab, client_name, "west")
        source.send(5, "west")
        source.finish()
        lab.start(killed)
        pair(lab, group)
        for name in NODES["west"]:
            last = source.sent[-1]
            eventually(f"the last at {name}", lambda name=name, last=last: deltas(lab, name, client_name)[-1:] == [last])
            found = received(lab.nodes[name].admin, queue)[0]
            rows, behind = snapshot(found)
            assert rows == [b"%s row %d" % (client_name.encode(), number) for number in range(ROWS)]
            assert behind == source.sent[-len(behind) :], "in order"
            assert len(behind) >= 5
            every = deltas(lab, name, client_name)
            assert len(set(every)) == len(every), "once"
    finally:
        source.go.set()


def test_a_full_sync_beside_a_full_queue(lab: Lab) -> None:
    """What waits for room in front of a queue of the new primary held it up."""
    primary, backup = pair(lab, "east")
    queue, arguments = f"limited-{time.time_ns()}", {"x-max-length": 5, "x-overflow": "reject-publish"}
    channel = pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)).channel()
    channel.confirm_delivery()
    channel.queue_declare(queue, durable=True, arguments=arguments)
    eventually("the queue at the backup", lambda: depth(lab.nodes[backup].broker, queue) == 0)
    for number in range(10):
        channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        if number == 4:
            assert all(channel.basic_get(queue)[0] for _ in range(5))
    eventually("the backup to say so", lambda: f"'{queue}' in vhost '/' is full here" in lab.status(backup)["reason"])
    killed = fail_over(lab, "east")
    source = Source(lab, name := fresh("beside"))
    follows(lab, name, "west")
    assert "is full here" in told(lab, backup)["reason"]
    source.finish()
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[backup].door)) as connection:
        connection.channel().queue_delete(queue)
    lab.start(killed)
    pair(lab, "east")


def test_a_publisher_that_restarts_in_the_middle_of_a_full_sync(lab: Lab) -> None:
    """What the former process had sent of it was in the snapshot, too."""
    former = Gated(lab, name := fresh("restarts"))
    try:
        assert former.half.wait(240)
        primary, queue = primary_of(lab, "west"), f"LRQ_Recv_{name}_east"
        eventually("a part of it at the sink", lambda: len(received(lab.nodes[primary].admin, queue)[0]) > ROWS // 2)
        former.finish()
    finally:
        former.go.set()
    source = Source(lab, name, ROWS)
    follows(lab, name, "west")
    source.send(1, "west")
    source.finish()
    arrived(lab, primary, source)
    rows, behind = snapshot(received(lab.nodes[primary].admin, queue)[0])
    assert rows == [b"%s row %d" % (name.encode(), number) for number in range(ROWS)]
    assert behind == source.sent
    assert former.requests[0].request_id != source.requests[-1].request_id


def test_a_publisher_that_restarts_while_its_site_is_away(lab: Lab) -> None:
    """It served what the former process had begun, and a new primary of the source, which had not heard of both, took the rows of both."""
    pair(lab, "west")
    former = Gated(lab, client_name := fresh("returns"))
    try:
        assert former.half.wait(240)
        primary, queue = primary_of(lab, "west"), f"LRQ_Recv_{client_name}_east"
        eventually("a part of it at the sink", lambda: len(received(lab.nodes[primary].admin, queue)[0]) > ROWS // 2)
        for name in NODES["west"]:
            lab.kill(f"{name}.sidecar")
        former.finish()
    finally:
        former.go.set()
    source = Source(lab, client_name, ROWS)
    time.sleep(5)  # so that what it has read of, it serves
    killed = fail_over(lab, "east")
    for name in (f"{name}.sidecar" for name in NODES["west"]):
        lab.start(name)
    follows(lab, client_name, "west")
    source.send(1, "west")
    source.finish()
    lab.start(killed)
    pair(lab, "east")
    pair(lab, "west")
    arrived(lab, primary, source)
    rows, behind = snapshot(received(lab.nodes[primary].admin, queue)[0])
    assert rows == [b"%s row %d" % (client_name.encode(), number) for number in range(ROWS)]
    assert behind == source.sent


def test_a_full_sync_that_was_answered_while_its_site_was_away(lab: Lab) -> None:
    """A new primary of the source knew how it had ended, and not where it was asked for: it left out all of it."""
    pair(lab, "west")
    client, answered = f"answered-{time.time_ns()}", threading.Event()

    class Answering(Source):
        def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
            super()._provide(request, context)
            if request.request_id == "wanted":
                answered.set()

    source = Answering(lab, client, ROWS)
    follows(lab, client, "west")
    source.send(1, "west")
    arrived(lab, primary_of(lab, "west"), source)
    for name in NODES["west"]:
        lab.kill(f"{name}.sidecar")
    asked = full_sync_status(client, "west", "wanted", "the client itself wants it", pb.FullSyncRequest.REQUESTED)
    source.publisher._send_status(asked).result(240)
    assert answered.wait(240)
    source.publisher.flush(240)
    killed = fail_over(lab, "east")
    for name in NODES["west"]:
        lab.start(f"{name}.sidecar")
    pair(lab, "west")
    source.send(1, "west")
    source.finish()
    primary = primary_of(lab, "west")
    arrived(lab, primary, source)
    found = received(lab.nodes[primary].admin, f"LRQ_Recv_{client}_east")[0]
    assert [each.request_id for each in found if each.type == pb.LAST_FULL_SYNC_ENTRY][-1] == "wanted"
    rows, behind = snapshot(found)
    assert rows == [b"%s row %d" % (client.encode(), number) for number in range(ROWS)]
    assert behind == source.sent[-1:]
    assert len(source.requests) == 2, "nobody was asked again"
    lab.start(killed)
    pair(lab, "east")


def test_without_a_provider_an_empty_snapshot_comes_first(lab: Lab) -> None:
    doors = [lab.nodes[name].door for name in NODES["east"]]
    client_name, payloads = fresh("plain"), [b"plain %d" % number for number in range(5)]
    with Publisher(doors, f"plain-{time.time_ns()}", client_name, confirm_timeout_s=60) as publisher:
        for payload in payloads:
            publisher.transmit_log_entry_message(payload, ["west"]).result(240)
    for name in NODES["west"]:
        eventually(f"all at {name}", lambda name=name: deltas(lab, name, client_name) == payloads)
        found = received(lab.nodes[name].admin, f"LRQ_Recv_{client_name}_east")[0]
        kinds = [each.type for each in found]
        assert kinds == [pb.LAST_FULL_SYNC_ENTRY, *[pb.LOG_ENTRY_SYNC] * len(payloads)]
        assert not any(found[0].payloads)


def test_a_source_that_was_trimmed_meanwhile(lab: Lab) -> None:
    """The sink is away while RabbitMQ drops what it lacks from the source's view: a full sync, and log entries behind it. Never a silent gap."""
    source = Source(lab, client_name := fresh("trimmed"))
    follows(lab, client_name, "west")
    source.send(3, "west")
    for name in NODES["west"]:
        arrived(lab, name, source)
    pair(lab, "west")
    for name in NODES["west"]:
        lab.kill(f"{name}.sidecar")
    payload = b"x" * 40_000
    for _ in range(3 * LOG_BYTES_MAX // len(payload)):
        source.confirms.append(source.publisher.transmit_log_entry_message(payload, ["west"]))
    for confirm in source.confirms:
        confirm.result(240)
    for name in NODES["west"]:
        lab.start(f"{name}.sidecar")
    eventually("another full sync", lambda: len(source.requests) == 2)
    follows(lab, client_name, "west")
    source.send(5, "west")
    source.finish()
    for name in NODES["west"]:
        eventually(f"the last at {name}", lambda name=name: deltas(lab, name, client_name)[-1:] == source.sent[-1:])
        rows, behind = snapshot(received(lab.nodes[name].admin, f"LRQ_Recv_{client_name}_east")[0])
        assert rows == [b"%s row %d" % (client_name.encode(), number) for number in range(20)]
        assert behind == source.sent[-5:]


def test_a_client_that_was_quiet_while_others_sent_much(lab: Lab) -> None:
    """What it had sent last is long dropped from the view when the link comes back. Nothing of it is missing, so no full sync is needed."""
    quiet, noisy = Source(lab, fresh("quiet")), Source(lab, fresh("noisy"))
    for source in (quiet, noisy):
        follows(lab, source.client_name, "west")
    quiet.send(1, "west")
    for name in pair(lab, "west"):
        arrived(lab, name, quiet)
    payload = b"x" * 40_000
    for _ in range(3 * LOG_BYTES_MAX // len(payload)):
        noisy.confirms.append(noisy.publisher.transmit_log_entry_message(payload, ["west"]))
    noisy.send(1, "west")
    noisy.finish()
    primary = primary_of(lab, "west")
    eventually("the last at the site", lambda: deltas(lab, primary, noisy.client_name)[-1:] == noisy.sent[-1:])
    time.sleep(1)  # a look at the view's end
    for name in NODES["west"]:
        lab.kill(f"{name}.sidecar")
    for name in NODES["west"]:
        lab.start(f"{name}.sidecar")
    follows(lab, quiet.client_name, "west")
    quiet.send(1, "west")
    quiet.finish()
    for name in pair(lab, "west"):
        arrived(lab, name, quiet)
    assert [request.destination for request in quiet.requests] == ["west"], "no second full sync was needed"
