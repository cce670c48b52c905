"""TLS on the door, to the broker, between nodes and sites; certificates that are replaced while it runs; logins by certificate."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import ssl
import struct
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from load import command, eventually, primary_of
from pamqp import commands
from patience import PATIENT_DOOR
from pika.exceptions import AMQPConnectionError, ConnectionClosedByBroker
from publisher_api import BlockingPublisher, no_primary
from raw_client import RawClient
from sidecar_process import Sidecar

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab import Lab
from lrq_ha.publisher import NoPrimary, Publisher
from lrq_ha.streams.errors import NoNode

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

HANDSHAKE_S = 2.0


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2, "west": 1}, tmp_path_factory.mktemp("tls"), broker_version, tls=True, door=PATIENT_DOOR) as found:
        yield found


def trusting(lab: Lab, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    assert lab.authority is not None
    context = ssl.create_default_context(cafile=str(lab.authority.ca))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def parameters(lab: Lab, name: str, context: ssl.SSLContext | None = None) -> pika.URLParameters:
    found = pika.URLParameters(lab.nodes[name].door)
    found.ssl_options = pika.SSLOptions(context or trusting(lab), "127.0.0.1")
    return found


def primary(lab: Lab) -> str:
    return primary_of(lab)


def port(lab: Lab, name: str) -> int:
    found = urlsplit(lab.nodes[name].door).port
    assert found is not None
    return found


def serial(lab: Lab, name: str) -> str:
    """Of the certificate that a new connection is shown."""
    plain = socket.create_connection(("127.0.0.1", port(lab, name)), 60)
    with trusting(lab).wrap_socket(plain, server_hostname="127.0.0.1") as secured:
        return str((secured.getpeercert() or {})["serialNumber"])


def said(lab: Lab, name: str) -> str:
    return lab.nodes[name].log.read_text()


def works(lab: Lab, found: pika.URLParameters) -> None:
    """What is published with confirms comes back, also a message of many frames."""
    with pika.BlockingConnection(found) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        queue = channel.queue_declare(f"tls-{time.time_ns()}", durable=True).method.queue
        bodies = [b"small", os.urandom(3 << 20), b""]
        for body in bodies:
            channel.basic_publish("", queue, body)
        assert [channel.basic_get(queue, auto_ack=True)[2] for _ in bodies] == bodies
        channel.queue_delete(queue)


@pytest.mark.quick
def test_a_pair_and_a_site_over_tls_only(lab: Lab) -> None:
    """Clients, broker, peer and site: everything that the sidecars open or take is TLS, and in step."""
    works(lab, parameters(lab, primary(lab)))
    eventually("both in the set", lambda: set(lab.status(primary(lab))["members"]) == {"e1", "e2"})
    config = lab.nodes["e1"].config.read_text()
    assert "amqp://" not in config


# -- the project's own clients


Api = Callable[..., Publisher | BlockingPublisher]


def doors(lab: Lab) -> list[str]:
    return [lab.nodes[name].door for name in ("e1", "e2")]


def test_both_publishers(lab: Lab, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an authority that they are given, and with one that the system trusts: to a queue, and to the site."""
    assert lab.authority is not None
    queue = f"tls-publisher-{time.time_ns()}"
    with pika.BlockingConnection(parameters(lab, primary(lab))) as connection:
        connection.channel().queue_declare(queue, durable=True)
    for given in (trusting(lab), None):
        if given is None:
            monkeypatch.setenv("SSL_CERT_FILE", str(lab.authority.ca))
        publisher = api(doors(lab), f"{queue}-{given is None}", "tls", tls=given)
        try:
            bodies = [b"small", os.urandom(1 << 20)]
            confirms = [publisher.publish("", queue, body) for body in bodies]
            confirms.append(publisher.transmit_log_entry_message(b"over TLS", ["west"]))
            for confirm in confirms:
                confirm.result(60)
        finally:
            publisher.close()
        with pika.BlockingConnection(parameters(lab, primary(lab))) as connection:
            channel = connection.channel()
            assert [channel.basic_get(queue, auto_ack=True)[2] for _ in bodies] == bodies
    eventually("the session with west", lambda: lab.status(primary(lab))["sessions"]["west"]["connected"])


@pytest.mark.quick
def test_publishers_trust_nobody_else(lab: Lab, api: Api) -> None:
    with pytest.raises(NoPrimary, match="CERTIFICATE_VERIFY_FAILED"):
        raise no_primary(lambda timeout_s: api(doors(lab), "tls-nobody", "tls", connect_timeout_s=timeout_s))


def test_the_spark_source(lab: Lab) -> None:
    """Read through the site's door what came there; without the authority, refused at once and with the reason."""
    source = pytest.importorskip("lrq_ha.spark.source", reason="PySpark is not installed")
    assert lab.authority is not None
    client = f"spark{time.time_ns()}"
    sent = [b"%d over TLS" % i for i in range(20)]
    with Publisher(doors(lab), f"{client}-app", client, tls=trusting(lab)) as publisher:
        for payload in sent:
            publisher.transmit_log_entry_message(payload, ["west"])
        publisher.flush(60)
    options = {"nodes": lab.nodes["w1"].door, "subscribe": f"LRQ_Recv_{client}_east", "tlsca": str(lab.authority.ca)}

    def read() -> list[bytes]:
        found = source.LrqDataSource(options)
        reader = found.reader(found.schema())
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [row["payload"] for batch in batches for row in batch.to_pylist() if row["payload"] is not None]

    eventually("all of it at the site", lambda: len(read()) == len(sent))
    assert read() == sent
    del options["tlsca"]
    with pytest.raises(NoNode, match="CERTIFICATE_VERIFY_FAILED") as caught:
        read()
    assert not caught.value.retriable


def test_operators_commands_through_a_door(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`adopt` and `republish`, told of the door by the environment and of its authority, or not."""
    assert lab.authority is not None
    queue = f"tls-tail-{time.time_ns()}"
    made = {"vhost": "/", "name": queue, "durable": True, "auto_delete": False, "arguments": {}}
    definitions = {"vhosts": [{"name": "/"}], "queues": [made], "exchanges": [], "bindings": [], "policies": []}
    (tmp_path / "definitions.json").write_text(json.dumps(definitions))
    entry = {"kind": "publish", "user": "app", "replication_id": None, "epoch": 1, "sequence": 1, "vhost": "/", "exchange": "", "routing_key": queue}
    entry |= {"header": base64.b64encode(content_header.header_payload(2)).decode(), "body": base64.b64encode(b"ok").decode()}
    (tmp_path / "tail.jsonl").write_text(json.dumps(entry) + "\n")
    adopt = ["adopt", "--definitions", str(tmp_path / "definitions.json")]
    republish = ["republish", str(tmp_path / "tail.jsonl")]
    monkeypatch.setenv("LRQ_HA_DOOR", lab.nodes[primary(lab)].door)
    for arguments in (adopt, republish):
        code, told = command(*arguments)
        assert code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in told, told
    ca = ["--ca", str(lab.authority.ca)]
    code, told = command(*adopt, *ca)
    assert (code, f"{queue}: 0 of 0 messages adopted (none was without a position)" in told) == (0, True), told
    assert command(*republish, *ca) == (0, "1 messages published and confirmed")
    with pika.BlockingConnection(parameters(lab, primary(lab))) as connection:
        assert connection.channel().basic_get(queue, auto_ack=True)[2] == b"ok"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_a_client_without_tls_or_with_an_old_one_or_another_authority(lab: Lab, tmp_path: Path) -> None:
    name = primary(lab)
    with socket.create_connection(("127.0.0.1", port(lab, name)), 60) as plain:
        plain.sendall(frames.PROTOCOL_HEADER)
        assert frames.PROTOCOL_HEADER not in plain.recv(100)
    old = trusting(lab)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((AMQPConnectionError, ssl.SSLError)):
        pika.BlockingConnection(parameters(lab, name, old))
    with pytest.raises((AMQPConnectionError, ssl.SSLError)):
        pika.BlockingConnection(parameters(lab, name, ssl.create_default_context()))
    works(lab, parameters(lab, name))


def test_a_certificate_is_replaced_while_it_runs(lab: Lab) -> None:
    """By itself when the files change; connections that stand stay; files that cannot be used change nothing."""
    assert lab.authority is not None
    name = primary(lab)
    pid, before = lab.nodes[name].sidecar_pid, serial(lab, name)
    with pika.BlockingConnection(parameters(lab, name)) as old:
        channel = old.channel()
        certificate, key = lab.authority.issue(name)
        eventually("the new certificate", lambda: serial(lab, name) != before)
        assert channel.queue_declare("", exclusive=True).method.queue
        now = serial(lab, name)
        good = key.read_bytes()
        key.write_text("no key")
        eventually("a complaint", lambda: "stay as they were" in said(lab, name))
        os.kill(lab.nodes[name].sidecar_pid or 0, signal.SIGHUP)
        eventually("another", lambda: said(lab, name).count("stay as they were") > 1)
        assert serial(lab, name) == now
        key.write_bytes(good)
        eventually("the good key", lambda: said(lab, name).rindex("were read again") > said(lab, name).rindex("stay as they were"))
        assert channel.queue_declare("", exclusive=True).method.queue
    works(lab, parameters(lab, name))
    assert lab.nodes[name].sidecar_pid == pid
    assert "no key" not in said(lab, name)
    assert certificate.exists()


@contextmanager
def half_open(door: str) -> Iterator[list[socket.socket]]:
    """Connections that begin a TLS handshake, or not even that."""
    host, _, number = door.rpartition(":")
    sockets = [socket.create_connection((host, int(number)), 60) for _ in range(200)]
    try:
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(40)  # of 512 announced bytes
        for i, one in enumerate(sockets):
            if i % 2:
                one.sendall(hello[: 5 + i % 40])
        yield sockets
    finally:
        for one in sockets:
            one.close()


def test_half_open_handshakes_cost_nobody(lab: Lab) -> None:
    name = primary(lab)
    with half_open(f"127.0.0.1:{port(lab, name)}"):
        eventually("them to be counted", lambda: lab.status(name)["sockets"] >= 200)
        works(lab, parameters(lab, name))
    eventually("the sockets to be gone", lambda: lab.status(name)["sockets"] <= 10)


def test_half_open_handshakes_end_in_time(lab: Lab, tmp_path: Path) -> None:
    """At a door beside the broker of e1, with its certificate, that gives them HANDSHAKE_S."""
    tls = tomllib.loads(lab.nodes["e1"].config.read_text())["tls"]
    files = "".join(f"{key} = {json.dumps(value)}\n" for key, value in tls.items())
    tables = f'[door.tls]\nverify = "optional"\n{files}[tls]\n{files}'
    with Sidecar(lab, tmp_path, f"hurried-{time.time_ns() % 10**9}", more=tables, handshake_timeout_s=HANDSHAKE_S) as hurried:
        hurried.becomes("active")
        with half_open(hurried.door) as sockets:
            for one in sockets:
                one.settimeout(120)
                with suppress(ConnectionResetError):
                    while one.recv(100):
                        pass
        eventually("the sockets to be gone", lambda: hurried.status()["sockets"] == 0)
        eventually("all to be told of", lambda: hurried.said().count(f"longer than {HANDSHAKE_S} seconds") == len(sockets))


def test_a_door_that_requires_certificates_and_tls_1_3_takes_nothing_less(lab: Lab, tmp_path: Path) -> None:
    assert lab.authority is not None
    tls = tomllib.loads(lab.nodes["e1"].config.read_text())["tls"]
    files = "".join(f"{key} = {json.dumps(value)}\n" for key, value in tls.items())
    tables = f'[door.tls]\nverify = "required"\nminimum_version = "1.3"\n{files}[tls]\n{files}'
    with Sidecar(lab, tmp_path, f"strict-{time.time_ns() % 10**9}", more=tables) as strict:
        strict.becomes("active")

        def tried(context: ssl.SSLContext) -> pika.URLParameters:
            found = parameters(lab, "e1", context)
            found.port = int(strict.door.rpartition(":")[2])
            return found

        with_certificate, without = trusting(lab, lab.authority.issue("a-client", "anybody")), trusting(lab)
        older = trusting(lab, lab.authority.issue("a-client", "anybody"))
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        for context in (without, older):
            with pytest.raises((AMQPConnectionError, OSError)):
                pika.BlockingConnection(tried(context))
        works(lab, tried(with_certificate))

        spark = pytest.importorskip("lrq_ha.spark.options", reason="PySpark is not installed")
        streams = pytest.importorskip("lrq_ha.streams.node_connection")
        certificate, key = lab.authority.issue("a-client", "anybody")
        options = {"nodes": f"{lab.nodes['e1'].door.rpartition(':')[0]}:{strict.door.rpartition(':')[2]}", "subscribe": "LRQ_Recv_a_b"}
        own = {"tlsCert": str(certificate), "tlsKey": str(key)}
        for more, taken in ((own, True), ({}, False)):
            access = spark.parse_options(options | {"tlsCa": str(lab.authority.ca)} | more).access
            with nullcontext() if taken else pytest.raises(NoNode), streams.NodeConnection.open(access.reader_parameters(), "reader", 3):
                pass


# -- logins by certificate


@pytest.fixture(scope="module")
def mapped(lab: Lab) -> str:
    """The primary, with a mapping of the certificate `commands` to the user of the applications."""
    name = primary(lab)
    url = urlsplit(lab.nodes[name].door)
    config = lab.nodes[name].config
    users = f'[[door.tls.users]]\ncommon_name = "orders"\nuser = "{url.username}"\npassword = "{url.password}"\n'
    config.write_text(config.read_text() + users)
    lab.kill(f"{name}.sidecar")
    lab.start(f"{name}.sidecar")
    lab.wait_role(name, "active")
    return name


def external(lab: Lab, name: str, common_name: str | None) -> pika.URLParameters:
    assert lab.authority is not None
    certificate = lab.authority.issue(f"client-{common_name}", common_name) if common_name else None
    found = parameters(lab, name, trusting(lab, certificate))
    found.credentials = pika.credentials.ExternalCredentials()
    return found


def test_external_is_the_user_that_the_certificate_is_mapped_to(lab: Lab, mapped: str) -> None:
    works(lab, external(lab, mapped, "orders"))
    with pika.BlockingConnection(external(lab, mapped, "orders")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.basic_publish("", queue, b"x", pika.BasicProperties(user_id="app"))  # the broker checks who it is
        assert channel.basic_get(queue, auto_ack=True)[2] == b"x"


@pytest.mark.parametrize("common_name", ["somebody", None])
def test_external_is_neither_offered_to_nor_taken_from_anybody_else(lab: Lab, mapped: str, common_name: str | None) -> None:
    with pytest.raises(AMQPConnectionError):  # pika sees that it is not offered
        pika.BlockingConnection(external(lab, mapped, common_name))
    context = trusting(lab, lab.authority.issue(f"client-{common_name}", common_name) if lab.authority and common_name else None)
    with RawClient(lab.nodes[mapped].door, login=False, context=context) as client:
        client.send(frames.PROTOCOL_HEADER)
        start: Any = frames.decode_method(client.expect(frames.CONNECTION_START))
        assert start.mechanisms.split() == ["PLAIN", "AMQPLAIN"]
        client.send(encode.method_frame(0, commands.Connection.StartOk({}, "EXTERNAL", "", "en_US")))
        assert client.closed()
        kind, _, payload = client.got[-1]
        assert kind == frames.CONNECTION_CLOSE
        assert struct.unpack_from(">H", payload, 4)[0] == 403
        assert b"EXTERNAL" in payload
    works(lab, parameters(lab, mapped))


def test_a_certificate_of_another_authority_is_none(lab: Lab, mapped: str, tmp_path: Path) -> None:
    from lrq_ha.lab.certificates import Authority

    other = Authority(tmp_path / "other")
    found = parameters(lab, mapped, trusting(lab, other.issue("orders")))
    found.credentials = pika.credentials.ExternalCredentials()
    with pytest.raises((AMQPConnectionError, ConnectionClosedByBroker)):
        pika.BlockingConnection(found)
    assert "no TLS" in said(lab, mapped)
