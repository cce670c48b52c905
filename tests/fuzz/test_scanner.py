"""The frame scanner and all that reads what it finds, under any bytes: no other error than FrameError (LrqError) leaves them, nothing is lost or
made up, and it is the same however the bytes are cut into pieces. LRQ_FUZZ=1000000 runs so many inputs; without it, a few thousand.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
from corpus import FOLDER, corpus, sessions
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker_plugin import frames, headers, logins, wire
from lrq_ha.replication.errors import LrqError

INPUTS = int(os.environ.get("LRQ_FUZZ", "2000"))
MANY = settings(max_examples=INPUTS, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = corpus()

octets = st.binary(max_size=300)
kinds = st.sampled_from([1, 1, 2, 3, 3, 8, 0, 9])
some_frames = st.builds(
    lambda kind, channel, payload, end: bytes((kind,)) + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + end,
    kinds,
    st.integers(0, 3),
    octets,
    st.sampled_from([b"\xce", b"\xce", b"\xce", b"\xcd"]),
)


def publish(channel: int, body: bytes, frame_max: int) -> bytes:
    return frames.publish_method(channel, "", "q") + b"".join(frames.content(channel, headers.header_payload(len(body)), body, frame_max))


contents = st.builds(
    publish,
    st.integers(0, 3),
    octets,
    st.integers(9, 200),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A session of the corpus with a few octets changed, cut out or put in."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 2)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)


inputs = st.one_of(octets, mutated(), st.lists(st.one_of(some_frames, contents, octets), max_size=6).map(b"".join))


def raw(buffer: bytes, item: frames.Item) -> list[bytes]:
    """The frames of an item, as they stood in the buffer."""
    end = frames.end_of(item)
    at, found = item[2] - 7, []
    while at < end:
        after = at + int.from_bytes(buffer[at + 3 : at + 7], "big") + 8
        found.append(buffer[at:after])
        at = after
    assert at == end
    return found


def fed(pieces: list[bytes], hold: int) -> tuple[list[bytes], bytes, bool]:
    """Every frame found when the bytes come in these pieces, what is left over, and whether they were refused."""
    left, found = b"", []
    for piece in pieces:
        buffer = left + piece
        try:
            items, used = frames.scan(buffer, 0, frames.FRAME_MIN_BYTES, hold)
        except frames.FrameError:
            return found, buffer, True
        for item in items:
            found += raw(buffer, item)
        left = buffer[used:]
    return found, left, False


def test_the_corpus_on_disk_is_what_is_written_here() -> None:
    assert {f"{name}.bin" for name in sessions()} <= {file.name for file in FOLDER.glob("*.bin")}
    for name, data in sessions().items():
        assert (FOLDER / f"{name}.bin").read_bytes() == data, "run: python tests/fuzz/corpus.py"


@MANY
@given(inputs, st.lists(st.integers(0, 400), max_size=8), st.sampled_from([0, 64, frames.HOLD_BYTES_MAX]))
@example(SEEDS[0], [1] * 8, 0)
def test_cut_or_whole_it_is_the_same(data: bytes, cuts: list[int], hold: int) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    found, left, refused = fed(pieces, hold)
    assert b"".join(found) + left == data[: sum(map(len, found)) + len(left)], "nothing is lost or made up"
    whole, rest, refused_whole = fed([data], hold)
    assert refused == refused_whole
    if not refused:
        assert b"".join(found) + left == data
        assert b"".join(whole) + rest == data
        if hold == 0:
            assert (found, left) == (whole, rest)


@MANY
@given(inputs)
def test_an_octet_at_a_time_is_the_same(data: bytes) -> None:
    data = data[:600]
    assert fed([data[i : i + 1] for i in range(len(data))], 0)[1:] == fed([data], 0)[1:] or fed([data], 0)[2]


PARTS = (frames.BASIC_PUBLISH, frames.HEADER, frames.BODY, frames.HEARTBEAT)
READERS: list[Callable[[bytes], object]] = [
    frames.decode_method,
    frames.publish_route,
    frames.deliver_arguments,
    frames.get_ok_arguments,
    frames.tag_and_bits,
    headers.check_header,
    headers.replication_id,
    headers.position,
    headers.deaths,
    lambda payload: headers.cut(payload, b"x-lrq-pos"),
    lambda payload: headers.stamp(payload, headers.position_field(b"1.1/1")),
    lambda payload: headers.header_value(payload, b"key"),
    logins.parse_start_ok,
    lambda payload: logins.credentials(logins.parse_start_ok(payload)),
    lambda payload: logins.own_properties(logins.parse_start_ok(payload).properties),
    lambda payload: logins.capability(logins.parse_start_ok(payload).properties, b"basic.nack"),
    lambda payload: logins.with_address(logins.parse_start_ok(payload).properties, "192.0.2.1:1"),
    lambda payload: logins.offer(payload, True),
    lambda payload: wire.decode_control(payload, "east"),
]


@pytest.mark.parametrize("reader", range(len(READERS)))
@settings(max_examples=max(100, INPUTS // len(READERS)), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(octets, mutated()))
def test_a_reader_raises_nothing_else(reader: int, data: bytes) -> None:
    payloads = [data]
    try:
        payloads += [data[item[2] : item[3]] for item in frames.scan(data[8:] if data.startswith(b"AMQP") else data)[0]]
    except frames.FrameError:
        pass
    for payload in payloads:
        try:
            READERS[reader](payload)
        except LrqError:
            pass


@MANY
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 2), octets), max_size=12))
def test_putting_contents_together_keeps_count(pieces: list[tuple[int, int, bytes]]) -> None:
    """Whatever comes in whatever order: what is held is counted, within its limit, and nothing is counted when all is gone."""
    budget = frames.Budget(500, "limit")
    parts = frames.Assembly(400, budget)
    for kind, channel, payload in pieces:
        if kind == frames.HEADER and len(payload) % 2:
            payload = headers.header_payload(len(payload))
        try:
            parts.take(kind, channel, payload)
        except frames.FrameError:
            parts.drop(channel)
        assert 0 <= budget.bytes <= 500
    parts.clear()
    assert budget.bytes == 0
