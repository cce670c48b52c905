"""The frame scanner and all that reads what it finds, under any bytes: no other error than FrameError (LrqError) leaves them, nothing is lost or
made up, and it is the same however the bytes are cut into pieces.

Hypothesis looks for small inputs, a thousand per test. `LRQ_FUZZ=1000000` is how many sessions of the corpus are changed at random and taken through
everything besides (without it, a few thousand); `LRQ_FUZZ_SEED` makes them other ones.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable

import pytest
from corpus import FOLDER, corpus, mutated, rng_of, sessions
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker_plugin.amqp import content_assembly, content_header, encode, frames, sasl
from broker_plugin.log import codec, stamps
from lrq_ha.errors import LrqError

INPUTS = int(os.environ.get("LRQ_FUZZ", "4000"))
PARTS_OF_INPUTS = 4  # tests of their own, so that they may run in several processes
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
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
    return encode.publish_method(channel, "", "q") + b"".join(encode.content(channel, content_header.header_payload(len(body)), body, frame_max))


contents = st.builds(
    publish,
    st.integers(0, 3),
    octets,
    st.integers(9, 200),
)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
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


inputs = st.one_of(octets, changed(), st.lists(st.one_of(some_frames, contents, octets), max_size=6).map(b"".join))


def raw(buffer: bytes, item: frames.Item) -> list[bytes]:
    """The frames of an item, as they stood in the buffer, and that they are what it says."""
    end = frames.end_of(item)
    at, found = item[2] - 7, []
    while at < end:
        after = at + int.from_bytes(buffer[at + 3 : at + 7], "big") + 8
        found.append(buffer[at:after])
        at = after
    assert at == end
    kinds = [each[0] for each in found]
    assert {int.from_bytes(each[1:3], "big") for each in found} == {item[1]}
    assert {each[-1] for each in found} == {frames.FRAME_END}
    if item[6]:
        assert kinds == [frames.METHOD, frames.HEADER, *[frames.BODY] * (len(found) - 2)]
        assert found[1] == buffer[item[4] - 7 : item[5] + 1]
        assert frames.body_of(buffer, item[5], item[6]) == b"".join(each[7:-1] for each in found[2:])
        assert sum(len(each) - 8 for each in found[2:]) == int.from_bytes(found[1][11:19], "big")
    else:
        assert kinds == [frames.METHOD if item[0] >= frames.METHOD_MIN else item[0]]
    return found


def fed(pieces: list[bytes], hold: int) -> tuple[list[bytes], bytes, bool]:
    """Every frame found when the bytes come in these pieces, what is left over, and whether they were refused."""
    left, found = b"", []
    for piece in pieces:
        buffer = left + piece
        refused = False
        try:
            items, used = frames.scan(buffer, 0, frames.FRAME_MIN_BYTES, hold)
        except frames.FrameError as error:
            items, used = error.before
            refused = True
        for item in items:
            found += raw(buffer, item)
        left = buffer[used:]
        if refused:
            return found, left, True
    return found, left, False


def test_the_corpus_on_disk_is_what_is_written_here() -> None:
    assert {f"{name}.bin" for name in sessions()} <= {file.name for file in FOLDER.glob("*.bin")}
    for name, data in sessions().items():
        assert (FOLDER / f"{name}.bin").read_bytes() == data, "run: python tests/fuzz/corpus.py"


@MANY
@given(inputs, st.lists(st.integers(0, 400), max_size=8), st.sampled_from([0, 64, frames.HOLD_BYTES_MAX]))
@example(SEEDS[0], [1] * 8, 0)
def test_cut_or_whole_it_is_the_same(data: bytes, cuts: list[int], hold: int) -> None:
    cut_or_whole(data, cuts, hold)


def cut_or_whole(data: bytes, cuts: list[int], hold: int) -> None:
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
        assert found == whole
        assert refused or left == rest


@MANY
@given(inputs)
def test_an_octet_at_a_time_is_the_same(data: bytes) -> None:
    by_octets(data[:600])


def by_octets(data: bytes) -> None:
    found, left, refused = fed([data[i : i + 1] for i in range(len(data))], 0)
    whole, rest, refused_whole = fed([data], 0)
    assert refused == refused_whole
    assert found == whole
    assert refused or left == rest


PARTS = (frames.BASIC_PUBLISH, frames.HEADER, frames.BODY, frames.HEARTBEAT)
READERS: list[Callable[[bytes], object]] = [
    frames.decode_method,
    frames.publish_route,
    frames.deliver_arguments,
    frames.get_ok_arguments,
    frames.tag_and_bits,
    content_header.check_header,
    stamps.replication_id,
    stamps.position,
    content_header.deaths,
    lambda payload: content_header.cut(payload, b"x-lrq-pos"),
    lambda payload: stamps.stamp(payload, stamps.position_field(b"1.1/1")),
    lambda payload: content_header.header_value(payload, b"key"),
    sasl.parse_start_ok,
    lambda payload: sasl.credentials(sasl.parse_start_ok(payload)),
    lambda payload: sasl.own_properties(sasl.parse_start_ok(payload).properties),
    lambda payload: sasl.capability(sasl.parse_start_ok(payload).properties, b"basic.nack"),
    lambda payload: sasl.with_address(sasl.parse_start_ok(payload).properties, "192.0.2.1:1"),
    lambda payload: sasl.offer(payload, True),
    lambda payload: codec.decode_control(payload, "east"),
]


@pytest.mark.parametrize("reader", range(len(READERS)))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(octets, changed()))
def test_a_reader_raises_nothing_else(reader: int, data: bytes) -> None:
    for payload in [data, *payloads(data)]:
        try:
            READERS[reader](payload)
        except LrqError:
            pass


def payloads(data: bytes) -> list[bytes]:
    """Those of the frames, contents included, up to the first that is none."""
    at, found = (8 if data.startswith(b"AMQP") else 0), []
    while at + 7 <= len(data):
        after = at + int.from_bytes(data[at + 3 : at + 7], "big") + 8
        try:
            items, _ = frames.scan(data[at:after], hold_bytes_max=0)
        except frames.FrameError:
            break
        found += [data[at + item[2] : at + item[3]] for item in items]
        at = after
    return found


@MANY
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 2), octets), max_size=12))
def test_putting_contents_together_keeps_count(pieces: list[tuple[int, int, bytes]]) -> None:
    """Whatever comes in whatever order: what is held is counted, within its limit, and nothing is counted when all is gone."""
    budget = content_assembly.Budget(500, "limit")
    parts = content_assembly.Assembly(400, budget.share("app", lambda _: None))
    for kind, channel, payload in pieces:
        if kind == frames.HEADER and len(payload) % 2:
            payload = content_header.header_payload(len(payload))
        try:
            parts.take(kind, channel, payload)
        except frames.FrameError:
            parts.drop(channel)
        assert 0 <= budget.bytes <= 500
    parts.clear()
    assert budget.bytes == 0


@pytest.mark.timeout(max(600, INPUTS // 100))
@pytest.mark.parametrize("part", range(PARTS_OF_INPUTS))
def test_changed_sessions_by_their_numbers(part: int) -> None:
    for number in range(part, INPUTS, PARTS_OF_INPUTS):
        rng = rng_of(number)
        data = mutated(rng, SEEDS)
        try:
            through_everything(rng, data)
        except Exception as error:
            error.add_note(f"input {number}: {data.hex()}")
            raise


def through_everything(rng: random.Random, data: bytes) -> None:
    cut_or_whole(data, [rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 8))], rng.choice([0, 64, frames.HOLD_BYTES_MAX]))
    if len(data) < 400:
        by_octets(data)
    found = payloads(data)
    for payload in (data, rng.choice(found) if found else b""):
        for reader in rng.sample(READERS, 5):
            try:
                reader(payload)
            except LrqError:
                pass
