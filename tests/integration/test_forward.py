"""Clients that know the address of a backup only (`door.when_backup = "forward"`): the backup's door relays them to the primary.

Rule: no client here is told of the primary's address. HAProxy is the page's, from its sample.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest
from frameworks import FRAMEWORKS, alive, start, write_programs
from load import (
    LOST,
    User,
    add_users,
    command,
    declare,
    depth,
    eventually,
    in_sync,
    promote,
    replace_primary,
    set_up,
    switch_over,
    told,
)  # fmt: skip
from pamqp import commands
from patience import PATIENT_DOOR
from pika.exceptions import ConnectionClosedByBroker, ProbableAccessDeniedError, ProbableAuthenticationError
from raw_client import RawClient, publish
from steady_clients import Clients

from broker_plugin.amqp import encode, frames, sasl
from broker_plugin.amqp.proxy_header import proxy_header
from broker_plugin.amqp.sasl import Credentials
from lrq_ha.lab import Lab
from lrq_ha.lab.ports import free_ports
from lrq_ha.lab.tools import find_tool

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600), pytest.mark.one_version("4.3")]

FORWARD = {"when_backup": "forward"}
PAGE = Path(__file__).parents[2] / "docs" / "operations" / "one-address.md"


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 2}, tmp_path_factory.mktemp("forward"), broker_version, door=PATIENT_DOOR | FORWARD | {"proxy_protocol": ["127.0.0.0/8"]})
    set_up(found, "backup_timeout_s = 60.0")
    ports = free_ports()
    for node in found.nodes.values():  # reachable by another address than loopback, too; and with an address for probes
        text = node.config.read_text().replace('[door]\nlisten = "127.0.0.1', '[door]\nlisten = "0.0.0.0')
        node.config.write_text(text.replace("[http]\n", f'[http]\nprobes = "127.0.0.1:{next(ports)}"\n'))
    with found:
        for name in found.nodes:
            add_users(found, name, User("guest", "guest", [("/", ".*", ".*", ".*")]))
        yield found


@pytest.fixture
def outside() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def relayed_by(lab: Lab, backup: str) -> int:
    return int(told(lab, backup)["relayed"])


def refused(url: str, timeout_s: float = 60.0) -> bytes:
    """The connection.close that answers a login."""
    with RawClient(url, login=False) as client:
        client.socket.settimeout(timeout_s)
        with pytest.raises(AssertionError):
            client.login("/", 0, 0, {})
        closes = [payload for kind, _, payload in client.got if kind == frames.CONNECTION_CLOSE]
        assert closes, client.got
        return closes[0][4:]


@pytest.mark.quick
@pytest.mark.proves("G3")
def test_there_and_back_in_the_middle_of_a_stream_by_one_address(lab: Lab) -> None:
    """Clients of one node go on while it is backup, primary, and backup again."""
    primary, backup = in_sync(lab)
    queue = f"one-address-{time.time_ns()}"
    declare(lab.nodes[backup].door, queue, queue_type="quorum")
    clients = Clients([lab.nodes[backup].door], queue)
    clients.start()
    given_up: list[str] = []
    try:
        for to, relayed in ((backup, 0), (primary, 2)):
            flowed = len(clients.consumed) + 100
            eventually("the stream to flow", lambda flowed=flowed: len(clients.consumed) > flowed)
            in_sync(lab)
            given_up += switch_over(lab, to)[:-1]
            lab.wait_role(to, "active")
            eventually("clients to be back", lambda relayed=relayed: relayed_by(lab, backup) == relayed)
        clients.finish()
    finally:
        clients.stop()
    assert sorted(clients.consumed) == list(range(clients.published)), "each once"
    assert given_up or clients.redelivered == 0
    assert all("320" in close for _, close in clients.closes), clients.closes
    eventually("both queues empty", lambda: all(depth(lab.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))


def test_the_primary_decides_on_the_login(lab: Lab) -> None:
    _, backup = in_sync(lab)
    good = urlsplit(lab.nodes[backup].door)
    with pytest.raises(ProbableAuthenticationError, match="403"):
        pika.BlockingConnection(pika.URLParameters(f"amqp://app:wrong@127.0.0.1:{good.port}"))
    with pytest.raises(ProbableAccessDeniedError, match="530"):
        pika.BlockingConnection(pika.URLParameters(f"{lab.nodes[backup].door}/missing"))
    assert relayed_by(lab, backup) == 0


def test_a_client_hears_why_when_the_primary_is_killed(lab: Lab) -> None:
    """In the middle of deliveries, of which none is cut in two."""
    primary, backup = in_sync(lab)
    queue = f"cut-{time.time_ns()}"
    declare(lab.nodes[backup].door, queue)
    with RawClient(lab.nodes[backup].door) as client:
        client.open_channel(1, confirms=True)
        client.send(publish(1, queue, bytes(100_000)) * 40)
        client.confirmed(40)
        client.call(1, commands.Basic.Consume(queue=queue), frames.BASIC_CONSUME_OK)
        client.expect(frames.BODY)
        lab.kill(f"{primary}.sidecar")
        while client.read() is not None:
            pass
        kind, channel, payload = client.got[-1]
        assert (kind, channel) == (frames.CONNECTION_CLOSE, 0), "frames are whole up to the last, which is the close"
        assert b"\x01\x40" in payload[4:6]
        assert f"the connection to {primary} is lost".encode() in payload
    assert b"is a backup" in refused(lab.nodes[backup].door) or b"serves no clients" in refused(lab.nodes[backup].door)
    lab.start(f"{primary}.sidecar")
    in_sync(lab)


def test_a_primary_that_stands_still(lab: Lab) -> None:
    """New clients are refused in time, with the reason; connected ones hear of the new primary, which is this node."""
    primary, backup = in_sync(lab, applied=True)
    with RawClient(lab.nodes[backup].door) as client:
        lab.stop(primary)
        try:
            assert f"the door of {primary} does not answer".encode() in refused(lab.nodes[backup].door)
            eventually("the primary to be missed", lambda: not lab.status(backup)["peers"][primary]["connected"])
            promote(lab, backup, primary)
            text = client_end(client)
            assert b"is no longer primary" in text or b"has not heard its primary" in text, text
            with pika.BlockingConnection(pika.URLParameters(lab.nodes[backup].door)):
                pass
        finally:
            lab.cont(primary)
    in_sync(lab)


def client_end(client: RawClient) -> bytes:
    """The connection.close that a client gets; answered, as a client does."""
    while (found := client.read()) is not None:
        if found[0] == frames.CONNECTION_CLOSE:
            client.send(encode.method_frame(0, commands.Connection.CloseOk()))
            assert client.closed()
            return found[2][4:]
    raise AssertionError(f"a bare end; {client.got[-3:]}")


def test_relayed_twice_there_is_none(lab: Lab) -> None:
    """Two nodes that each take the other for the primary would relay to each other without end."""
    primary, backup = in_sync(lab)
    admin = urlsplit(lab.nodes[backup].admin)
    node = Credentials((admin.username or "").encode(), (admin.password or "").encode())
    with RawClient(lab.nodes[backup].door, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        answer = sasl.parse_start_ok(client.start_ok()[7:-1])
        who = sasl.credentials(answer)
        assert who is not None
        client.send(encode.frame(frames.METHOD, 0, b"\0\x0a\0\x0b" + sasl.relay(answer, who, "192.0.2.1:5", node)))
        client.expect(frames.CONNECTION_TUNE)
        client.send(encode.method_frame(0, commands.Connection.TuneOk(100, 8192, 0)) + encode.method_frame(0, commands.Connection.Open("/")))
        text = client_end(client)
        assert text[:2] == struct.pack(">H", 320)
        assert f"node {backup} is a backup; primary is {primary}".encode() in text


@pytest.mark.parametrize("at", ["primary", "backup"])
def test_no_client_claims_an_address(lab: Lab, at: str) -> None:
    name = dict(zip(("primary", "backup"), in_sync(lab)))[at]
    with RawClient(lab.nodes[name].door, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok({"lrq_relayed": "127.0.0.1:1", "lrq_relay_proof": "0" * 64}))
        text = client_end(client)
        assert text[:2] == struct.pack(">H", 530)
        assert b"lrq_relayed is for the nodes" in text


def test_guest_is_let_in_from_this_machine_only_by_a_backup_too(lab: Lab, outside: str) -> None:
    _, backup = in_sync(lab)
    port = urlsplit(lab.nodes[backup].door).port
    assert b"ACCESS_REFUSED" in refused(f"amqp://guest:guest@{outside}:{port}")
    with RawClient(f"amqp://guest:guest@127.0.0.1:{port}"):
        pass


def test_the_broker_is_told_the_clients_own_address(lab: Lab, outside: str) -> None:
    primary, backup = in_sync(lab)
    url = urlsplit(lab.nodes[backup].door)
    with RawClient(f"amqp://{url.username}:{url.password}@{outside}:{url.port}") as client:
        address = "{}:{}".format(*client.socket.getsockname())
        rows = lab.ctl(primary, "list_connections", "client_properties")
        assert address in rows
        assert "lrq_relay" not in rows


def test_a_slow_reader_holds_the_primary_up_and_not_the_backups_memory(lab: Lab) -> None:
    _, backup = in_sync(lab)
    queue, count, size = f"slow-{time.time_ns()}", 400, 500_000
    declare(lab.nodes[backup].door, queue)
    with RawClient(lab.nodes[backup].door) as publisher, RawClient(lab.nodes[backup].door) as slow:
        publisher.open_channel(1, confirms=True)
        for _ in range(count):
            publisher.send(publish(1, queue, bytes(size)))
        publisher.confirmed(count, 300.0)
        in_sync(lab, applied=True)  # later the backup's memory grows by nothing of the log
        slow.open_channel(1)
        before = told(lab, backup)["rss_bytes"]
        slow.call(1, commands.Basic.Consume(queue=queue, no_ack=True), frames.BASIC_CONSUME_OK)
        time.sleep(3.0)
        grown = told(lab, backup)["rss_bytes"] - before
        print(f"{count * size >> 20} MiB unread, the backup's sidecar has grown by {grown >> 20} MiB")
        got = 0
        while got < count * size:
            got += len(slow.expect(frames.BODY))
        assert got == count * size
    assert grown < count * size / 4


def test_a_publisher_that_the_primary_does_not_read_is_held_up(lab: Lab) -> None:
    primary, backup = in_sync(lab)
    queue = f"held-up-{time.time_ns()}"
    declare(lab.nodes[backup].door, queue)
    with RawClient(lab.nodes[backup].door) as client:
        client.open_channel(1, confirms=True)
        before = told(lab, backup)["rss_bytes"]
        lab.stop(f"{primary}.sidecar")
        sent = 0
        try:
            client.socket.settimeout(2.0)
            with suppress(TimeoutError):
                while sent < 2_000:
                    client.socket.sendall(publish(1, queue, bytes(100_000)))
                    sent += 1
            assert sent < 2_000
            assert told(lab, backup)["rss_bytes"] - before < 60 << 20
        finally:
            lab.cont(f"{primary}.sidecar")
    in_sync(lab)


def test_five_hundred_clients(lab: Lab) -> None:
    primary, backup = in_sync(lab)
    with ExitStack() as open_clients:
        clients = [open_clients.enter_context(RawClient(lab.nodes[backup].door)) for _ in range(500)]
        assert relayed_by(lab, backup) == 500
        assert told(lab, backup)["connections"] == 0
        assert told(lab, primary)["connections"] == 500
        for client in clients:
            client.open_channel(1)
    eventually("all of them gone", lambda: relayed_by(lab, backup) == 0 and told(lab, primary)["connections"] == 0)
    eventually("their sockets, too", lambda: told(lab, backup)["sockets"] <= 4)


def test_a_backup_that_stops_tells_its_clients_after_their_confirms(lab: Lab) -> None:
    _, backup = in_sync(lab)
    queue = f"stop-{time.time_ns()}"
    declare(lab.nodes[backup].door, queue)
    with RawClient(lab.nodes[backup].door) as client:
        client.open_channel(1, confirms=True)
        client.send(publish(1, queue, b"x") * 500)
        time.sleep(0.2)
        pid = lab.processes()[f"{backup}.sidecar"]
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        client.confirmed(500)
        assert b"this sidecar stops" in client_end(client)
    eventually("it to be gone", lambda: lab.processes()[f"{backup}.sidecar"] is None)
    lab.start(f"{backup}.sidecar")
    in_sync(lab)


def test_a_broker_that_speaks_the_proxy_protocol_is_told_the_clients_address(broker_version: str, tmp_path: Path) -> None:
    with Lab({"east": 2}, tmp_path, broker_version, proxy_protocol=True, door=PATIENT_DOOR | FORWARD) as lab:
        primary, backup = in_sync(lab)
        with RawClient(lab.nodes[backup].door, source="127.0.0.9") as client:
            port = client.socket.getsockname()[1]
            rows = lab.ctl(primary, "list_connections", "user", "peer_host", "peer_port").splitlines()
            assert f"app\t127.0.0.9\t{port}" in rows


def test_tls_ends_at_the_backup_and_begins_again(broker_version: str, tmp_path: Path) -> None:
    balancers = {"proxy_protocol": ["127.0.0.0/8"]}
    with Lab({"east": 2}, tmp_path, broker_version, tls=True, door=PATIENT_DOOR | FORWARD | balancers) as lab:
        primary, backup = in_sync(lab)
        assert lab.authority is not None
        context = ssl.create_default_context(cafile=str(lab.authority.ca))
        context.load_cert_chain(*lab.authority.issue("client"))
        queue = "tls"
        header = proxy_header(("192.0.2.7", 4_711), ("198.51.100.2", 5_671))  # of a load balancer, which lets TLS through
        with RawClient(lab.nodes[backup].door, context=context, first=header) as client:
            assert "192.0.2.7:4711" in lab.ctl(primary, "list_connections", "client_properties")
            client.open_channel(1, confirms=True)
            client.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
            client.send(publish(1, queue, bytes(300_000)) * 3)
            client.confirmed(3)
            client.call(1, commands.Basic.Consume(queue=queue, no_ack=True), frames.BASIC_CONSUME_OK)
            got = 0
            while got < 900_000:
                got += len(client.expect(frames.BODY))
            assert relayed_by(lab, backup) == 1
            lab.kill(primary)
            assert b"is lost" in client_end(client)


def test_the_programs_of_the_page_with_the_backups_address_only(broker_version: str, tmp_path: Path) -> None:
    """Over a kill of the primary. It takes minutes: four frameworks at work, on a pair of their own."""
    folder, enough = tmp_path, threading.Event()
    write_programs(folder)
    lab = Lab({"east": 2}, folder / "lab", broker_version, door=PATIENT_DOOR | FORWARD)
    set_up(lab, "backup_timeout_s = 60.0")
    with lab, ExitStack() as ends:
        primary, backup = in_sync(lab)
        programs = {name: start(name, folder, lab.nodes[backup].door) for name in FRAMEWORKS}
        for program in programs.values():
            for process in (program.sender, program.worker):
                ends.callback(process.wait)
                ends.callback(process.kill)
        ends.callback(enough.set)
        for program in programs.values():
            threading.Thread(target=program.feed, args=[enough], daemon=True).start()
        all_alive = alive(programs, folder)
        for name, program in programs.items():
            eventually(f"{name}: orders done", lambda p=program: all_alive() and len(p.done()) >= 100)
        in_sync(lab, applied=True)
        killed_at = time.time()
        replace_primary(lab, primary, backup)
        for name, program in programs.items():
            eventually(f"{name}: orders done after it", lambda p=program, n=program.fed + 100: all_alive() and len(p.done()) >= n)
        enough.set()
        for name, program in programs.items():
            assert program.sender.wait(240) == 0, (folder / f"{name}.sender.log").read_text()
            eventually(f"{name}: all orders done", lambda p=program: len(p.done()) >= p.fed)
            assert set(program.done()) == set(range(program.fed)), "none is lost, none invented"
            early = {order for order, when in program.done().items() if len(when) > 1 and when[0] < killed_at - 5.0}
            assert not early, "done twice, though acked long before the kill"


def test_without_the_key_a_backup_refuses(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    assert f"node {backup} is a backup; primary is {primary}".encode() in refused(pair.nodes[backup].door)
    with pytest.raises((ConnectionClosedByBroker, *LOST)):
        pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door))
    assert relayed_by(pair, backup) == 0
    assert command("list", lab=pair)[0] == 0


# ---- HAProxy ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def haproxy(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """The URL of the page's HAProxy, in front of the lab. Its check, its header and its time-outs are the page's."""
    program, port = find_tool("haproxy"), next(free_ports())
    if program is None:
        pytest.skip("there is no HAProxy on this machine; run scripts/tool haproxy")
    found = re.search(r"```haproxy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("bind :5672", f"bind 127.0.0.1:{port}")
    for number, name in enumerate(lab.nodes, 1):
        probes = tomllib.loads(lab.nodes[name].config.read_text())["http"]["probes"].rpartition(":")[2]
        door = urlsplit(lab.nodes[name].door).port
        text = text.replace(f"10.0.0.{number}:5672 check", f"127.0.0.1:{door} check port {probes}")
    config = tmp_path / "haproxy.cfg"
    config.write_text(text)
    assert subprocess.run([program, "-c", "-f", config], check=False).returncode == 0
    with open(tmp_path / "haproxy.log", "w") as log, subprocess.Popen([program, "-db", "-f", config], stdout=log, stderr=log) as running:
        user = urlsplit(lab.nodes["e1"].door).netloc.rpartition("@")[0]
        try:
            yield f"amqp://{user}@127.0.0.1:{port}"
        finally:
            running.terminate()


def test_clients_behind_haproxy_over_a_switchover_and_a_kill(lab: Lab, haproxy: str) -> None:
    """They have one address. Some 60 s: two changes of primary."""
    primary, backup = in_sync(lab)
    queue = f"balanced-{time.time_ns()}"

    def reached(source: str) -> bool:
        try:
            with RawClient(haproxy, source=source) as client:
                direct = relayed_by(lab, backup) == 0  # it takes a moment until HAProxy knows that one of them is no primary
                return direct and f"{source}:{client.socket.getsockname()[1]}" in lab.ctl(primary, "list_connections", "client_properties")
        except AssertionError:
            return False

    eventually("the broker to be told of the client's own address", lambda: reached("127.0.0.7"))
    declare(haproxy, queue, queue_type="quorum")
    clients = Clients([haproxy], queue)
    clients.start()
    try:
        eventually("the stream to flow", lambda: len(clients.consumed) > 100)
        switch_over(lab, backup)
        flowed = len(clients.consumed) + 100
        eventually("the stream to flow again", lambda: len(clients.consumed) > flowed)
        told_of = f"twice over the switchover: {clients.redelivered} redelivered, {clients.closes}"
        assert sorted(set(clients.consumed)) == sorted(clients.consumed), told_of
        in_sync(lab, applied=True)
        replace_primary(lab, backup, primary)
        lab.start(backup)
        clients.finish()
    finally:
        clients.stop()
    assert set(clients.consumed) == set(range(clients.published)), "none is lost"
    in_sync(lab)
