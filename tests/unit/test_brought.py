"""brought: the deaths that a client brings with a message, put aside and given back."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, header

from broker_plugin.amqp import content_header, death_headers, encode, frames
from broker_plugin.amqp.frames import FrameError
from broker_plugin.log import stamps
from broker_plugin.methods import deliver

pytestmark = pytest.mark.proves("queue: dead letter published again")

Q, OTHER = {"queue": "q", "reason": "rejected"}, {"queue": "other", "reason": "expired"}
FIRST = {"x-first-death-queue": "other", "x-first-death-reason": "expired", "x-first-death-exchange": "e"}
NOW = {"x-first-death-queue": "q", "x-first-death-reason": "rejected", "x-first-death-exchange": ""}
LAST = {"x-last-death-queue": "q", "x-last-death-reason": "rejected", "x-last-death-exchange": ""}


def payload(table: dict[str, Any] | None) -> bytes:
    return header.ContentHeader(0, 7, commands.Basic.Properties(content_type="text/plain", headers=table, message_id="m")).marshal()


def decoded(raw: bytes) -> dict[str, Any]:
    content_header.check_header(raw)
    made = header.ContentHeader()
    made.unmarshal(raw)
    assert (made.body_size, made.properties.content_type, made.properties.message_id) == (7, "text/plain", "m")
    return dict(made.properties.headers or {})


def at_the_broker(published: dict[str, Any], counted: dict[str, Any]) -> bytes:
    """What a broker adds to what was put aside."""
    return payload({**decoded(death_headers.escape(payload(published))), **counted})


def test_what_is_not_about_deaths_stays_as_it_is() -> None:
    for table in (None, {}, {"a": "x-death", "b": {"x-death": []}, "x-deaths": 1, "x-lrq-id": "p:1"}):
        raw = payload(table)
        assert death_headers.escape(raw) == raw == death_headers.restore(raw)


NAMES = st.sampled_from(["x-death", *FIRST, *LAST, "x-lrq-id", "mine", "x-dead"])


@given(st.dictionaries(NAMES, st.one_of(st.text(max_size=5), st.just([Q]), st.just({"queue": "q"})), max_size=6))
def test_nobody_sees_that_it_was_put_aside(table: dict[str, Any]) -> None:
    aside = death_headers.escape(payload(table))
    assert not set(decoded(aside)) & {"x-death", *FIRST, *LAST}
    assert content_header.deaths(aside) == ()
    assert decoded(death_headers.restore(aside)) == table
    assert death_headers.escape(aside) == aside


def test_who_publishes_again_what_was_put_aside_before() -> None:
    """As one that reads around the door might. What it brings itself counts."""
    twice = death_headers.escape(payload({"x-lrq-was-x-death": [OTHER], "x-death": [Q]}))
    assert decoded(twice) == {"x-lrq-was-x-death": [Q]}


def test_one_that_counts_on() -> None:
    """RabbitMQ 3.x."""
    published = {"x-death": [{**OTHER, "count": 5, "time": "old"}, {**Q, "count": 2, "exchange": "old"}], **FIRST, **LAST, "mine": 1}
    copy = at_the_broker(published, {"x-death": [{**Q, "count": 1, "exchange": "new"}, {"queue": "third", "reason": "maxlen", "count": 4}], **NOW})
    assert content_header.deaths(copy) == (("q", 1), ("third", 4))
    assert decoded(death_headers.restore(copy)) == {
        "mine": 1,
        "x-death": [
            {**Q, "count": 3, "exchange": "old"},
            {"queue": "third", "reason": "maxlen", "count": 4},
            {**OTHER, "count": 5, "time": "old"},
        ],
        **FIRST,
        **LAST,
    }


LONG = struct.Struct(">cq").pack
ODD = (  # what an encoder would have in fewer octets, or not at all
    b"\x01bb\x01\x01dd" + struct.pack(">d", 0.1) + b"\x01ss\x00\x01\x04timeT" + (1 << 41).to_bytes(8, "big") + b"\x01xx\x00\x00\x00\x01\xff"
)


def death(count: bytes, queue: bytes, more: bytes = b"") -> bytes:
    fields = b"\x05count" + count + content_header.field(b"queue", queue) + content_header.field(b"reason", b"rejected") + more
    return b"F" + len(fields).to_bytes(4, "big") + fields


def died(*deaths: bytes) -> bytes:
    """A content header with these deaths alone."""
    array = b"".join(deaths)
    return content_header.header_payload(7, content_header.properties(b"\x07x-deathA" + len(array).to_bytes(4, "big") + array, persistent=False))


def test_what_was_brought_keeps_its_octets() -> None:
    """But for the count that grows, which is a long whatever it was."""
    more = b"\x04zoneF\x00\x00\x00\x04\x01ab\x01"
    aside = death_headers.escape(died(death(b"b\x02", b"q", more), death(b"s\x00\x05", b"other", ODD)))
    counted = died(death(LONG(b"l", 4), b"third"), death(LONG(b"l", 1), b"q"))
    copy = stamps.stamp(aside, counted[counted.index(b"\x07x-death") :])
    wanted = died(death(LONG(b"l", 4), b"third"), death(LONG(b"l", 3), b"q", more), death(b"s\x00\x05", b"other", ODD))
    assert death_headers.restore(copy) == wanted


def test_one_that_counts_anew() -> None:
    """RabbitMQ 4.x."""
    counted = {"x-death": [{**Q, "count": 1}], **NOW, **LAST}
    copy = at_the_broker({"x-death": [{**Q, "count": 7}, OTHER], **FIRST, "x-last-death-queue": "old", "mine": 1}, counted)
    assert decoded(death_headers.restore(copy)) == {"mine": 1, **counted}


@pytest.mark.parametrize("rubbish", ["text", ["text"], [{}], [{**Q, "count": "many"}], [{**Q, "count": None}], [{"queue": ["q"], "reason": {}}]])
def test_rubbish_in_place_of_deaths(rubbish: Any) -> None:
    own = [{**Q, "count": 1}]
    copy = at_the_broker({"x-death": rubbish}, {"x-death": own, **NOW})
    assert decoded(death_headers.restore(copy)) == {"x-death": own, **NOW}


def test_a_table_that_lies() -> None:
    raw = bytearray(payload({"x-death": [Q]}))
    raw[raw.index(b"x-death") - 1] = 200
    with pytest.raises(FrameError):
        death_headers.escape(bytes(raw))


@pytest.mark.parametrize("size", [0, 5, 4_088, 10_000])
def test_a_whole_content(size: int) -> None:
    raw = death_headers.escape(payload({"x-death": [Q]}))
    raw = raw[:4] + size.to_bytes(8, "big") + raw[12:]
    method = encode.publish_method(3, "x", "key")
    blob = method + b"".join(encode.content(3, raw, b"b" * size, 1 << 17))
    given = deliver.refit(blob, 4_096)
    (item,), used = frames.scan(given, 0, 4_096)
    _, channel, start, end, header_at, header_end, stop = item
    assert (channel, used, given[start - 7 : end + 1]) == (3, len(given), method)
    assert given[header_at:header_end] == death_headers.restore(raw)
    assert frames.body_of(given, header_end, stop) == b"b" * size
