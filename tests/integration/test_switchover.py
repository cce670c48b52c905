"""Planned changes of primary, in the middle of a stream of ordinary clients: nothing lost, nothing twice, no redelivery."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import pika
import pytest
from load import command, declare, depth, eventually, in_sync, is_too_slow, ordered, primary_of, switch_over, take_over, told
from steady_clients import Clients

from broker_plugin.amqp import frames
from broker_plugin.log import codec
from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.replication.events import Handover, Message

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.one_version("4.3"), pytest.mark.proves("G3", "G4")]


HANDOVERS = 3


def refused(lab: Lab, words: str, *order: str) -> None:
    """This is why an order is, once everybody answers."""
    heard: list[str] = []

    def said_so() -> bool:
        code, said = command(*order, lab=lab)
        heard.append(said)
        assert code == 1, said
        assert words in said or is_too_slow(said), said
        return words in said

    eventually(f"`{order[0]}` to be refused", said_so, seen=lambda: heard)


@pytest.mark.quick
def test_there_and_back_in_the_middle_of_a_stream(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    queue = f"switched-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue, queue_type="quorum")
    time.sleep(2)
    clients = Clients([pair.nodes[name].door for name in (primary, backup)], queue)
    clients.start()
    given_up: list[str] = []
    try:
        for number in range(HANDOVERS):
            flowed = len(clients.consumed) + 200
            eventually("the stream to flow", lambda flowed=flowed: len(clients.consumed) > flowed)
            primary, backup = in_sync(pair)
            *slow, said = ordered(pair, "switchover", "--group", "east", over=lambda backup=backup: pair.primary("east") == backup)
            given_up += slow
            assert slow or said.partition(";")[0] == f"{primary} has handed over to {backup}"
            assert pair.wait_role(backup, "active")["primary"] == backup, number
        in_sync(pair)
        clients.finish()
    finally:
        clients.stop()
    assert sorted(clients.consumed) == list(range(clients.published)), "each once"
    # An order that is given up, on a machine that is too slow for it, gives back to the broker what was on its way to a client: that comes marked.
    assert given_up or clients.redelivered == 0
    assert clients.consumed == sorted(clients.consumed), "in order"
    assert all("320" in close and "hands over to" in close for _, close in clients.closes), clients.closes
    assert Counter(at for at, _ in clients.closes) == {0: HANDOVERS, 1: HANDOVERS}, "each client hears of each, once"
    eventually("both queues empty", lambda: all(depth(pair.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_a_client_gave_back_is_said_to_come_again(pair: Lab, kind: str) -> None:
    """Also after a second switchover, by a node that had given it back itself, or had only heard of it."""
    primary, backup = in_sync(pair)
    queue = f"given-back-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue, queue_type=kind)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(3):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        first = channel.basic_get(queue)[0]
        channel.basic_nack(first.delivery_tag, requeue=True)
    for again in ([b"0"], [b"0", b"1", b"2"]):  # on 3.10 a quorum queue whose messages a sweeper has looked at may have them in another order
        primary, backup = in_sync(pair, applied=True)
        switch_over(pair, backup)
        pair.wait_role(backup, "active")
        with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)) as connection:
            channel = connection.channel()
            got = [channel.basic_get(queue) for _ in range(3)]
            assert sorted((body, method.redelivered) for method, _, body in got) == [(body, body in again) for body in (b"0", b"1", b"2")]
            channel.basic_nack(got[-1][0].delivery_tag, multiple=True, requeue=True)


def test_what_only_the_sweeper_has_seen_is_not_said_to_come_again(pair: Lab) -> None:
    """The new primary's broker marks what its sweeper has given back, as this test does. What a client gives back comes again, and says so."""
    primary, backup = in_sync(pair)
    queue = f"looked-at-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(3):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    eventually("the backup to have them", lambda: depth(pair.nodes[backup].broker, queue) == 3)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].broker)) as connection:
        channel = connection.channel()
        assert [channel.basic_get(queue)[2] for _ in range(3)] == [b"0", b"1", b"2"]
    eventually("the backup to have them again", lambda: depth(pair.nodes[backup].broker, queue) == 3)
    switch_over(pair, backup)
    pair.wait_role(backup, "active")
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)) as connection:
        channel = connection.channel()
        got = [channel.basic_get(queue) for _ in range(3)]
        assert [(method.redelivered, body) for method, _, body in got] == [(False, b"0"), (False, b"1"), (False, b"2")]
        channel.basic_nack(got[0][0].delivery_tag)
        eventually("one to be back", lambda: depth(pair.nodes[backup].broker, queue) == 1)
        method, _, body = channel.basic_get(queue)
        assert (method.redelivered, body) == (True, b"0")
        channel.basic_ack(0, multiple=True)
    in_sync(pair)


@pytest.mark.proves("queue: held messages")
def test_a_consumer_that_does_not_finish(pair: Lab) -> None:
    """The operator is told, and nothing has changed; by force its message is delivered again, by the other node."""
    primary, backup = in_sync(pair)
    queue = f"unfinished-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    time.sleep(2)
    connection = pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door))
    channel = connection.channel()
    channel.confirm_delivery()
    for body in (b"1", b"2", b"3"):
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
    method, _, body = channel.basic_get(queue)
    assert (method.redelivered, body) == (False, b"1")
    *_, said = ordered(pair, "switchover", backup, "--dry-run", "--timeout", "1")
    then = "they must settle them within 1 s, or it is refused"
    assert said.startswith(f"would hand over to {backup}; consumers hold 1 messages: {then}; ")
    refused(pair, "consumers still hold 1 messages after 1 s; nothing was changed", "switchover", backup, "--timeout", "1")
    assert channel.basic_get(queue)[2] == b"2", "messages are given out again"
    *slow, said = switch_over(pair, backup, "--timeout", "1", "--force")
    assert slow or said.partition("; this")[0] == f"{primary} has handed over to {backup}; 2 messages are delivered again"
    pair.wait_role(backup, "active")
    channel = pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)).channel()
    got = [channel.basic_get(queue, auto_ack=True) for _ in range(4)]
    assert [(m.redelivered, b) for m, _, b in got if m] == [(True, b"1"), (True, b"2"), (True, b"3")]
    in_sync(pair)


def test_of_two_orders_at_once_one_is_refused(pair: Lab) -> None:
    """The second ended what the first had begun: messages were given out again, and a demotion that failed lifted the pause of another."""
    primary, backup = in_sync(pair)
    queue = f"ordered-twice-{time.time_ns()}"
    for name in (queue, f"{queue}-looked-at"):
        declare(pair.nodes[primary].door, name)
    channel = pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)).channel()
    channel.confirm_delivery()
    for body in (b"1", b"2", b"3"):
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
    channel.basic_publish("", f"{queue}-looked-at", b"1", pika.BasicProperties(delivery_mode=2))
    held, _, _ = channel.basic_get(queue)

    def nothing_is_given_out() -> bool:
        method, _, _ = channel.basic_get(f"{queue}-looked-at")
        if method is not None:
            channel.basic_nack(method.delivery_tag)
        return method is None

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(switch_over, pair, backup, "--timeout", "600")
        try:
            eventually("the first to be under way", nothing_is_given_out)
            here = ("--group", "east", "--timeout", "0")
            for order in (("switchover", backup, "--timeout", "0"), ("switchover", *here, "--dry-run"), ("demote", *here), ("renew", *here)):
                refused(pair, f"not now: node {primary} hands over to {backup}; consumers have 600 s", *order)
                assert nothing_is_given_out(), order
            assert f"hands over to {backup}" in told(pair, primary)["reason"], "and `list` says so"
            assert not told(pair, primary)["paused"]
            assert not told(pair, backup)["paused"]
        finally:
            channel.basic_ack(held.delivery_tag)
        *slow, said = first.result()
        assert slow or said.partition("; this")[0] == f"{primary} has handed over to {backup}"
    pair.wait_role(backup, "active")
    channel = pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)).channel()
    got = [channel.basic_get(queue, auto_ack=True) for _ in range(3)]
    assert [(m.redelivered, b) for m, _, b in got if m] == [(False, b"2"), (False, b"3")]
    in_sync(pair)


def test_what_is_not_replicated_is_said_to_stay_behind(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    queues = {level: f"stays-{level}-{time.time_ns()}" for level in ("configuration", "none", "all")}
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for count, (level, queue) in enumerate(queues.items(), 1):
            channel.queue_declare(queue, durable=True, arguments={"x-lrq-replicate": level})
            for _ in range(count):
                channel.basic_publish("", queue, b"1", pika.BasicProperties(delivery_mode=2))
    in_sync(pair, applied=True)
    stays = [f"{count} messages in '{queues[level]}' ({level})" for count, level in ((1, "configuration"), (2, "none"))]
    for order, outcome in (
        (("switchover", backup, "--dry-run"), f"would hand over to {backup}; consumers hold 0 messages"),
        (("demote", "--group", "east", "--dry-run"), "would step down; the group would be paused; consumers hold 0 messages"),
        (("switchover", backup), f"{primary} has handed over to {backup}"),
    ):
        said = ordered(pair, *order, over=lambda: pair.primary("east") == backup)[-1]
        if is_too_slow(said):
            continue  # done, and nobody has heard it
        assert said.startswith(f"{outcome}; this stays behind: "), said
        assert all(each in said for each in stays), said
        assert queues["all"] not in said
    pair.wait_role(backup, "active")
    in_sync(pair, applied=True)
    assert depth(pair.nodes[primary].broker, queues["none"]) == 2
    assert depth(pair.nodes[backup].broker, queues["configuration"]) == 0
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        connection.channel().queue_purge(queues["none"])


@pytest.mark.quick
def test_refusals(pair: Lab) -> None:
    primary, _ = in_sync(pair)
    refused(pair, f"{primary} is primary already", "switchover", primary)
    refused(pair, "there is no node e9", "switchover", "e9")
    refused(pair, "there is no group nowhere", "switchover", "--group", "nowhere")


def test_demoted_the_group_waits_for_an_operator(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    *slow, said = ordered(pair, "demote", "--group", "east", over=lambda: "paused" in pair.status(primary)["reason"])
    assert slow or said.splitlines()[0].partition("; this")[0] == f"{primary} has stepped down; the group is paused"
    if slow:  # the other may not have been told
        ordered(pair, "pause", "--group", "east")
    eventually("nobody to lead", lambda: "paused" in pair.status(primary)["reason"])
    pair.kill(f"{primary}.sidecar")
    pair.start(f"{primary}.sidecar")
    for node, other in ((primary, backup), (backup, primary)):
        eventually("them to see each other", lambda node=node, other=other: told(pair, node).get("peers", {}).get(other, {}).get("connected"))
    time.sleep(2)
    assert pair.primary("east") is None, "its sidecar has forgotten the pause; the other has not"
    said = ordered(pair, "resume", "--group", "east")[-1]
    assert said.count("epochs are taken by themselves again") == 2
    eventually("a primary again", lambda: pair.primary("east") is not None)
    in_sync(pair)
    ordered(pair, "pause", "--group", "east")
    pair.kill(f"{primary_of(pair)}.sidecar")
    pair.start(f"{primary}.sidecar" if pair.nodes[primary].sidecar_pid is None else f"{backup}.sidecar")
    eventually("nobody to lead", lambda: pair.primary("east") is None and "paused" in pair.status(primary)["reason"])
    try:
        take_over(pair, backup)
    except AssertionError as error:
        # A primary adds entries of its own: the last of them may not have reached the other.
        if f"promote {primary} instead" not in str(error):
            raise
        take_over(pair, primary)
    in_sync(pair)
    ordered(pair, "resume", "--group", "east")


class DeafTo:
    """A way to a node's door by which nothing arrives any more from the first message of a kind on; what the door says comes through."""

    def __init__(self, port: int, kind: type[Message]) -> None:
        self._to = ("127.0.0.1", port)
        self._kind = kind
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.deaf = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                door = socket.create_connection(self._to)
            except OSError:  # closed, or nobody there
                if self._server.fileno() < 0:
                    return
                client.close()
                continue
            for way in ((client, door, self._heard), (door, client, lambda _: True)):
                threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, passes: Callable[[bytes], bool]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if passes(data):
                    to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _heard(self, data: bytes) -> bool:
        """A control message comes whole: the node that sends it writes it at once."""
        with suppress(frames.FrameError):
            for item in frames.scan(data)[0]:
                _, _, _, _, _, header_end, stop = item
                if stop:
                    with suppress(LrqError):
                        if isinstance(codec.decode_control(frames.body_of(data, header_end, stop), "east")[1], self._kind):
                            self.deaf.set()
        return not self.deaf.is_set()

    def close(self) -> None:
        self._server.close()


def test_a_handover_that_is_not_heard_is_not_said_to_be_done(pair: Lab) -> None:
    """It was said to be, and nobody served until the former primary took the role back by itself."""
    primary, backup = in_sync(pair)
    config = pair.nodes[primary].config
    before = config.read_text()
    port = urlsplit(pair.nodes[backup].door).port
    assert port is not None
    way = DeafTo(port, Handover)
    pair.kill(f"{primary}.sidecar")
    config.write_text(re.sub(rf'(?s)(\[\[peers\]\].*?door = "amqp://[^"]+:){port}"', rf'\g<1>{way.port}"', before))
    try:
        pair.start(f"{primary}.sidecar")
        assert in_sync(pair) == (primary, backup)
        assert not way.deaf.is_set()
        code, said = command("switchover", backup, lab=pair)
        assert way.deaf.is_set(), said
        assert (code, f"{backup} has not answered that it was told" in said) == (1, True), said
        way.deaf.clear()
        eventually("it to take the role back", lambda: pair.status(primary)["serving"])
    finally:
        pair.kill(f"{primary}.sidecar")
        config.write_text(before)
        pair.start(f"{primary}.sidecar")
        way.close()
        in_sync(pair)
