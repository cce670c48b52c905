"""What waits for somebody slower: for the log, for the broker, for a client that does not read. Past its limit the door stops reading on the other
side; nothing of it is lost, and others go on.

Rule: who is slow is held still until the test lets go. How much waits is then what the sidecar says, or its memory: sockets hold what they like.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from load import all_applied, depth, eventually, set_up, told
from pamqp import commands
from pamqp.common import FieldTable
from patience import PATIENT_DOOR
from raw_client import DOOR_FRAME_MAX_BYTES, RawClient, publish
from test_flow import alarm

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

BUFFERED_BYTES, TO_BROKER_BYTES, TO_CLIENT_BYTES = 4 << 20, 2 << 20, 1 << 20
READ_BYTES = 1 << 20  # what one connection may be past a limit: it is looked at when something has been read
DRAIN_S = 3.0
STILL_S = 2.0
WRITE_TIMEOUT_S = 300.0
MANY_BYTES = 192 << 20
MEMORY_BYTES = 64 << 20  # the limits, and what the allocator makes of them
BODY = b"b" * 100_000
LARGE_BYTES = 15 << 20  # RabbitMQ 4 takes 16 MiB


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pair whose primary waits for its backup however long it takes."""
    limits = PATIENT_DOOR | {
        "buffered_bytes_max": BUFFERED_BYTES,
        "connection_buffer_bytes_max": TO_BROKER_BYTES,
        "client_buffer_bytes_max": TO_CLIENT_BYTES,
        "drain_timeout_s": DRAIN_S,
    }
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("backlogs"), broker_version, door=limits)
    set_up(lab, "backup_timeout_s = 600.0")
    with lab:
        yield lab


class Writer:
    """Sends the same bytes again and again on a client's connection, as fast as they go."""

    def __init__(self, client: RawClient, data: bytes, count: int) -> None:
        self._socket = client.socket.dup()  # the client's own has a time-out for each read
        self._socket.settimeout(WRITE_TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, args=(data, count), daemon=True)
        self._thread.start()

    def _run(self, data: bytes, count: int) -> None:
        with self._socket:
            for _ in range(count):
                self._socket.sendall(data)

    def join(self) -> None:
        self._thread.join(WRITE_TIMEOUT_S)
        assert not self._thread.is_alive()


def still(look: Callable[[], int]) -> int:
    """What this is when it changes no more. (A machine that stands still for a moment looks the same: it is then less than it may become.)"""
    while True:
        before = look()
        time.sleep(STILL_S)
        if look() == before:
            return before


@contextmanager
def standing_still(lab: Lab, target: str) -> Iterator[None]:
    lab.stop(target)
    try:
        yield
    finally:
        lab.cont(target)


def queue_of(lab: Lab, name: str, **arguments: str) -> str:
    """A new queue, declared through the door of this node."""
    queue = f"backlog-{time.time_ns()}"
    with RawClient(lab.nodes[name].door) as client:
        client.open_channel()
        given: FieldTable = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        client.call(1, commands.Queue.Declare(queue=queue, durable=True, arguments=given), frames.QUEUE_DECLARE_OK)
    return queue


@pytest.mark.parametrize(("clients", "limit_bytes"), [(1, TO_BROKER_BYTES), (8, BUFFERED_BYTES)])
def test_publishers_faster_than_the_log_are_not_read(lab: Lab, names: tuple[str, str], clients: int, limit_bytes: int) -> None:
    """One of them has a limit of its own, all together have another. Who only reads goes on meanwhile, and in the end everything is confirmed."""
    primary, backup = names
    queue = queue_of(lab, primary)
    data, count = publish(1, queue, b"w" * 10_000), 800
    reader = RawClient(lab.nodes[primary].door)
    publishers = [RawClient(lab.nodes[primary].door) for _ in range(clients)]
    try:
        reader.open_channel(confirms=True)
        reader.send(publish(1, queue, b"before"))
        assert reader.confirmed(1) == set()
        for client in publishers:
            client.open_channel(confirms=True)
        with standing_still(lab, f"{backup}.sidecar"):
            writers = [Writer(client, data, count) for client in publishers]
            eventually("the limit to be reached", lambda: lab.status(primary)["unsafe_bytes"] > limit_bytes)
            assert still(lambda: int(told(lab, primary)["unsafe_bytes"])) < limit_bytes + clients * READ_BYTES // 2
            reader.call(1, commands.Basic.Get(queue=queue), frames.BASIC_GET_OK)
        for client, writer in zip(publishers, writers, strict=True):
            assert client.confirmed(count, timeout_s=WRITE_TIMEOUT_S) == set()
            writer.join()
    finally:
        for client in (reader, *publishers):
            client.socket.close()


@pytest.mark.quick
def test_a_broker_that_takes_nothing_is_not_sent_more(lab: Lab, names: tuple[str, str]) -> None:
    """What is not replicated waits for nothing but the broker itself."""
    primary, _ = names
    queue, count = queue_of(lab, primary, lrq_replicate="none"), MANY_BYTES // len(BODY)
    with RawClient(lab.nodes[primary].door) as client:
        client.open_channel(confirms=True)
        before = told(lab, primary)["rss_bytes"]
        with alarm(lab, primary, "memory"):
            writer = Writer(client, publish(1, queue, BODY), count)
            assert still(lambda: int(told(lab, primary)["rss_bytes"]) >> 20) < (before + MEMORY_BYTES) >> 20
        assert client.confirmed(count, timeout_s=WRITE_TIMEOUT_S) == set()
        writer.join()
        client.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def test_what_comes_before_the_broker_has_opened_the_vhost_waits_in_the_socket(lab: Lab, names: tuple[str, str]) -> None:
    primary, _ = names
    queue, count = queue_of(lab, primary, lrq_replicate="none"), MANY_BYTES // len(BODY)
    with RawClient(lab.nodes[primary].door, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok())
        client.expect(frames.CONNECTION_TUNE)
        before = told(lab, primary)["rss_bytes"]
        with standing_still(lab, f"{primary}.broker"):
            methods = [(0, commands.Connection.TuneOk(50, DOOR_FRAME_MAX_BYTES, 0)), (0, commands.Connection.Open("/"))]
            methods += [(1, commands.Channel.Open()), (1, commands.Confirm.Select())]
            client.send(b"".join(encode.method_frame(channel, method) for channel, method in methods))
            writer = Writer(client, publish(1, queue, BODY), count)
            assert still(lambda: int(told(lab, primary)["rss_bytes"]) >> 20) < (before + MEMORY_BYTES) >> 20
        assert client.confirmed(count, timeout_s=WRITE_TIMEOUT_S) == set()
        writer.join()
        client.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def test_for_a_client_that_does_not_read_nothing_is_read(lab: Lab, names: tuple[str, str]) -> None:
    """A consumer without acks, to which the broker would give everything. When it reads on, everything comes."""
    primary, _ = names
    url = lab.nodes[primary].door
    queue, count = queue_of(lab, primary, lrq_replicate="none"), MANY_BYTES // len(BODY)
    with RawClient(url) as publisher, RawClient(url) as client:
        publisher.open_channel(confirms=True)
        writer = Writer(publisher, publish(1, queue, BODY), count)
        assert publisher.confirmed(count, timeout_s=WRITE_TIMEOUT_S) == set()
        writer.join()
        before = told(lab, primary)["rss_bytes"]
        client.open_channel()
        client.send(encode.method_frame(1, commands.Basic.Consume(queue=queue, no_ack=True)))
        still(lambda: depth(lab.nodes[primary].broker, queue))
        assert told(lab, primary)["rss_bytes"] < before + MEMORY_BYTES
        for _ in range(count):
            client.expect(frames.BASIC_DELIVER)
        publisher.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def test_large_messages_for_many_at_once_are_not_kept(lab: Lab, names: tuple[str, str]) -> None:
    """They are passed on as they come: to those who read, and to those who have read their beginning only."""
    primary, _ = names
    url, size, many = lab.nodes[primary].door, LARGE_BYTES, 16
    queue = queue_of(lab, primary)
    clients = [RawClient(url) for _ in range(many)]
    with RawClient(url) as publisher:
        publisher.open_channel(confirms=True)
        writer = Writer(publisher, publish(1, queue, b"m" * size), many)
        assert publisher.confirmed(many) == set()
        writer.join()
        all_applied(lab, *names)
        before = most = told(lab, primary)["rss_bytes"]
        for client in clients:
            client.open_channel()
            client.send(encode.method_frame(1, commands.Basic.Get(queue=queue, no_ack=True)))
            client.expect(frames.BASIC_GET_OK)
            most = max(most, told(lab, primary)["rss_bytes"])
        for client in clients:
            came = 0
            while came < size:
                kind, _, payload = client.read() or (0, 0, b"")
                assert kind in (frames.HEADER, frames.BODY)
                came += len(payload) * (kind == frames.BODY)
                client.got.clear()
            assert came == size
            most = max(most, told(lab, primary)["rss_bytes"])
            client.socket.close()
        assert most - before < MEMORY_BYTES
        publisher.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def test_a_confirm_does_not_come_within_a_message(lab: Lab, names: tuple[str, str]) -> None:
    """A client that gets something large, bit by bit, and publishes on the same channel what is confirmed meanwhile (a repeat, which is there)."""
    primary, _ = names
    url = lab.nodes[primary].door
    queue, other = queue_of(lab, primary), queue_of(lab, primary)
    again = publish(1, other, b"once", fields=content_header.field(b"x-lrq-id", b"backlogs/1"))
    with RawClient(url, properties={"lrq_producer": "backlogs"}) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, queue, b"m" * LARGE_BYTES) + again)
        assert client.confirmed(2) == set()
        all_applied(lab, *names)
        client.send(encode.method_frame(1, commands.Basic.Get(queue=queue, no_ack=True)))
        client.expect(frames.BASIC_GET_OK)
        before = told(lab, primary)["counters"].get("repeats", 0)
        client.send(again)
        eventually("the repeat to be taken", lambda: told(lab, primary)["counters"].get("repeats", 0) > before)
        kinds, came = [], 0
        while came < LARGE_BYTES:
            kind, _, payload = client.read() or (0, 0, b"")
            kinds.append(kind)
            came += len(payload) * (kind == frames.BODY)
        assert set(kinds) <= {frames.HEADER, frames.BODY}
        client.expect(frames.BASIC_ACK)
        for name in (queue, other):
            client.call(1, commands.Queue.Delete(queue=name), frames.QUEUE_DELETE_OK)


@pytest.mark.parametrize("cause", ["an alarm", "the log", "a commit"])
def test_what_stands_before_an_answer_that_does_not_come_is_bounded(lab: Lab, names: tuple[str, str], cause: str) -> None:
    """A consumer that reads nothing is given everything, and waits for its broker: for leave to publish, or for a commit to be rehearsed, neither of
    which that hears of in an alarm; or for a queue of its own, behind a message that is not safe. It alone is closed.
    """
    primary, backup = names
    url = lab.nodes[primary].door
    queue, replicated, count = queue_of(lab, primary, lrq_replicate="none"), queue_of(lab, primary), MANY_BYTES // len(BODY)
    with RawClient(url) as publisher, RawClient(url) as reader, RawClient(url) as client:
        publisher.open_channel(confirms=True)
        writer = Writer(publisher, publish(1, queue, BODY), count)
        assert publisher.confirmed(count, timeout_s=WRITE_TIMEOUT_S) == set()
        writer.join()
        reader.open_channel()
        client.open_channel(confirms=cause != "a commit")
        asks = encode.method_frame(1, commands.Basic.Consume(queue=queue, no_ack=True)) + publish(1, replicated, b"x")
        if cause == "a commit":
            commit = encode.method_frame(1, commands.Tx.Commit())
            client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            client.send(publish(1, replicated, b"leave is given") + commit)
            client.expect(frames.TX_COMMIT_OK)
            asks += commit
        elif cause == "the log":
            client.send(publish(1, replicated, b"leave is given"))
            assert client.confirmed(1) == set()
            asks += encode.method_frame(1, commands.Queue.Declare(exclusive=True))
        before, most = told(lab, primary), 0

        def closed() -> bool:
            nonlocal most
            now = told(lab, primary)
            most = max(most, now["rss_bytes"])
            return bool(now["counters"].get("closed_slow", 0) > before["counters"].get("closed_slow", 0))

        with standing_still(lab, f"{backup}.sidecar") if cause == "the log" else alarm(lab, primary, "memory"):
            client.send(asks)
            eventually("it to be closed", closed, seen=lambda: most - before["rss_bytes"])
            assert most < before["rss_bytes"] + MEMORY_BYTES
            reader.send(encode.method_frame(1, commands.Basic.Get(queue=replicated)))
            reader.expect(frames.BASIC_GET_OK, frames.BASIC_GET_EMPTY)
        publisher.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)
        assert told(lab, primary)["counters"]["closed_slow"] == before["counters"].get("closed_slow", 0) + 1


def test_what_a_vanished_client_published_is_waited_for_only_so_long(lab: Lab, names: tuple[str, str]) -> None:
    """What is not safe by then was not confirmed, and gets into no queue."""
    primary, backup = names
    queue = queue_of(lab, primary)
    eventually("others to be gone", lambda: lab.status(primary)["connections"] == 0)
    with standing_still(lab, f"{backup}.sidecar"):
        with RawClient(lab.nodes[primary].door) as client:
            client.open_channel(confirms=True)
            client.send(publish(1, queue, b"x") * 10)
            eventually("them to be in the log", lambda: lab.status(primary)["unsafe_bytes"] > 0)
            vanished = time.monotonic()
        eventually("the door to wait no more", lambda: lab.status(primary)["connections"] == 0)
        assert time.monotonic() - vanished >= DRAIN_S - 0.1
    all_applied(lab, primary, backup)
    assert [depth(lab.nodes[name].broker, queue) for name in names] == [0, 0]
