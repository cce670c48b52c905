"""Holes in a view: where offsets jump, the view's head says whether the broker dropped something, or wrote something of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from broker_plugin.amqp import content_header
from broker_plugin.amqp.channel import header_fields
from broker_plugin.amqp.connection import NoChannelLeft
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.messages import Event, Read, Trimmed
from lrq_ha.sidecar.sites import view_reader
from lrq_ha.sidecar.sites.view_reader import View, ViewReader

QUEUE = "LRQ_Send_LogEntries"
READER = 7


class _Stream:
    """A connection to a broker that has one stream: who reads it while it is attached gets `records`, who asks for its head gets one at `head`.

    Args:
        records: Offset and log sequence of each; sequence 0: no entry.
        head: Offset.
    """

    def __init__(self, records: Iterable[tuple[int, int]], head: int) -> None:
        self.records, self.head = list(records), head
        self.heads_asked = 0
        self.lacks_channels = 0  # how often there is none

    async def channel(self, on_close: Callable[[Any], None]) -> _Channel:
        if self.lacks_channels:
            self.lacks_channels -= 1
            raise NoChannelLeft(504, "all in use")
        return _Channel(self)


class _Channel:
    error = None

    def __init__(self, stream: _Stream) -> None:
        self._stream, self._prefetch = stream, 0

    async def qos(self, prefetch: int) -> None:
        self._prefetch = prefetch

    async def consume(self, queue: str, callback: Callable[..., None], *, arguments: dict[str, Any], on_cancel: Callable[[str], None]) -> None:
        if self._prefetch == 1:
            self._stream.heads_asked += 1
            callback(1, False, "", queue, _header(self._stream.head, 1), b"")
            return
        for tag, (offset, sequence) in enumerate(self._stream.records, 1):
            callback(tag, False, "", queue, _header(offset, sequence), pb.Transaction(client_name="c").SerializeToString())

    def ack(self, tag: int, multiple: bool = False) -> None:
        pass

    async def close(self) -> None:
        pass


def _header(offset: int, sequence: int) -> bytes:
    table: dict[str, Any] = {"x-stream-offset": offset} | ({"x-lrq-pos": f"1.{sequence}/1"} if sequence else {})
    return content_header.header_payload(0, content_header.properties(header_fields(table), True))


def _read(stream: _Stream, from_sequence: int = 1) -> list[Event]:
    """What a reader gives until there is no more to come."""
    given: list[Event] = []

    async def go() -> None:
        reader = ViewReader(stream, View(QUEUE), from_sequence, READER, lambda: Position(0, 0), given.append)  # type: ignore[arg-type]
        task = asyncio.create_task(reader.run())
        for _ in range(200):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    return given


def _sequences(events: Iterable[Event]) -> list[int]:
    return [entry.position.sequence for event in events if isinstance(event, Read) for entry in event.entries]


def _run(first: int, last: int, ahead: int = 0) -> list[tuple[int, int]]:
    """Entry n at offset n + `ahead`."""
    return [(n + ahead, n) for n in range(first, last + 1)]


def test_segments_that_are_dropped_under_an_attached_reader() -> None:
    stream = _Stream([(0, 0), *_run(1, 100), *_run(5000, 5010)], head=5000)
    assert _read(stream)[-1] == Trimmed(READER, 5000)


def test_no_entry_from_behind_a_hole_is_given() -> None:
    given = _read(_Stream([(0, 0), *_run(1, 10), *_run(5000, 5010)], head=5000))
    assert given == [Trimmed(READER, 5000)]


def test_a_hole_that_ends_with_what_is_no_entry() -> None:
    stream = _Stream([(0, 0), *_run(1, 70), (5000, 0), *_run(5001, 5010)], head=5000)
    assert _read(stream)[-1] == Trimmed(READER, 5001)


def test_offsets_that_the_broker_used_itself() -> None:
    stream = _Stream([(0, 0), *_run(1, 100), *_run(101, 300, ahead=1), *_run(301, 400, ahead=2)], head=0)
    assert _sequences(_read(stream)) == list(range(1, 401))
    assert stream.heads_asked == 2


def test_a_jump_whose_other_side_is_the_head() -> None:
    """Segments behind the reader were dropped, and none that it has not read."""
    stream = _Stream([(0, 0), *_run(1, 100), *_run(101, 200, ahead=1)], head=101)
    assert _sequences(_read(stream)) == list(range(1, 201))


def test_a_hole_before_what_is_wanted() -> None:
    stream = _Stream([(0, 0), *_run(1, 100), *_run(5000, 5010)], head=5000)
    assert _sequences(_read(stream, from_sequence=5000)) == list(range(5000, 5011))


def test_a_hole_behind_which_the_view_repeats_what_was_given() -> None:
    """A node that started anew writes again what it does not know to be written."""
    stream = _Stream([(0, 0), *_run(1, 100), *[(5000 + n, n) for n in range(90, 200)]], head=5090)
    assert _sequences(_read(stream)) == list(range(1, 200))


def test_a_reader_that_gets_no_channel_says_so_and_tries_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(view_reader, "CHANNEL_AGAIN_S", 0)
    stream = _Stream(_run(1, 10), head=1)
    stream.lacks_channels = 3
    assert _sequences(_read(stream)) == list(range(1, 11))
    assert [record.message for record in caplog.records] == [f"{QUEUE} cannot be read: {NoChannelLeft(504, 'all in use')}"], "once"


def test_a_view_that_had_lost_its_beginning() -> None:
    records = _run(5000, 5010)
    assert _read(_Stream(records, head=5000)) == [Trimmed(READER, 5000)]
    assert _sequences(_read(_Stream(records, head=5000), from_sequence=5000)) == list(range(5000, 5011))


class _LargeStream(_Stream):
    """A stream of large messages: a consumer gets as many as its prefetch allows, and more as it acknowledges."""

    def __init__(self, records: Iterable[tuple[int, int]], size: int) -> None:
        super().__init__(records, head=0)
        self.body = pb.Transaction(client_name="c", payloads=[b"x" * size]).SerializeToString()
        self.prefetches: list[int] = []

    async def channel(self, on_close: Callable[[Any], None]) -> _Channel:
        return _LargeChannel(self)


class _LargeChannel(_Channel):
    _stream: _LargeStream

    async def consume(self, queue: str, callback: Callable[..., None], *, arguments: dict[str, Any], on_cancel: Callable[[str], None]) -> None:
        self._stream.prefetches.append(self._prefetch)
        start = arguments["x-stream-offset"]
        self._left = [record for record in self._stream.records if start == "first" or record[0] >= start]
        self._callback, self._tag = callback, 0
        self._deliver(self._prefetch)

    def ack(self, tag: int, multiple: bool = False) -> None:
        self._deliver(tag + self._prefetch)

    def _deliver(self, up_to: int) -> None:
        while self._left and self._tag < up_to:
            offset, sequence = self._left.pop(0)
            self._tag += 1
            self._callback(self._tag, False, "", QUEUE, _header(offset, sequence), self._stream.body)


def test_large_messages_are_fetched_in_smaller_numbers() -> None:
    """Each of 1 MiB: 16 of them are as many bytes as may wait, and no entry is lost or given twice where the reader comes back for fewer."""
    stream = _LargeStream(_run(0, 150, ahead=0), 1 << 20)
    assert _sequences(_read(stream)) == list(range(1, 151))
    assert stream.prefetches[0] == view_reader.PREFETCH_MESSAGES
    assert stream.prefetches[1:] in ([15], [16])
