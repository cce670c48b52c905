"""Headers whose kind or value RabbitMQ does not read: it ends the connection over them, so they must not get to where that is a node's own."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
from door_rig import Rig
from load import declare, eventually, set_up, told
from raw_client import RawClient, publish

from broker_plugin.amqp import frames
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

INTERNAL_ERROR, FRAME_ERROR = 541, 501
DECIMAL = b"D\x02\x00\x00\x01\x3a"
FINE = (
    *(kind.encode() + bytes(size) for kind, size in zip("tbBsuIilLTV", (1, 1, 1, 2, 2, 4, 4, 8, 8, 8, 0))),
    DECIMAL, b"f" + struct.pack(">f", 1.5), b"d" + struct.pack(">d", -1e308),
)  # fmt: skip
NOT_READ = (
    b"U\x00\x01", b"f" + struct.pack(">f", math.nan), *(b"d" + struct.pack(">d", number) for number in (math.nan, math.inf, -math.inf)),
)  # fmt: skip


def within(value: bytes) -> Iterator[bytes]:
    """By itself, in a table, and in an array."""
    inner = b"\x01i" + value
    yield from (value, b"F" + struct.pack(">I", len(inner)) + inner, b"A" + struct.pack(">I", len(value)) + value)


def refusal(url: str, queue: str, value: bytes) -> int:
    """0: a message with this header is confirmed; else the reply code with which the connection is ended over it."""
    with RawClient(url) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, queue, b"x", fields=b"\x01h" + value))
        found = client.read()
        while found is not None and found[0] == frames.HEARTBEAT:
            found = client.read()
        assert found is not None
        if found[0] == frames.BASIC_ACK:
            return 0
        assert found[0] == frames.CONNECTION_CLOSE
        return int.from_bytes(found[2][4:6], "big")


@pytest.mark.quick("3.10", "4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_the_door_takes_what_the_broker_takes(rig: Rig, kind: str) -> None:
    queue = rig.declare(rig.channel(), kind=kind)
    urls = (rig.broker_url(rig.primary), rig.url)
    for value in FINE:
        for each in within(value):
            assert [refusal(url, queue, each) for url in urls] == [0, 0], each
    rig.converge()
    for value in NOT_READ:
        for each in within(value):
            # The door's own refusal: what the broker refused stood in the log before, and other nodes' brokers would not read it either.
            assert [refusal(url, queue, each) for url in urls] == [INTERNAL_ERROR, FRAME_ERROR], each


@pytest.fixture(scope="module")
def local(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 1}, tmp_path_factory.mktemp("kinds") / "lab", broker_version)
    set_up(lab, """completion = { '^local-' = "local" }\n""")
    with lab:
        yield lab


def test_a_header_that_a_stream_does_not_take_with_local_completion(local: Lab) -> None:
    """A decimal number, at the top. It was confirmed, and was then what the node itself had to publish: so each one ended its incarnation."""
    node = local.nodes["e1"]
    eventually("the primary", lambda: local.status("e1")["role"] == "active")
    declare(node.door, "local-stream", queue_type="stream")
    declare(node.door, "local-classic")
    before = told(local, "e1")["generation"]
    assert refusal(node.door, "local-classic", DECIMAL) == 0
    for _ in range(3):
        assert [refusal(url, "local-stream", DECIMAL) for url in (node.broker, node.door)] == [INTERNAL_ERROR, INTERNAL_ERROR]
        assert refusal(node.door, "local-stream", b"V") == 0
    assert told(local, "e1")["generation"] == before
