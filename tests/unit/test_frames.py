"""frames and headers against pamqp's own encoding, under any chunking, and against garbage."""

from __future__ import annotations

import math
import random
import string
import struct
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import base, body, commands, decode, encode, header, heartbeat
from pamqp import frame as pamqp_frame
from pamqp.common import FieldArray, FieldTable

from broker_plugin.amqp import content_assembly, content_header, frames
from broker_plugin.amqp import encode as amqp_encode
from broker_plugin.amqp.frames import FrameError
from broker_plugin.log import stamps as log_stamps
from lrq_ha.errors import MalformedInput

KEY = b"x-lrq-pos"
FRAME_MAX_BYTES = 4_096
DIRECT = "amq.rabbitmq.reply-to"

names = st.text(string.ascii_letters + "-._", max_size=30)  # pamqp refuses others that RabbitMQ allows
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.none(),
    st.text(max_size=20),
    st.binary(max_size=12).map(bytearray),
    st.decimals(-1000, 1000, places=2),
)
# Values that contain the bytes of the keys that are searched for.
tricky = st.sampled_from(["\tx-lrq-posS\x00\x00\x00\x011", "\x08x-lrq-idS\x00\x00\x00\x011", "x-lrq-pos", "\x07x-deathA", f"\x15{DIRECT}"])
values = st.recursive(
    scalars | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.just("x-lrq-pos"), inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(names | st.sampled_from(["x-lrq-id", "x-lrq-pos", "x-lrq-position"]), values, max_size=5)
properties = st.builds(
    commands.Basic.Properties,
    content_type=st.none() | names,
    content_encoding=st.none() | names,
    headers=st.none() | tables,
    delivery_mode=st.none() | st.integers(1, 2),
    priority=st.none() | st.integers(0, 9),
    correlation_id=st.none() | names,
    reply_to=st.none() | names,
    expiration=st.none() | names,
    message_id=st.none() | names,
    message_type=st.none() | names,
    user_id=st.none() | names,
    app_id=st.none() | names,
)
bodies = st.binary(max_size=40) | st.integers(0, 3 * FRAME_MAX_BYTES).map(lambda n: b"b" * n)
channels = st.integers(1, 65_535)


def header_bytes(made: commands.Basic.Properties, body_bytes: int = 0) -> bytes:
    return header.ContentHeader(0, body_bytes, made).marshal()


def decoded(payload: bytes) -> dict[str, Any]:
    made = header.ContentHeader()
    made.unmarshal(payload)
    return dict(made.properties)


def table_payload(*fields: bytes, flags: int = 0x2000, before: bytes = b"", after: bytes = b"") -> bytes:
    table = b"".join(fields)
    return struct.pack(">IQH", 60 << 16, 0, flags) + before + struct.pack(">I", len(table)) + table + after


@st.composite
def contents(draw: st.DrawFn) -> tuple[bytes, tuple[int, bytes, bytes, bytes]]:
    """The bytes of one publish, delivery, get-ok or return made by pamqp, and what must be found in them."""
    channel = draw(channels)
    method = draw(
        st.one_of(
            st.builds(commands.Basic.Publish, exchange=names, routing_key=names, mandatory=st.booleans()),
            st.builds(
                commands.Basic.Deliver,
                names,
                st.integers(0, 2**63 - 1),
                st.booleans(),
                exchange=names,
                routing_key=names,
            ),
            st.builds(commands.Basic.GetOk, st.integers(0, 2**63 - 1), st.booleans(), names, names, st.integers(0, 9)),
            st.builds(commands.Basic.Return, st.integers(300, 600), names, names, names),
        )
    )
    payload, data = header_bytes(draw(properties), len(text := draw(bodies))), text
    raw = pamqp_frame.marshal(method, channel) + amqp_encode.frame(frames.HEADER, channel, payload)
    most = FRAME_MAX_BYTES - 8
    for at in range(0, len(data), most):
        raw += pamqp_frame.marshal(body.ContentBody(data[at : at + most]), channel)
    return raw, (channel, struct.pack(">I", method.index) + method.marshal(), payload, data)


@st.composite
def singles(draw: st.DrawFn) -> tuple[bytes, tuple[int, bytes, bytes, bytes]]:
    """One method without content, or a heartbeat."""
    channel = draw(channels)
    method = draw(
        st.one_of(
            st.builds(commands.Basic.Ack, st.integers(0, 2**63 - 1), st.booleans()),
            st.builds(commands.Queue.Declare, queue=names, arguments=st.dictionaries(names, st.integers(0, 9), max_size=3)),
            st.builds(commands.Connection.Close, st.integers(200, 600), names, st.just(0), st.just(0)),
            st.just(commands.Channel.CloseOk()),
            st.none(),
        )
    )
    if method is None:
        return heartbeat.Heartbeat().marshal(), (0, b"", b"", b"")
    return pamqp_frame.marshal(method, channel), (channel, struct.pack(">I", method.index) + method.marshal(), b"", b"")


class Reader:
    """Feeds chunks to `scan` as a connection does, and puts contents together that came in pieces."""

    def __init__(self, hold_bytes_max: int = frames.HOLD_BYTES_MAX) -> None:
        self.left = b""
        self.found: list[tuple[int, bytes, bytes, bytes]] = []
        self.assembly = content_assembly.Assembly()
        self.hold_bytes_max = hold_bytes_max

    def feed(self, chunk: bytes) -> None:
        buffer = self.left + chunk
        items, used = frames.scan(buffer, 0, FRAME_MAX_BYTES, self.hold_bytes_max)
        self.left = buffer[used:]
        for kind, channel, start, end, head, head_end, stop in items:
            payload = buffer[start:end]
            if stop:
                self.found.append((channel, payload, buffer[head:head_end], frames.body_of(buffer, head_end, stop)))
            elif kind in frames.CONTENT_METHODS or kind in (frames.HEADER, frames.BODY):
                whole = self.assembly.take(kind, channel, payload)
                if whole:
                    self.found.append((channel, *whole))
            else:
                self.found.append((channel, payload, b"", b""))


@given(st.lists(contents() | singles(), max_size=6), st.data())
@settings(max_examples=150, deadline=None)
def test_any_chunking_gives_what_pamqp_encoded(made: list[Any], data: st.DataObject) -> None:
    raw = b"".join(part for part, _ in made)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader = Reader(data.draw(st.sampled_from([0, 100, 5_000, frames.HOLD_BYTES_MAX])))
    for first, last in zip([0, *cuts], [*cuts, len(raw)]):
        reader.feed(raw[first:last])
    assert reader.found == [expected for _, expected in made]
    assert reader.left == b""


@given(st.lists(contents(), min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_equal_contents_are_found_as_different_ones_are(pool: Any, order: list[int], data: st.DataObject) -> None:
    """A run of publishes that differ in their bodies only is found by comparison; so is nothing else."""
    parts = []
    for number in order:
        raw = bytearray(pool[number % len(pool)][0])
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
        parts.append(bytes(raw))
    whole = b"".join(parts)

    def scanned(at: int) -> tuple[list[frames.Item], int]:
        try:
            return frames.scan(whole, at, frames.FRAME_MAX_BYTES, 0)
        except FrameError as error:
            return error.before

    one_by_one: list[frames.Item] = []
    at = 0
    while (items := scanned(at)[0]):  # a scan that ends behind its first item
        one_by_one.append(items[0])
        at = frames.end_of(items[0])
    assert scanned(0) == (one_by_one, at)


@given(contents(), contents())
@settings(max_examples=50, deadline=None)
def test_contents_interleaved_on_two_channels(one: Any, two: Any) -> None:
    def pieces(raw: bytes, channel: int) -> list[bytes]:
        raw = amqp_encode.rechannel(raw, channel)
        found = []
        while raw:
            size = struct.unpack_from(">I", raw, 3)[0] + 8
            found.append(raw[:size])
            raw = raw[size:]
        return found

    left, right = pieces(one[0], 1), pieces(two[0], 2)
    reader = Reader()
    for a in range(max(len(left), len(right))):
        reader.feed(b"".join(left[a : a + 1] + right[a : a + 1]))
    assert sorted(reader.found) == sorted([(1, *one[1][1:]), (2, *two[1][1:])])


@given(st.binary(max_size=200))
def test_garbage_raises_only_frame_errors(data: bytes) -> None:
    reader = Reader()
    for attempt in (
        lambda: reader.feed(data),
        lambda: frames.decode_method(data),
        lambda: frames.publish_route(data),
        lambda: frames.deliver_arguments(data),
        lambda: frames.get_ok_arguments(data),
        lambda: frames.tag_and_bits(data),
        lambda: content_header.check_header(data),
        lambda: log_stamps.stamp(data, log_stamps.position_field(b"1.2/3")),
        lambda: content_header.cut(data, b"a"),
        lambda: log_stamps.replication_id(data),
        lambda: content_header.deaths(data),
    ):
        try:
            attempt()
        except FrameError:
            pass


@given(contents(), st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_octets_raise_only_frame_errors(made: Any, data: st.DataObject) -> None:
    raw = bytearray(made[0])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    reader = Reader(data.draw(st.sampled_from([0, frames.HOLD_BYTES_MAX])))
    try:
        reader.feed(bytes(raw))
        for _, method, payload, _ in reader.found:
            if method:
                frames.decode_method(method)
            if payload:
                content_header.check_header(payload)
                log_stamps.stamp(payload, log_stamps.position_field(b"1.2/3"))
                content_header.deaths(payload)
    except FrameError:
        pass


@given(properties)
@settings(max_examples=200, deadline=None)
def test_stamp_is_decode_change_encode(made: commands.Basic.Properties) -> None:
    payload = header_bytes(made, 7)
    content_header.check_header(payload)
    stamped = log_stamps.stamp(payload, log_stamps.position_field(b"259.17/4"))
    content_header.check_header(stamped)
    expected = decoded(payload)
    table = dict(expected["headers"] or {})
    table.pop("x-lrq-pos", None)
    table["x-lrq-pos"] = "259.17/4"
    expected["headers"] = table
    assert decoded(stamped) == expected
    assert list(decoded(stamped)["headers"]) == list(table)
    assert log_stamps.position(stamped) == b"259.17/4"
    assert stamped[:12] == payload[:12]
    assert log_stamps.stamp(stamped, log_stamps.position_field(b"259.17/4")) == stamped


@given(st.lists(properties, min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20), st.integers(1, 10**6))
@settings(max_examples=100, deadline=None)
def test_remembered_stamps_are_those_that_are_made(pool: Any, order: list[tuple[int, int]], sequence: int) -> None:
    stamps = log_stamps.StampCache()
    affixes = (b"259.", b"/4")
    for number, size in order:
        payload = header_bytes(pool[number % len(pool)], size)
        stamps.renew(affixes, sequence)
        stamped = log_stamps.stamp(payload, log_stamps.position_field(b"259.%d/4" % sequence))
        known = stamps.get(payload[content_header.BODY_SIZE_END :])
        if known is None:
            stamps.learn(payload, stamped, sequence)
        else:
            before, after, longer = known
            assert b"%b%b%d%b" % (payload[: content_header.BODY_SIZE_END], before, sequence, after) == stamped
            assert len(stamped) == len(payload) + longer
        sequence += 1


@given(properties)
@settings(max_examples=200, deadline=None)
def test_cut_is_decode_change_encode(made: commands.Basic.Properties) -> None:
    payload = header_bytes(made)
    after = content_header.cut(payload, KEY)
    content_header.check_header(after)
    expected = decoded(payload)
    if expected["headers"]:
        expected["headers"] = {k: v for k, v in expected["headers"].items() if k != "x-lrq-pos"}
    assert decoded(after) == expected
    assert content_header.header_value(after, KEY) is None
    if "x-lrq-pos" not in (made.headers or {}):
        assert after == payload


@given(properties)
@settings(max_examples=200, deadline=None)
def test_the_replication_id_is_the_top_level_string_only(made: commands.Basic.Properties) -> None:
    value = (decoded(header_bytes(made))["headers"] or {}).get("x-lrq-id")
    expected = value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytearray) else None
    assert log_stamps.replication_id(header_bytes(made)) == expected


def test_all_copies_of_a_duplicate_key_go() -> None:
    old = log_stamps.position_field(b"1.1/1")
    other = content_header.field(b"a", b"\x09x-lrq-posS\0\0\0\x01z")
    payload = table_payload(old, other, old, old)
    assert log_stamps.position(payload) == b"1.1/1"
    new = log_stamps.position_field(b"2.2/2")
    assert log_stamps.stamp(payload, new) == table_payload(other, new)
    assert content_header.cut(payload, KEY) == table_payload(other)


def test_a_key_inside_a_property_or_a_value_does_not_count() -> None:
    fake = log_stamps.position_field(b"9.9/9")
    value = bytes((len(fake),)) + fake
    assert log_stamps.position(table_payload(flags=0xA000, before=value)) is None  # a content type that looks like the header
    assert log_stamps.position(table_payload(flags=0x2080, after=value)) is None  # a message ID that does
    assert log_stamps.replication_id(table_payload(flags=0x2400, after=b"\x08x-lrq-id")) is None  # an empty table, a correlation ID
    nested = b"\x01nF" + struct.pack(">I", len(fake)) + fake
    assert log_stamps.position(table_payload(nested)) is None
    assert log_stamps.position(table_payload(nested, log_stamps.position_field(b"1.1/1"))) == b"1.1/1"
    plain = struct.pack(">IQH", 60 << 16, 0, 0x0080) + value
    assert log_stamps.position(plain) is None
    assert log_stamps.position(log_stamps.stamp(plain, log_stamps.position_field(b"1.1/1"))) == b"1.1/1"


def test_continued_property_flags_are_refused() -> None:
    with pytest.raises(FrameError, match="property flags"):
        log_stamps.stamp(table_payload(flags=0x2001), log_stamps.position_field(b"1"))
    with pytest.raises(FrameError, match="property flags"):
        content_header.check_header(table_payload(flags=0x2001))


@pytest.mark.parametrize(
    "payload",
    [
        table_payload(b"\x01aS\0\0\0\x09b"),  # a value longer than the table
        table_payload(b"\x01a?"),  # an unknown kind
        table_payload(b"\x05a"),  # a key longer than the table
        table_payload(b"\x01aF\0\0\0\x03\x01bt"),  # a nested value that is missing
        table_payload(b"\x01aA\0\0\0\x01t"),
        table_payload(after=b"x"),  # octets after the last property
        table_payload(flags=0x2800),  # a priority that is missing
        table_payload(flags=0x2002),
        table_payload()[:-1],
        b"",
    ],
)
def test_malformed_headers_are_found(payload: bytes) -> None:
    with pytest.raises(FrameError):
        content_header.check_header(payload)


def test_nesting_has_a_limit() -> None:
    value = b"t\x01"
    for _ in range(content_header.TABLE_DEPTH_MAX):
        value = b"A" + struct.pack(">I", len(value)) + value
    content_header.check_header(table_payload(b"\x01a" + value))
    value = b"A" + struct.pack(">I", len(value)) + value
    with pytest.raises(FrameError, match="nested"):
        content_header.check_header(table_payload(b"\x01a" + value))


def test_deaths_sum_the_counts_of_each_queue() -> None:
    died: FieldArray = [
        {"queue": "retry", "count": 3, "reason": "expired", "routing-keys": ["a"]},
        {"queue": "orders", "count": 2, "reason": "rejected"},
        {"queue": "retry", "count": 1, "reason": "rejected"},
    ]
    assert content_header.deaths(header_bytes(commands.Basic.Properties(headers={"a": 1, "x-death": died}))) == (
        ("retry", 4),
        ("orders", 2),
    )
    assert content_header.deaths(header_bytes(commands.Basic.Properties(headers={"a": {"x-death": died}}))) == ()
    assert content_header.deaths(header_bytes(commands.Basic.Properties(headers={"x-death": "no array"}))) == ()


@pytest.mark.parametrize("entry", [b"\x01\xffI\0\0\0\1", b"\x01aT" + 8 * b"\xff", b"\x05countI\0\0"], ids=["no text", "no time", "cut short"])
def test_deaths_that_cannot_be_read_count_for_nothing(entry: bytes) -> None:
    """A broker passes on what anybody has written there."""
    array = b"F" + len(entry).to_bytes(4, "big") + entry
    table = b"\x07x-deathA" + len(array).to_bytes(4, "big") + array
    assert content_header.deaths(content_header.header_payload(1, content_header.properties(table))) == ()


@pytest.mark.parametrize(("count", "visits"), [(-1, None), (0, None), (True, None), (3, 3), (1 << 40, content_header.VISITS_MAX)])
def test_deaths_that_no_broker_counts(count: int, visits: int | None) -> None:
    died: FieldArray = [{"queue": "q", "count": count}]
    found = content_header.deaths(header_bytes(commands.Basic.Properties(headers={"x-death": died, "x-first-death-queue": "q"})))
    assert found == ((("q", visits),) if visits else ())


def _table(value: bytes) -> bytes:
    return content_header.header_payload(0, content_header.properties(b"\x01h" + value))


@pytest.mark.parametrize(
    "value",
    [b"U\0\1", b"f" + struct.pack(">f", math.inf), *(b"d" + struct.pack(">d", number) for number in (math.nan, math.inf, -math.inf))],
)
def test_a_header_that_no_broker_reads(value: bytes) -> None:
    """It ends the connection, so it has no place in the log: every broker's connections would end over it."""
    inner = b"\x01i" + value
    for whole in (value, b"F" + struct.pack(">I", len(inner)) + inner, b"A" + struct.pack(">I", len(value)) + value):
        with pytest.raises(FrameError):
            content_header.check_header(_table(whole))


@pytest.mark.parametrize("value", [b"f" + struct.pack(">f", 1e38), b"d" + struct.pack(">d", -1e308), b"D\2\0\0\1\0", b"L" + b"\xff" * 8, b"u\0\1"])
def test_a_header_that_brokers_read(value: bytes) -> None:
    content_header.check_header(_table(value))
    content_header.check_header(_table(b"A" + struct.pack(">I", len(value)) + value))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\x08\0\0\0\0\0\0\xcf", "ends with octet"),
        (b"\x01\0\1\x7f\xff\xff\xff", "exceeds"),
        (b"\x05\0\0\0\0\0\0\xce", "not a frame type"),
        (b"HTTP/1.1", "not a frame type"),
        (b"\x01\0\1\0\0\0\x01\1\xce", "holds no method"),
        (amqp_encode.raw_method_frame(1, frames.HEARTBEAT), "no method 0x00000008"),
        (amqp_encode.raw_method_frame(1, frames.BODY, b"x"), "no method 0x00000003"),
    ],
)
def test_malformed_frames_are_named(raw: bytes, says: str) -> None:
    good = amqp_encode.ack(1, 5)
    with pytest.raises(FrameError, match=says) as caught:
        frames.scan(good + raw)
    assert caught.value.before == frames.scan(good)


def test_a_frame_at_the_limit_passes_and_one_over_does_not() -> None:
    head = amqp_encode.publish_method(1, "", "q")
    for size, fits in ((4_088, True), (4_089, False)):
        raw = head + b"".join(amqp_encode.content(1, content_header.header_payload(size), b"x" * size, 1 << 17))
        if fits:
            assert len(frames.scan(raw, 0, 4_096)[0]) == 1
        else:
            with pytest.raises(FrameError, match="exceeds"):
                frames.scan(raw, 0, 4_096)


def test_an_unfinished_content_is_held_up_to_the_limit_only() -> None:
    raw = amqp_encode.publish_method(1, "", "q") + b"".join(amqp_encode.content(1, content_header.header_payload(9_000), b"x" * 9_000, 4_096))
    assert frames.scan(raw[:-1], 0, 4_096) == ([], 0)
    items, used = frames.scan(raw[:-1], 0, 4_096, 5_000)
    assert [item[0] for item in items] == [frames.BASIC_PUBLISH, frames.HEADER, frames.BODY, frames.BODY]
    assert frames.scan(raw[used:], 0, 4_096)[0][0][0] == frames.BODY


@pytest.mark.parametrize(
    "run",
    [
        [(frames.HEADER, b"h" * 14)],
        [(frames.BODY, b"x")],
        [(frames.BASIC_PUBLISH, b"m"), (frames.BODY, b"x")],
        [(frames.BASIC_PUBLISH, b"m"), (frames.BASIC_PUBLISH, b"m")],
        [(frames.BASIC_PUBLISH, b"m"), (frames.HEADER, b"short")],
        [(frames.BASIC_PUBLISH, b"m"), (frames.HEADER, content_header.header_payload(3)), (frames.BODY, b"four")],
        [(frames.BASIC_PUBLISH, b"m"), (frames.HEADER, content_header.header_payload(content_assembly.BODY_BYTES_ANY_MAX + 1))],
        [(frames.BASIC_PUBLISH, b"m"), (frames.HEADER, content_header.header_payload(101)), (frames.BODY, b"x" * 102)],
    ],
)
def test_frames_out_of_place_are_refused(run: list[tuple[int, bytes]]) -> None:
    assembly = content_assembly.Assembly(body_bytes_max=100)
    for kind, payload in run[:-1]:
        assembly.take(kind, 1, payload)
    with pytest.raises(FrameError):
        assembly.take(run[-1][0], 1, run[-1][1])


def test_a_body_over_the_limit_is_read_and_not_kept() -> None:
    budget = content_assembly.Budget(120, "what all hold")
    assembly = content_assembly.Assembly(body_bytes_max=100, share=budget.share("app", lambda error: pytest.fail(str(error))))
    for kind, payload in ((frames.BASIC_PUBLISH, b"m"), (frames.HEADER, content_header.header_payload(101)), (frames.BODY, b"x" * 100)):
        assert assembly.take(kind, 1, payload) is None
    assert budget.bytes == len(b"m" + content_header.header_payload(101)), "only what stands before it"
    assert assembly.is_open(1)
    with pytest.raises(content_assembly.BodyTooLarge) as caught:
        assembly.take(frames.BODY, 1, b"x")
    assert (caught.value.size, caught.value.limit) == (101, 100)
    assert budget.bytes == 0
    assert not assembly.is_open(1)
    header = content_header.header_payload(100)
    for kind, payload in ((frames.BASIC_PUBLISH, b"m"), (frames.HEADER, header)):
        assert assembly.take(kind, 1, payload) is None
    assert assembly.take(frames.BODY, 1, b"y" * 100) == content_assembly.Content(b"m", header, b"y" * 100)
    assert budget.bytes == 0


def test_room_is_made_by_who_holds_most() -> None:
    """One user could end everybody's connections: who came when all was taken had to go, and not who had taken it."""
    budget = content_assembly.Budget(100, "what all hold")
    ended: list[str] = []
    shares: dict[str, content_assembly.Share] = {}

    def come(user: str, number: int) -> content_assembly.Share:
        name = f"{user}{number}"
        shares[name] = budget.share(user, lambda _: ended.append(name))
        return shares[name]

    for number in range(4):
        come("greedy", number).take(15 + number)
    come("app", 1).take(30)
    assert (budget.bytes, ended) == (96, [])
    come("other", 1).take(20)
    assert (budget.bytes, ended) == (98, ["greedy3"]), "no connection of theirs holds as much as that of app"
    shares["app1"].take(15)
    assert (budget.bytes, ended) == (96, ["greedy3", "greedy2"])
    with pytest.raises(FrameError, match="what all hold"):
        shares["app1"].take(40)  # now it is itself the largest
    assert (budget.bytes, ended) == (96, ["greedy3", "greedy2"])
    for share in shares.values():
        share.leave()
    assert budget.bytes == 0


def test_a_dropped_channel_starts_afresh() -> None:
    assembly = content_assembly.Assembly()
    header = content_header.header_payload(9)
    for kind, payload in ((frames.BASIC_PUBLISH, b"m"), (frames.HEADER, header), (frames.BODY, b"xx"), (frames.BODY, b"xxx")):
        assembly.take(kind, 1, payload)
    assert assembly.is_open(1)
    assert assembly.arrived_bytes(1) == 5
    assembly.drop(1)
    assert not assembly.is_open(1)
    assert assembly.arrived_bytes(1) == 0
    assembly.take(frames.BASIC_PUBLISH, 1, b"m")
    assert assembly.take(frames.HEADER, 1, content_header.header_payload(0)) == content_assembly.Content(b"m", content_header.header_payload(0), b"")


@given(channels, st.integers(0, 2**63 - 1), st.booleans(), st.booleans(), names, names)
def test_builders_build_what_pamqp_builds(channel: int, tag: int, multiple: bool, requeue: bool, one: str, two: str) -> None:
    basic = commands.Basic
    assert amqp_encode.ack(channel, tag, multiple) == pamqp_frame.marshal(basic.Ack(tag, multiple), channel)
    assert amqp_encode.nack(channel, tag, multiple, requeue) == pamqp_frame.marshal(basic.Nack(tag, multiple, requeue), channel)
    assert amqp_encode.reject(channel, tag, requeue) == pamqp_frame.marshal(basic.Reject(tag, requeue), channel)
    publish = basic.Publish(exchange=one, routing_key=two, mandatory=multiple)
    raw = amqp_encode.publish_method(channel, one, two, multiple)
    assert raw == pamqp_frame.marshal(publish, channel)
    assert frames.publish_route(raw[7:-1]) == (one, two, multiple, False)
    assert frames.tag_and_bits(amqp_encode.nack(channel, tag, multiple, requeue), 7) == (tag, multiple | requeue << 1)
    deliver = pamqp_frame.marshal(basic.Deliver(one, tag, multiple, two, one), channel)[7:-1]
    assert frames.deliver_arguments(deliver) == (one.encode(), tag, (multiple, two, one))
    got = pamqp_frame.marshal(basic.GetOk(tag, multiple, two, one, 3), channel)[7:-1]
    assert frames.get_ok_arguments(got) == (tag, (multiple, two, one))
    assert amqp_encode.connection_close(320, one) == pamqp_frame.marshal(commands.Connection.Close(320, one, 0, 0), 0)
    cause = frames.QUEUE_DECLARE
    closed = commands.Channel.Close(404, one, cause >> 16, cause & 0xFFFF)
    assert amqp_encode.channel_close(channel, 404, one, cause) == pamqp_frame.marshal(closed, channel)
    assert amqp_encode.rechannel(raw + deliver_frame(1, deliver), channel)[1:3] == struct.pack(">H", channel)


def deliver_frame(channel: int, payload: bytes) -> bytes:
    return amqp_encode.frame(frames.METHOD, channel, payload)


def test_properties_are_those_of_pamqp() -> None:
    made = content_header.properties(content_header.field(b"a", b"b"), content_type="text/x", correlation_id="7")
    expected = commands.Basic.Properties(content_type="text/x", headers={"a": "b"}, delivery_mode=2, correlation_id="7")
    assert content_header.header_payload(3, made) == header_bytes(expected, 3)
    assert content_header.header_payload(0, content_header.properties(persistent=False)) == header_bytes(commands.Basic.Properties())


def test_names_that_are_not_ascii_or_not_utf8_survive() -> None:
    for raw in ("é".encode(), b"\xff\xfe"):
        name = raw.decode("utf-8", "surrogateescape")
        made = amqp_encode.publish_method(1, name, name)
        assert raw in made
        assert frames.publish_route(made[7:-1])[:2] == (name, name)


@given(singles())
def test_a_decoded_method_is_encoded_as_it_was(made: Any) -> None:
    raw, (channel, payload, _, _) = made
    if payload:
        assert amqp_encode.method_frame(channel, frames.decode_method(payload)) == raw


def test_a_method_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(MalformedInput, match=r"Basic\.Ack"):
        amqp_encode.method_frame(1, commands.Basic.Ack("one"))  # type: ignore[arg-type]


def test_names_too_long_and_texts_cut() -> None:
    with pytest.raises(MalformedInput, match="at most 255"):
        amqp_encode.publish_method(1, "", "é" * 128)
    text = frames.decode_method(amqp_encode.connection_close(320, "é" * 128)[7:-1])
    assert text.reply_text == "é" * 127  # type: ignore[attr-defined]


def test_constants_are_the_ids_that_pamqp_uses() -> None:
    by_name = {
        "".join("_" + c if c.isupper() and i else c for i, c in enumerate(made.name.replace(".", ""))).upper(): index
        for index, made in cast("dict[int, type[base.Frame]]", commands.INDEX_MAPPING).items()
    }
    assert {name: getattr(frames, name, None) for name in by_name} == by_name


def test_rechannel_finds_a_run_that_ends_early() -> None:
    with pytest.raises(FrameError):
        amqp_encode.rechannel(amqp_encode.ack(1, 1)[:-1], 2)


def test_random_tables_walk_like_pamqp() -> None:
    rng = random.Random(7)
    for _ in range(200):
        table: FieldTable = {
            f"k{i}": rng.choice([1, 2**40, -5, 1.5, True, None, "s" * rng.randrange(300), [1, "a"]]) for i in range(rng.randrange(9))
        }
        payload = table_payload(encode.field_table(table)[4:])
        content_header.check_header(payload)
        stamped = log_stamps.stamp(payload, log_stamps.position_field(b"1.1/1"))
        assert decode.field_table(stamped[14:])[1] == {**table, "x-lrq-pos": "1.1/1"}


@given(properties, st.sampled_from(["", DIRECT, f"{DIRECT}.token"]))
def test_only_a_direct_reply_to_is_replaced(made: commands.Basic.Properties, reply_to: str) -> None:
    made.reply_to = reply_to or made.reply_to
    before, after = header_bytes(made, 7), content_header.asked_by_nobody(header_bytes(made, 7))
    if made.reply_to == DIRECT:
        made.reply_to += ".gone"
        assert after == header_bytes(made, 7)
    else:
        assert after == before
