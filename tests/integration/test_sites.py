"""Log entries from site to site while sidecars die and the source's primary changes: each once, in order, at every destination (G6).

What stands at a destination is read as every reader reads it: a transaction whose position is not beyond the last is a repeat.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import pika
import pytest
from load import eventually, in_sync, primary_of, set_up, take_over
from patience import PATIENT_DOOR

from lrq_ha.demo.check import read_stream, received, with_vhost
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Confirm, FullSyncContext, FullSyncRequest, NackedError, Publisher, messages

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pair as the source, and two destinations."""
    groups = {"east": 2, "west": 1, "north": 1}
    sites = {"east": ["west", "north"], "west": [], "north": []}
    found = Lab(groups, tmp_path_factory.mktemp("sites") / "lab", sites=sites, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")  # who is to take over is in the set, also after a pause
    with found:
        yield found


def fresh(client_name: str) -> str:
    """One that no try of a test has used before: what came for it then is still there."""
    return f"{client_name}-{time.time_ns() % 10**10}"


class Source:
    """A publisher whose full syncs send `rows`; what it transmits is numbered."""

    def __init__(self, lab: Lab, client_name: str, rows: int = 20, group: str = "east") -> None:
        self.client_name, self.group = client_name, group
        self.requests: list[FullSyncRequest] = []
        self.sent: list[bytes] = []
        self.confirms: list[Confirm] = []
        self._rows = rows
        doors = [node.door for node in lab.nodes.values() if node.group == group]
        self.publisher = Publisher(doors, f"{client_name}-{time.time_ns()}", client_name, confirm_timeout_s=60)
        self.publisher.on_full_sync(self._provide)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self.requests.append(request)
        for number in range(self._rows):
            context.transmit(b"%s row %d" % (self.client_name.encode(), number))
        context.complete()

    def send(self, count: int, *destinations: str) -> None:
        for _ in range(count):
            payload = b"%s %d" % (self.client_name.encode(), len(self.sent))
            self.sent.append(payload)
            self.confirms.append(self.publisher.transmit_log_entry_message(payload, list(destinations)))

    def finish(self) -> None:
        for confirm in self.confirms:
            confirm.result(240)
        self.publisher.close(240)


def deltas(lab: Lab, node: str, client_name: str, group: str = "east") -> list[bytes]:
    """Payloads of the log entries at a destination, in order; raises if the queue is not there."""
    found, _ = received(lab.nodes[node].admin, f"LRQ_Recv_{client_name}_{group}")
    return [payload for transaction in found if transaction.type == pb.LOG_ENTRY_SYNC for payload in transaction.payloads]


def state(lab: Lab, site: str, client_name: str, group: str = "east") -> str:
    """State of the session at the source."""
    primary = lab.primary(group)
    found = lab.status(primary or "")["sessions"][site]["clients"]
    return str(found.get(client_name, {}).get("state"))


def follows(lab: Lab, client_name: str, *sites: str, group: str = "east") -> None:
    """Waits until the snapshots are over: what is transmitted from now on goes as log entries."""
    for site in sites:
        eventually(f"{client_name} to follow to {site}", lambda site=site: state(lab, site, client_name, group) == "in_log_entry_sync")


def arrived(lab: Lab, node: str, source: Source) -> None:
    """Every log entry is there, once and in order."""
    found: list[bytes] = []

    def last_is_there() -> bool:
        found[:] = deltas(lab, node, source.client_name, source.group)
        return found[-1:] == source.sent[-1:]

    eventually(f"all of {source.client_name} at {node}", last_is_there)
    assert found == source.sent


class Tail:
    """What comes to a receive queue, as it comes: payloads of log entries, repeats skipped."""

    def __init__(self, lab: Lab, node: str, client_name: str) -> None:
        self.payloads: set[bytes] = set()
        self._stop = threading.Event()
        self._url, self._queue = with_vhost(lab.nodes[node].admin, "lrq"), f"LRQ_Recv_{client_name}_east"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=100)
            for method, _, body in channel.consume(self._queue, inactivity_timeout=0.1, arguments={"x-stream-offset": "first"}):
                if self._stop.is_set():
                    break
                if method is not None:
                    self.payloads.update(payload for each in pb.ReceivedBatch.FromString(body).transactions for payload in each.payloads)
                    channel.basic_ack(method.delivery_tag)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(120)


@pytest.mark.quick
def test_a_full_sync_comes_first_whole_and_marked(lab: Lab) -> None:
    source = Source(lab, name := fresh("full"), rows=50)
    follows(lab, name, "west")
    source.send(5, "west")
    source.finish()
    arrived(lab, "w1", source)
    found, repeats = received(lab.nodes["w1"].admin, f"LRQ_Recv_{name}_east")
    assert repeats == 0
    request = next(r for r in source.requests if r.destination == "west")
    assert request.request_id
    snapshot, end = found[:-6], found[-6]
    assert {each.type for each in snapshot} == {pb.SNAPSHOT_SYNC}
    assert [payload for each in snapshot for payload in each.payloads if payload] == [b"%s row %d" % (name.encode(), number) for number in range(50)]
    assert end.type == pb.LAST_FULL_SYNC_ENTRY
    assert {each.request_id for each in (*snapshot, end)} == {request.request_id}
    assert {each.type for each in found[-5:]} == {pb.LOG_ENTRY_SYNC}


@pytest.mark.quick
def test_an_unknown_destination_is_refused_with_the_known_ones(lab: Lab) -> None:
    source = Source(lab, name := fresh("lost"))
    wrong = source.publisher.transmit_log_entry_message(b"x", ["south"])
    mixed = source.publisher.transmit_log_entry_messages([(b"x", ["west"]), (b"y", ["south"])])
    for confirm in (wrong, mixed):
        with pytest.raises(NackedError, match="destination 'south' is not known to group 'east'; known: north, west"):
            confirm.result(120)
    follows(lab, name, "west")
    source.send(3, "west")  # what was refused holds nothing up, and nothing of it arrives
    source.finish()
    arrived(lab, "w1", source)


def test_what_a_site_could_not_take_is_refused_at_the_source(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that many entries name stands in a transaction once, and at the site as often: its broker refused that, at each start anew."""
    monkeypatch.setattr(messages, "checked_shares", lambda _: None)  # other clients may not look
    source = Source(lab, name := fresh("often"))
    follows(lab, name, "west")
    payload = name.encode() + bytes(1 << 20)
    for entries, wrong in (([(payload, ["west"])] * 20, "share for one destination"), ([(b"", ["west", "north"])] * 10_001, "of 20000 at most")):
        with pytest.raises(NackedError, match=wrong):
            source.publisher.transmit_log_entry_messages(entries).result(120)
    source.sent += [payload] * 15
    source.confirms.append(source.publisher.transmit_log_entry_messages([(payload, ["west"])] * 15))
    source.finish()
    arrived(lab, "w1", source)


def test_a_batch_that_no_view_takes_does_not_get_into_the_log_of_a_sink(lab: Lab) -> None:
    """From a source whose log has one: it ended the sink's sidecar, at each start anew."""
    transaction = pb.ReceivedTransaction(position=pb.Position(epoch=257, sequence=9), type=pb.LAST_FULL_SYNC_ENTRY, payloads=[bytes(17 << 20)])
    batch = pb.ReceivedBatch(source="south", client_name="orders", transactions=[transaction])
    west = lab.nodes["w1"]
    broker, door = urlsplit(west.admin), urlsplit(west.door)
    url = urlunsplit(door._replace(netloc=f"{broker.username}:{broker.password}@{door.hostname}:{door.port}", path="/lrq"))
    parameters = pika.URLParameters(url)
    parameters.client_properties = {"lrq_site": "south"}
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="is too large for LRQ_Recv_orders_south"):
            channel.basic_publish("", "LRQ_Recv_orders_south", batch.SerializeToString())
    assert lab.status("w1")["role"] == "active"


@pytest.mark.quick
def test_two_clients_do_not_mix_and_two_destinations_share_a_payload(lab: Lab) -> None:
    first, second = Source(lab, fresh("one")), Source(lab, fresh("two"))
    for source in (first, second):
        follows(lab, source.client_name, "west", "north")
    marker = b"only once %s " % first.client_name.encode() + b"#" * 4000
    for number in range(50):
        first.send(2, "west", "north")
        second.send(1, "west", "north")
        if number == 25:
            first.sent.append(marker)
            first.confirms.append(first.publisher.transmit_log_entry_message(marker, ["west", "north"]))
    first.finish()
    second.finish()
    for node in ("w1", "n1"):
        arrived(lab, node, first)
        arrived(lab, node, second)
    for name in ("e1", "e2"):
        for queue in ("LRQ_HA_east", "LRQ_Send_LogEntries"):
            assert b"".join(body for _, body in read_stream(lab.nodes[name].admin, queue)).count(marker) == 1


def test_each_entry_once_and_in_order_through_kills_and_a_promotion(lab: Lab) -> None:
    """While entries flow: the sink's sidecar is killed, then the source's, then the source's primary for good."""
    source = Source(lab, name := fresh("kills"))
    follows(lab, name, "west")
    stop = threading.Event()
    failed: list[BaseException] = []

    def flow() -> None:
        try:
            while not stop.is_set():
                source.send(1, "west")
                time.sleep(0.005)
        except BaseException as error:
            failed.append(error)

    def goes_on() -> None:
        """A transaction that was begun now is confirmed, and one is at the destination."""
        mark = len(source.sent)
        eventually("confirms to go on", lambda: len(source.confirms) > mark and source.confirms[mark].done)
        payload = source.sent[mark]
        eventually("entries to arrive", lambda: payload in tail.payloads)

    tail = Tail(lab, "w1", name)
    thread = threading.Thread(target=flow)
    thread.start()
    try:
        goes_on()
        lab.kill("w1.sidecar")
        time.sleep(0.5)
        lab.start("w1.sidecar")
        lab.wait_role("w1", "active")
        goes_on()
        primary = primary_of(lab)
        lab.kill(f"{primary}.sidecar")
        lab.start(f"{primary}.sidecar")
        goes_on()
        primary, backup = in_sync(lab)
        lab.kill(primary)
        take_over(lab, backup, primary)
        goes_on()
        lab.start(primary)
        lab.wait_role(primary, "ready")
    finally:
        stop.set()
        thread.join()
        tail.close()
    assert failed == []
    source.finish()
    arrived(lab, "w1", source)
    assert len({request.request_id for request in source.requests if request.destination == "west"}) == 1, "no second full sync was needed"


def test_a_sink_that_was_away_catches_up(lab: Lab) -> None:
    source = Source(lab, name := fresh("away"))
    follows(lab, name, "west", "north")
    source.send(1, "west", "north")
    lab.kill("n1.sidecar")
    source.send(300, "west", "north")
    arrived_at_west = source.sent[-1]
    eventually("the other site not to wait", lambda: arrived_at_west in deltas(lab, "w1", name))
    lab.start("n1.sidecar")
    source.finish()
    arrived(lab, "n1", source)
    arrived(lab, "w1", source)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        deltas(lab, "w1", "nobody")


def test_a_sidecar_that_starts_names_none_of_its_receive_queues_or_all(lab: Lab) -> None:
    """It said that there were none until it had read its log."""
    source = Source(lab, name := fresh("named"))
    follows(lab, name, "west")
    source.finish()
    url = f"{lab.nodes['w1'].http}/queues"
    told: list[str] = []
    lab.kill("w1.sidecar")
    starting = threading.Thread(target=lab.start, args=("w1.sidecar",))
    starting.start()
    deadline = time.monotonic() + 240
    while not told and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                told += json.load(answer) or ["none"]
        except OSError:
            time.sleep(0.005)
    starting.join()
    assert f"LRQ_Recv_{name}_east" in told
