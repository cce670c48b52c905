"""Batches in several records: whole again for a reader, whatever a killed writer left in between. And the versions of nodes."""

from __future__ import annotations

from typing import Any

import pytest
from test_back_pressure import Backup, run

from broker_plugin.log import codec
from broker_plugin.log.codec import PART_BYTES_MAX, Joiner, parts_of
from lrq_ha import __version__
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Hello
from lrq_ha.replication.log import LogState
from lrq_ha.replication.roles import Role

Record = tuple[dict[str, Any], bytes]


def read(records: list[Record]) -> list[Record]:
    joiner: Joiner[dict[str, Any]] = Joiner()
    return [whole for headers, body in records if (whole := joiner.take(headers, headers, body)) is not None]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES_MAX])
def test_a_small_batch_is_one_record(size: int) -> None:
    assert parts_of({"a": 1}, bytes(size)) == [({"a": 1}, bytes(size))]


@pytest.mark.parametrize("size", [PART_BYTES_MAX + 1, 2 * PART_BYTES_MAX, 3 * PART_BYTES_MAX + 7])
def test_a_large_one_is_joined_again(size: int) -> None:
    body = bytes(i & 255 for i in range(251)) * (size // 251 + 1)
    records = parts_of({"a": 1}, body[:size])
    assert all(len(part) <= PART_BYTES_MAX for _, part in records)
    assert read(records) == [({"a": 1, codec.PARTS: len(records)}, body[:size])]


def test_what_is_unfinished_is_dropped() -> None:
    large = parts_of({"a": 1}, bytes(3 * PART_BYTES_MAX))
    small = [({"b": 2}, b"b")]
    assert read(large[:2] + small) == small
    assert read(large[1:] + small) == small  # reading began in the middle
    assert [len(body) for _, body in read(large[:2] + large)] == [3 * PART_BYTES_MAX]
    assert read(large[:1] + large[2:] + small) == small


# ---- versions --------------------------------------------------------------------------------------------------------------

HELLO = Hello(
    Role.READY, LogState(top=257, end=10), 0, 257, wants_answer=True, paused=True, lacks="a vhost", software="0.2", shared=(("mode", '"strict"'),)
)


def told(**values: Any) -> bytes:
    """A Hello of node 2 on the wire, with other values of its message."""
    control = pb.Control.FromString(codec.encode_control(2, "east", HELLO))
    for name, value in values.items():
        setattr(control.hello, name, value)
    return control.SerializeToString()


def test_a_hello_comes_as_it_was_sent() -> None:
    assert codec.decode_control(told(), "east") == (2, HELLO)
    hello = pb.Control.FromString(told()).hello
    assert (hello.protocol, hello.protocol_min) == (codec.PROTOCOL, codec.PROTOCOL_MIN)


@pytest.mark.parametrize(
    ("values", "speaks"),
    [
        ({"protocol": codec.PROTOCOL + 3, "protocol_min": codec.PROTOCOL + 1}, f"{codec.PROTOCOL + 1} to {codec.PROTOCOL + 3}"),
        ({"protocol": codec.PROTOCOL_MIN - 1, "protocol_min": codec.PROTOCOL_MIN - 1}, str(codec.PROTOCOL_MIN - 1)),
    ],
    ids=["newer", "older"],
)
def test_a_node_that_speaks_no_protocol_of_this_one_is_refused_and_both_are_told(values: dict[str, int], speaks: str) -> None:
    """In a group of both, what one writes the other would not understand, or pass over."""

    def check(backup: Backup) -> None:
        with pytest.raises(LrqError):
            backup.receiving.control(backup.peer_end, told(software="9.1", **values))
        said = f"e2: it runs lrq-ha 9.1, which speaks protocol {speaks}; this node runs lrq-ha {__version__}, which speaks"
        assert said in backup.receiving.refused
        assert said.encode() in backup.primary.written

    run(check)


def test_a_node_that_also_speaks_a_newer_protocol_is_heard() -> None:
    assert codec.decode_control(told(protocol=codec.PROTOCOL + 1), "east") == (2, HELLO)


def test_a_message_of_an_unknown_kind_is_refused() -> None:
    newer = pb.Control(sender=2, group="east").SerializeToString() + b"\xf2\x3f\x02\x08\x01"  # a message of field 1022
    with pytest.raises(MalformedInput, match="a control message of an unknown kind"):
        codec.decode_control(newer, "east")
