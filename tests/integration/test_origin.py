"""Where a client comes from: users that may only come from this machine, and what the broker is told of the others.

The client comes from outside if it connects by an address of this machine that is not loopback.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest
from load import User, add_users, eventually, in_sync
from pamqp import commands
from patience import PATIENT_DOOR
from raw_client import RawClient
from sidecar_process import Sidecar

from broker_plugin.amqp import encode, frames
from broker_plugin.amqp.proxy_header import proxy_header
from lrq_ha.lab import Lab
from lrq_ha.lab.ports import free_ports

pytestmark = pytest.mark.broker

REFUSED = b"ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the broker logfile."


@pytest.fixture(scope="module")
def outside() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = str(probe.getsockname()[0])
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 1}, tmp_path_factory.mktemp("origin"), broker_version, brokers_only=True) as found:
        add_guest(found)
        yield found


@pytest.fixture(scope="module")
def proxied(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pair whose brokers take the PROXY protocol, and have guest as their loopback user."""
    settings = {"loopback_users": "", "loopback_users.guest": "true"}
    with Lab({"east": 2}, tmp_path_factory.mktemp("proxied"), broker_version, proxy_protocol=True, settings=settings, door=PATIENT_DOOR) as found:
        add_guest(found)
        yield found


def add_guest(lab: Lab) -> None:
    for name in lab.nodes:
        add_users(lab, name, User("guest", "guest", [("/", ".*", ".*", ".*")]))


def as_user(lab: Lab, user: str) -> str:
    """USER:PASSWORD."""
    return "guest:guest" if user == "guest" else urlsplit(lab.nodes["e1"].door).netloc.rpartition("@")[0]


def answer(url: str) -> bytes:
    """Logs in; what came last: open-ok, or the connection.close with its text."""
    with RawClient(url, login=False) as client:
        try:
            client.login("/", 0, frames.FRAME_MAX_BYTES, {})
        except AssertionError:
            client.send(encode.method_frame(0, commands.Connection.CloseOk()))
            assert client.closed()
        return client.got[-1][2]


@pytest.fixture(scope="module")
def open_sidecar(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar whose door is open to the outside, beside e1."""
    door = f"0.0.0.0:{next(free_ports())}"
    with Sidecar(lab, tmp_path_factory.mktemp("open"), f"origin-{time.time_ns() % 10**6}", door=door) as sidecar:
        sidecar.becomes("active")
        yield sidecar


@pytest.mark.quick
def test_guest_comes_in_from_this_machine_only(lab: Lab, open_sidecar: Sidecar, outside: str) -> None:
    port = open_sidecar.door.rpartition(":")[2]
    assert answer(f"amqp://guest:guest@127.0.0.1:{port}")[:4] == b"\x00\x0a\x00\x29"
    assert REFUSED in answer(f"amqp://guest:guest@{outside}:{port}")
    assert "can only connect via localhost" in open_sidecar.said()
    assert answer(f"amqp://{as_user(lab, 'app')}@{outside}:{port}")[:4] == b"\x00\x0a\x00\x29"


def test_a_client_that_does_not_know_the_answer_is_just_closed(lab: Lab, open_sidecar: Sidecar, outside: str) -> None:
    """As RabbitMQ does: without the capability a refused login gets no connection.close."""
    with RawClient(f"amqp://guest:guest@{outside}:{open_sidecar.door.rpartition(':')[2]}", login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(encode.method_frame(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")))
        assert client.closed()
        assert frames.CONNECTION_CLOSE not in [kind for kind, *_ in client.got]
        assert frames.CONNECTION_TUNE not in [kind for kind, *_ in client.got]


def test_the_broker_is_told_the_address_in_client_properties(lab: Lab, open_sidecar: Sidecar, outside: str) -> None:
    parameters = pika.URLParameters(f"amqp://{as_user(lab, 'app')}@{outside}:{open_sidecar.door.rpartition(':')[2]}")
    for name in ("orders", ""):
        named = {"connection_name": name} if name else {}
        parameters.client_properties = {**named, "lrq_client_address": "6.6.6.6:6"}
        is_told(lab, parameters, name)


def is_told(lab: Lab, parameters: pika.URLParameters, name: str) -> None:
    """The broker shows the client's address, and its name if it has one; its log has the name, or else the address."""
    with pika.BlockingConnection(parameters) as connection:
        here = connection._impl._transport._sock.getsockname()
        address = f"{here[0]}:{here[1]}"
        rows = lab.ctl("e1", "list_connections", "client_properties")
        row = next(line for line in rows.splitlines() if address in line)
        assert re.search(rf'lrq_client_address.{{1,10}}{re.escape(address)}', row), row
        assert "6.6.6.6" not in row
        shown = name or address
        assert re.search(rf'connection_name.{{1,10}}{re.escape(shown)}\W', row), row
        eventually("the broker's log", lambda: shown in lab.nodes["e1"].broker_log.read_text())


def test_with_the_proxy_protocol_the_broker_sees_the_client_itself(proxied: Lab) -> None:
    primary, _ = in_sync(proxied)  # the sidecars' own connections have the header, too
    with pika.BlockingConnection(pika.URLParameters(proxied.nodes[primary].door)) as connection:
        port = connection._impl._transport._sock.getsockname()[1]
        door = urlsplit(proxied.nodes[primary].door).port
        rows = proxied.ctl(primary, "list_connections", "user", "peer_host", "peer_port", "host", "port", "client_properties").splitlines()
        row = next(line for line in rows if line.startswith("app"))
        assert row.split("\t")[1:5] == ["127.0.0.1", str(port), "127.0.0.1", str(door)]
        assert "lrq_client_address" not in row
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("proxied", durable=True)
        channel.basic_publish("", "proxied", b"x")
        assert channel.basic_get("proxied", auto_ack=True)[2] == b"x"


@pytest.mark.parametrize("doors_own", [True, False])
def test_with_the_proxy_protocol_the_door_still_keeps_guest_in(proxied: Lab, outside: str, tmp_path: Path, doors_own: bool) -> None:
    """RabbitMQ 3.10 looks at the socket, not at the header: its own loopback_users let in everybody who comes by the door. 4.3 does not."""
    door = f"0.0.0.0:{next(free_ports())}"

    def edit(text: str) -> str:
        listed = "[door]" if doors_own else "[door]\nloopback_users = []"
        return text.replace("[door]", listed).replace("[broker]", "[broker]\nproxy_protocol = true")

    with Sidecar(proxied, tmp_path, f"origin-{time.time_ns() % 10**6}", door=door, edit=edit) as sidecar:
        sidecar.becomes("active")
        port = door.rpartition(":")[2]
        assert answer(f"amqp://guest:guest@127.0.0.1:{port}")[:4] == b"\x00\x0a\x00\x29"
        refused = REFUSED in answer(f"amqp://guest:guest@{outside}:{port}")
        assert refused == (doors_own or not proxied.version.startswith("3."))


# ---- load balancers -----------------------------------------------------------------------------------------------------

CLIENT, DOOR = ("192.0.2.7", 4_711), ("198.51.100.2", 5_672)
V1 = b"PROXY TCP4 192.0.2.7 198.51.100.2 4711 5672\r\n"
V2 = proxy_header(CLIENT, DOOR)
HEADER_S = 2.0


@pytest.fixture(scope="module")
def balanced(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar beside e1 to which load balancers may come from 127.0.0.0/8, and from no other address."""

    def edit(text: str) -> str:
        return text.replace("[door]\n", '[door]\nproxy_protocol = ["127.0.0.0/8"]\n')

    door = f"0.0.0.0:{next(free_ports())}"
    folder = tmp_path_factory.mktemp("balanced")
    with Sidecar(lab, folder, f"origin-{time.time_ns() % 10**6}", door=door, edit=edit, handshake_timeout_s=HEADER_S) as sidecar:
        sidecar.becomes("active")
        yield sidecar


@contextmanager
def through(lab: Lab, sidecar: Sidecar, *pieces: bytes, host: str = "127.0.0.1", user: str = "app") -> Iterator[RawClient]:
    """A client whose first bytes are these; not logged in."""
    with RawClient(f"amqp://{as_user(lab, user)}@{host}:{sidecar.door.rpartition(':')[2]}", login=False) as client:
        for piece in pieces:
            client.send(piece)
            time.sleep(0.05 if len(pieces) > 1 else 0)
        yield client


@pytest.mark.quick(only="pieces2")
@pytest.mark.parametrize("pieces", [[V1], [V2], [V2[:1], V2[1:13], V2[13:20], V2[20:]], [V1[:1], V1[1:9], V1[9:]]])
def test_a_load_balancer_says_where_a_client_is(lab: Lab, balanced: Sidecar, pieces: list[bytes]) -> None:
    with through(lab, balanced, *pieces) as client:
        client.login("/", 0, 0, {})
        assert "192.0.2.7:4711" in lab.ctl("e1", "list_connections", "client_properties")


def test_its_loopback_users_are_its_clients(lab: Lab, balanced: Sidecar) -> None:
    """guest is let in by a balancer on this machine if it is a client of this machine."""
    for header, is_let_in in ((V2, False), (proxy_header(("127.0.0.1", 5), DOOR), True), (b"PROXY UNKNOWN\r\n", True), (b"", True)):
        with through(lab, balanced, header, user="guest") as client:
            if is_let_in:
                client.login("/", 0, 0, {})
            else:
                with pytest.raises(AssertionError):
                    client.login("/", 0, 0, {})
                assert REFUSED in client.got[-1][2]


@pytest.mark.parametrize("header", [V1, V2])
def test_no_other_address_may_claim_to_be_one(lab: Lab, balanced: Sidecar, outside: str, header: bytes) -> None:
    with through(lab, balanced, header, host=outside) as client:
        assert client.socket.recv(8) == frames.PROTOCOL_HEADER, "AMQP's own answer to another protocol"
        assert client.closed()
    eventually("the log", lambda: "its address is not in door.proxy_protocol" in balanced.said())


@pytest.mark.parametrize("data", [V1[:-1], V2[:15], V2[:20], V1[:7]])
def test_a_header_that_does_not_end_is_not_waited_for(lab: Lab, balanced: Sidecar, data: bytes) -> None:
    with through(lab, balanced, data) as client:
        assert client.closed(20 * HEADER_S)
    with through(lab, balanced, data) as client:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.closed()
    eventually("the log", lambda: "no whole PROXY protocol header" in balanced.said() and "ended within a header" in balanced.said())


def test_a_header_that_comes_byte_by_byte_has_its_time(lab: Lab, balanced: Sidecar) -> None:
    with through(lab, balanced) as client:
        began, sent = time.monotonic(), 0
        try:
            for sent in range(len(V2)):
                client.send(V2[sent : sent + 1])
                time.sleep(HEADER_S / 8)
        except OSError:
            pass
        assert sent < len(V2) - 1, f"{sent} bytes in {time.monotonic() - began:.1f} s"


@pytest.mark.parametrize(
    "data", [b"PROXY TCP4 nowhere else 1 2\r\n", b"POST / HTTP/1.1\r\n", b"PROXY " + b"x" * 200, V2[:12] + b"\xff" * 40, b"\r\n" * 20]
)
def test_another_form_of_a_header_is_closed(lab: Lab, balanced: Sidecar, data: bytes) -> None:
    with through(lab, balanced, data) as client:
        assert client.closed(HEADER_S)
