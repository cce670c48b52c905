"""The publisher through real doors: sequences that go on after a restart, one process per name, failover without loss or repeats."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from load import eventually, in_sync, primary_of, replace_primary, set_up
from patience import PATIENT_DOOR
from publisher_api import PATIENCE_S, inside, no_primary
from raw_client import RawClient
from raw_client import publish as raw_publish

from broker_plugin.amqp.content_header import field
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Confirm, FencedError, FullSyncRequest, MessageTooLarge, NackedError, Publisher, core, messages
from lrq_ha.publisher.fullsync import RequestBook
from lrq_ha.publisher.messages import full_sync_status
from lrq_ha.publisher.numbered import Message, NumberedProducer
from lrq_ha.routing.chain import TRANSMISSION_BYTES_MAX

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("G1")]

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    found = Lab({"east": 2, "west": 1}, tmp_path_factory.mktemp("door") / "lab", broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")  # who is to take over is in the set, also after a pause
    with found:
        yield found


@pytest.fixture
def name() -> str:
    """Of a producer and a queue of this test alone."""
    return f"n{uuid.uuid4().hex[:12]}"


def doors(lab: Lab) -> list[str]:
    return [node.door for node in lab.nodes.values() if node.group == "east"]


def declare(lab: Lab, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
        connection.channel().queue_declare(queue, durable=True)


def drain(lab: Lab, queue: str, count: int) -> list[str]:
    """Replication IDs of `count` messages, and of whatever comes within a second after them; fewer if no more come for long."""
    found: list[str] = []
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        deadline = time.monotonic() + 3 * PATIENCE_S
        for method, properties, _ in channel.consume(queue, inactivity_timeout=1.0):
            if method is None:
                if len(found) >= count or time.monotonic() > deadline:
                    break
                continue
            found.append(properties.headers["x-lrq-id"])
            channel.basic_ack(method.delivery_tag)
    return found


@pytest.mark.quick
def test_a_restart_continues_both_sequences(lab: Lab, api: Make, name: str) -> None:
    declare(lab, name)
    for start in (0, 3):
        with api(doors(lab), name, "orders") as p:
            assert [p.publish("", name, b"").result(PATIENCE_S) for _ in range(3)] == [f"{name}/{start + n}" for n in (1, 2, 3)]
            last = p.transmit_log_entry_message(b"", ["west"]).result(PATIENCE_S)
    assert last == f"{name}.lrq/4", "each process announced the client first"
    assert drain(lab, name, 6) == [f"{name}/{n}" for n in range(1, 7)]


def test_what_an_older_process_has_sent_goes_no_further_than_a_newer_one_was_told(lab: Lab, api: Make, name: str) -> None:
    """What the door had not read of it came into the log under IDs that the newer one gives to other messages: those were taken for repeats."""
    declare(lab, name)
    door = lab.nodes[primary_of(lab)].door
    with RawClient(door, properties={"lrq_producer": name}) as older:
        older.open_channel(confirms=True)
        older.send(raw_publish(1, name, b"older", fields=field(b"x-lrq-id", f"{name}/1".encode())))
        assert older.confirmed(1) == set()
        with api(doors(lab), name, "orders") as p:
            older.send(raw_publish(1, name, b"older, too late", fields=field(b"x-lrq-id", f"{name}/2".encode())))
            assert older.closed()
            assert p.publish("", name, b"newer").result(PATIENCE_S) == f"{name}/2"
            p.transmit_log_entry_message(b"", ["west"]).result(PATIENCE_S)
            assert p.publish("", name, b"newer").result(PATIENCE_S) == f"{name}/3", "its own connections live on"
    assert drain(lab, name, 3) == [f"{name}/{n}" for n in (1, 2, 3)]


class Gate:
    """A way to a door on which logins to some vhosts stand still.

    Attributes:
        held: Those vhosts.
    """

    def __init__(self, door: str) -> None:
        found = urlsplit(door)
        self._door = (found.hostname, found.port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = found._replace(netloc=f"{found.netloc.rpartition('@')[0]}@127.0.0.1:{self._server.getsockname()[1]}").geturl()
        self.held: set[str] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                door = socket.create_connection(self._door)
                for ends in ((client, door), (door, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if any(b"\x00\x0a\x00\x28%c%b" % (len(vhost), vhost.encode()) in data for vhost in self.held):  # connection.open
                    continue
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def test_no_number_that_another_process_has_used_meanwhile_is_sent(lab: Lab, api: Make, name: str) -> None:
    """As by one that continues where a primary without its backups says, and then comes to the new one. If `publish` came there first,
    its messages were confirmed as repeats of the other process's, and nowhere: only the log entries' connection asked again."""
    declare(lab, name)
    gate = Gate(lab.nodes[primary_of(lab)].door)
    try:
        first = api([gate.url], name, login_timeout_s=2.0)
        first.publish("", name, b"").result(PATIENCE_S)
        gate.held |= {"/", "lrq"}
        with api(doors(lab), name) as second:
            assert second.publish("", name, b"").result(PATIENCE_S) == f"{name}/2"
        eventually("the first to be ended", lambda: not any(lane.ready for lane in inside(first)._lanes))
        confirm = first.publish("", name, b"another")
        gate.held.remove("/")
        with pytest.raises(FencedError):
            confirm.result(2 * PATIENCE_S)
        first.close()
    finally:
        gate.close()
    assert drain(lab, name, 2) == [f"{name}/1", f"{name}/2"]


def test_an_unknown_destination_is_refused_by_name(lab: Lab, api: Make, name: str) -> None:
    with api(doors(lab), name, "orders") as p, pytest.raises(NackedError, match="destination 'nowhere' is not known"):
        p.transmit_log_entry_message(b"", ["nowhere"]).result(PATIENCE_S)


@pytest.mark.quick
def test_only_the_backup_is_known(lab: Lab, api: Make, name: str) -> None:
    backup = next(node for node in ("e1", "e2") if node != primary_of(lab))
    error = no_primary(lambda timeout_s: api([lab.nodes[backup].door], name, connect_timeout_s=timeout_s))
    assert "primary is" in str(error)
    ((address, answer),) = error.answers.items()
    assert lab.nodes[backup].door.endswith(address)
    assert answer.startswith(f"320 node {backup} is a backup")


def test_wrong_credentials(lab: Lab, api: Make, name: str) -> None:
    wrong = [url.replace("app:", "app:not-", 1) for url in doors(lab)]
    error = no_primary(lambda timeout_s: api(wrong, name, connect_timeout_s=timeout_s))
    assert "ACCESS_REFUSED" in str(error)
    assert len(error.answers) == 2
    assert "not-" not in str(error)


def test_the_server_asks_for_a_full_sync(lab: Lab, api: Make, name: str) -> None:
    served: list[FullSyncRequest] = []

    def provide(request: FullSyncRequest, context: Any) -> None:
        for number in range(10):
            context.transmit(b"%d" % number)
        context.complete().result(PATIENCE_S)
        served.append(request)

    with api(doors(lab), name, name) as p:
        p.on_full_sync(provide)
        p.transmit_log_entry_message(b"delta", ["west"]).result(PATIENCE_S)
        eventually("the server to ask", lambda: bool(served))
    assert [(request.client_name, request.destination) for request in served] == [(name, "west")]


def test_a_full_sync_of_a_site_that_is_not_known_is_refused(lab: Lab, name: str) -> None:
    """A misspelt one was confirmed, and went nowhere."""
    with Publisher(doors(lab), name, name) as p:
        refused = p._send_status(full_sync_status(name, "nowhere", "r1", "test", pb.FullSyncRequest.REQUESTED))
        with pytest.raises(NackedError, match="destination 'nowhere' is not known to group 'east'; known: west") as error:
            refused.result(PATIENCE_S)
        assert error.value.code == 312
        after = p._send_status(full_sync_status(name, "west", "r1", "test", pb.FullSyncRequest.REQUESTED))
        after.result(PATIENCE_S)
        assert after.replication_id == refused.replication_id, "the number is free again"


def test_a_refused_entry_leaves_the_connection_and_what_it_reads(
    lab: Lab, api: Make, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door closes the channel for it; to read LRQ_Status on a channel that was open already ended the connection."""
    read: list[None] = []
    replay = RequestBook.replay
    monkeypatch.setattr(RequestBook, "replay", lambda self: (read.append(None), replay(self)))
    with api(doors(lab), name, name) as p:
        p.on_full_sync(lambda request, context: context.complete())
        p.transmit_log_entry_message(b"", ["west"]).result(PATIENCE_S)
        eventually("the stream to be read", lambda: bool(read))
        with pytest.raises(MessageTooLarge):
            p.transmit_log_entry_message(bytes(TRANSMISSION_BYTES_MAX), ["west"])
        monkeypatch.setattr(core, "TRANSMISSION_BYTES_MAX", 2 * TRANSMISSION_BYTES_MAX)
        monkeypatch.setattr(messages, "checked_shares", lambda _: None)
        with pytest.raises(NackedError, match="too many for one message"):
            p.transmit_log_entry_message(bytes(TRANSMISSION_BYTES_MAX), ["west"]).result(PATIENCE_S)
        p.transmit_log_entry_message(b"", ["west"]).result(PATIENCE_S)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("lrq_ha.publisher") and record.levelname == "WARNING"]
    assert {"closed the channel" in each for each in said} == {True}, said
    assert len(read) == 1, "it goes on"


def test_the_numbers_of_refused_messages_are_used_again(lab: Lab, api: Make, name: str) -> None:
    """Each was a gap for ever; and none of the messages that have them now is taken for a repeat, by any node."""
    declare(lab, name)
    full = f"{name}-full"
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
        connection.channel().queue_declare(full, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    stored: list[str] = []
    with api(doors(lab), name) as p:
        filling = 0
        with suppress(NackedError):
            while filling < 20:  # the queue notices its limit a little late
                p.publish("", full, b"").result(PATIENCE_S)
                filling += 1
        for _ in range(30):
            for queue in (f"{name}-nowhere", full):
                with pytest.raises(NackedError):
                    p.publish("", queue, b"").result(PATIENCE_S)
            stored.append(p.publish("", name, b"").result(PATIENCE_S))
        both = [p.publish("", queue, b"") for queue in (full, name) * 30]
        stored += [confirm.result(PATIENCE_S) for confirm in both[1::2]]
        for confirm in both[::2]:
            with pytest.raises(NackedError):
                confirm.result(PATIENCE_S)
        old, new = in_sync(lab)
        replace_primary(lab, old, new)
        stored += [p.publish("", name, b"").result(2 * PATIENCE_S) for _ in range(40)]
    last = max(int(each.rpartition("/")[2]) for each in stored)
    assert last <= len(stored) + filling + 2, "but for those in flight at the end, none is left out"
    assert drain(lab, name, len(stored)) == stored
    lab.start(old)
    lab.wait_role(old, "ready")


@pytest.mark.quick(only=r"\[sync-")
def test_failover_loses_and_repeats_nothing_and_tells_two_of_one_name(lab: Lab, api: Make, name: str) -> None:
    twins, mover = f"{name}-twin", f"{name}-mover"
    declare(lab, twins)
    declare(lab, mover)
    first = api(doors(lab), twins)
    first.publish("", twins, b"").result(PATIENCE_S)
    with api(doors(lab), twins) as second:
        assert second.publish("", twins, b"").result(PATIENCE_S) == f"{twins}/2"
    with api(doors(lab), mover) as p:
        old, new = in_sync(lab)
        confirms = [p.publish("", mover, b"x" * 1024) for _ in range(3000)]
        confirms[500].result(PATIENCE_S)
        replace_primary(lab, old, new)
        confirms += [p.publish("", mover, b"x" * 1024) for _ in range(1000)]
        assert [confirm.result(2 * PATIENCE_S) for confirm in confirms] == [f"{mover}/{n}" for n in range(1, 4001)]
    assert drain(lab, mover, 4000) == [f"{mover}/{n}" for n in range(1, 4001)]

    # It has to log in again, and then learns that its name was used.
    eventually("the first to learn of its twin", lambda: inside(first)._failure is not None)
    with pytest.raises(FencedError, match="twin' is in use elsewhere"):
        first.publish("", twins, b"")
    first.close()
    lab.start(old)
    lab.wait_role(old, "ready")


def test_an_ascending_producer_over_a_failover(lab: Lab, name: str) -> None:
    """Numbers that it has skipped or used are repeats at the new primary, too; a refused one is taken, whatever was sent behind it."""
    declare(lab, name)
    sent: list[int] = []

    def number(batch: int, chunk: int) -> int:
        return batch << 20 | chunk

    def open_up(publisher: Publisher, batch: int) -> NumberedProducer:
        return publisher.open_producer(f"{name}-up", number(batch + 1, 0) - 1, log_entries=False, ascending=True)

    def send(producer: NumberedProducer, numbers: Iterable[int], queue: str = name) -> list[Confirm]:
        return [producer.publish(n, Message("", queue, b"x")) for n in numbers]

    with Publisher(doors(lab), name) as p:
        producer = open_up(p, 9)
        old, new = in_sync(lab)
        for batch in range(5):
            numbers = [number(batch, chunk) for chunk in range(1, 101)]
            confirms = send(producer, numbers)
            sent += numbers
            if batch == 2:
                confirms[0].result(PATIENCE_S)
                replace_primary(lab, old, new)
        assert [c.result(2 * PATIENCE_S) for c in confirms] == [f"{name}-up/{n}" for n in numbers]
        refused, behind = (*send(producer, [number(5, 1)], f"{name}-nowhere"), *send(producer, [number(5, 2)]))
        for confirm in (refused, behind):
            with suppress(NackedError):  # the second one may have been in the log already
                confirm.result(PATIENCE_S)
        assert isinstance(refused.error, NackedError)
        sent += [number(5, 2)] * (behind.error is None)
        with pytest.raises(NackedError):
            send(producer, [number(5, 3)])
    with Publisher(doors(lab), name) as p:
        producer = open_up(p, 5)
        again = [number(0, 7), number(1, 500), number(4, 100), number(5, 1), number(5, 2)]
        for confirm in send(producer, again):
            confirm.result(PATIENCE_S)
        sent += [n for n in again[3:] if n not in sent]
    with Publisher(doors(lab), name) as p, pytest.raises(FencedError):
        send(open_up(p, 4), [number(4, 1)])[0].result(PATIENCE_S)
    assert drain(lab, name, len(sent)) == [f"{name}-up/{n}" for n in sent]
    lab.start(old)
    lab.wait_role(old, "ready")


def test_another_kind_of_numbers_is_refused(lab: Lab, name: str) -> None:
    with pytest.raises(AssertionError, match="lrq_ids is not 'ascending'"):
        RawClient(lab.nodes[primary_of(lab)].door, properties={"lrq_producer": name, "lrq_ids": "descending"})
