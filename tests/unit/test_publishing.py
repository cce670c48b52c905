"""What the door makes of a run of publishes: entries of the log, and what the broker gets, whatever the run consists of and wherever it is cut.

A connection of the door runs between two sockets that keep what they are given; what is appended is safe at once,
or when the test says so.
"""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from broker_plugin.amqp import content_assembly, content_header, encode, frames
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.log import codec, stamps
from broker_plugin.log.definitions import Definitions
from broker_plugin.log.holds import QueueHold
from broker_plugin.log.replica import Replica
from broker_plugin.methods import publish as methods_publish
from broker_plugin.reconcile.reconciler import LengthReconciler
from broker_plugin.session.channel import ChannelState
from broker_plugin.session.rights import Right
from broker_plugin.session.session import Agreed
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.tables import DoorTable

FIRST = 95  # the second hundred begins within a run
POSITION, ID = b"x-lrq-pos", b"x-lrq-id"


class Socket:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""
        self.reads = True

    def write(self, data: bytes) -> None:
        self.data += data

    def writelines(self, pieces: Any) -> None:
        self.data += b"".join(pieces)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Connection:
    """A relay on a primary without backups."""

    def __init__(self, producer: str = "", vhost: str = "/", *, ascending: bool = False) -> None:
        self.runs: list[pb.Run] = []  # as they stand in the log
        self.log_is_safe = True
        self.log: Any = SimpleNamespace(end=FIRST - 1, unfinished=False)
        node: Any = SimpleNamespace(role=Role.ACTIVE, serving=True, log=self.log, applied=0)
        self.replica = Replica(node, Levels({"^.*$": "all"}), self._emit)
        self.replica.stamp_affixes = (b"257.", b"/1")
        self.replica.progress.safe = FIRST - 1
        config = DoorTable(listen="127.0.0.1:5672", client_buffer_bytes_max=1 << 14)
        door: Any = SimpleNamespace(
            config=config, now=lambda: 0.0, unfinished=content_assembly.Budget(1 << 30, "unfinished"), log_blocked="", counters=Counter(),
            draining="", interceptors=None, completes_locally=lambda _: False, client_full=lambda *_: None, sessions=set(),
            buffered_bytes_max=config.buffered_bytes_max, sites=frozenset({"west"}), group="east",
        )  # fmt: skip
        self.client, self.broker = Socket(), Socket()
        client, broker = self._sockets
        self.relay = ClientConnection(
            door, self.replica, client, broker, Agreed(
                user="app", vhost=vhost, producer=producer, ascending=ascending, instance="", peer=None, may_write=True,
                frame_max_bytes=frames.FRAME_MAX_BYTES,
                broker_frame_max_bytes=frames.FRAME_MAX_BYTES, heartbeat_s=0, told_blocked=False, channels_max=2_046, broker_channels_max=2_047,
            ),
        )  # fmt: skip
        self.relay.rights.add(Right("", "", False))
        self.relay.client_data(encode.method_frame(1, commands.Channel.Open()))
        self.relay.client_data(encode.method_frame(1, commands.Confirm.Select()))
        self.broker.data = b""

    @property
    def _sockets(self) -> tuple[Any, Any]:
        return self.client, self.broker

    def _emit(self, first: int, count: int, runs: list[pb.Run | codec.Publishes]) -> None:
        assert first == self.log.end + 1
        self.log.end = first + count - 1
        if not self.log_is_safe:
            return
        body = pb.Batch.FromString(codec.batch_body(BatchHeader(257, first, self.log.end, 257, 257), 7, runs))
        assert (body.epoch, body.first, body.count, body.previous_epoch, body.timestamp_us) == (257, first, count, 257, 7)
        self.runs += body.runs
        self.replica.progress.safe_advanced(self.log.end)

    @property
    def unsure(self) -> set[QueueKey]:
        """Queues of which the census of lengths does not believe what it finds now, as their messages may be on their way."""
        census: Any = SimpleNamespace(_door=SimpleNamespace(sessions=[self.relay]))
        clients = LengthReconciler._clients(census)
        assert clients is not None
        return clients.unsure


def message(queue: str, table: bytes, persistent: bool, body: bytes) -> tuple[bytes, bytes]:
    """(frames of a publish, its content header's payload)"""
    payload = content_header.header_payload(len(body), content_header.properties(table, persistent))
    return encode.publish_method(1, "", queue) + b"".join(encode.content(1, payload, body, 4_096)), payload


tables = st.sampled_from(
    [b"", *itertools.starmap(content_header.field, ((b"a", b"1"), (b"x-lrq-", b"1"), (POSITION, b"1.2/3"), (ID, b"p/1")))]
)
messages = st.builds(message, st.sampled_from(["orders", "other"]), tables, st.booleans(), st.sampled_from([b"", b"abc", b"abd", b"x" * 5_000]))


@given(st.lists(messages, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 2_000), max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_run_is_logged_as_it_came_and_passed_on_with_positions(pool: Any, order: list[int], cuts: list[int]) -> None:
    async def scenario() -> None:
        connection = Connection()
        sent = [pool[number % len(pool)] for number in order]
        stream = b"".join(raw for raw, _ in sent)
        marks = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        for begin, end in pairwise(marks):
            if begin < end:
                connection.relay.client_data(stream[begin:end])
        connection.replica.flush()
        logged = b"".join(run.enqueues.frames for run in connection.runs)
        lengths = [length for run in connection.runs for length in run.enqueues.lengths]
        items, used = frames.scan(logged, 0, frames.FRAME_MAX_BYTES, 0)
        assert used == len(logged)
        assert [item[6] - item[2] + 7 for item in items] == lengths
        out = connection.broker.data
        passed, used = frames.scan(out, 0, frames.FRAME_MAX_BYTES, 0)
        assert used == len(out)
        assert len(items) == len(passed) == len(sent)
        for number, ((raw, payload), one, other) in enumerate(zip(sent, items, passed)):
            bare = content_header.cut(content_header.cut(payload, POSITION), ID)
            stamped = stamps.stamp(bare, stamps.position_field(b"257.%d/1" % (FIRST + number)))
            assert logged[one[4] : one[5]] == bare
            assert out[other[4] : other[5]] == stamped
            [whole], _ = frames.scan(raw, 0, frames.FRAME_MAX_BYTES, 0)
            for data, item in ((logged, one), (out, other)):
                assert data[item[2] - 7 : item[3] + 1] == raw[: whole[3] + 1]
                assert data[item[5] : item[6]] == raw[whole[5] :]

    asyncio.run(scenario())


def test_ids_of_the_producer_break_a_run_where_they_do_not_follow_each_other() -> None:
    async def scenario() -> None:
        connection = Connection("p")
        plain, _ = message("orders", b"", True, b"abc")
        of = {number: message("orders", content_header.field(ID, b"p/%d" % number), True, b"abc")[0] for number in (1, 2, 4)}
        connection.relay.client_data(plain * 3 + of[1] + of[2] + of[2] + of[4] + plain * 3)
        connection.replica.flush()
        told = [(run.enqueues.id_first, len(run.enqueues.lengths)) for run in connection.runs]
        assert told == [(0, 3), (1, 2), (4, 1), (0, 3)]
        assert connection.replica.next_sequence == FIRST + 9

    asyncio.run(scenario())


def numbered(number: int) -> bytes:
    return message("orders", content_header.field(ID, b"p/%d" % number), True, b"abc")[0]


def test_an_ascending_producer_makes_known_what_it_skips_but_not_what_was_refused() -> None:
    async def scenario() -> None:
        connection = Connection("p", ascending=True)
        relay = connection.relay
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        relay.client_data(b"".join(map(numbered, (3, 4, 9, 5, 1 << 60))))
        connection.replica.flush()
        relay.broker_data(encode.nack(1, 4))
        relay.client_data(numbered((1 << 60) + 1) + numbered(1 << 60) + numbered(7))
        connection.replica.flush()
        told = [(e.id_skipped, e.id_first, len(e.lengths)) for run in connection.runs if (e := run.enqueues).producer]
        top = 1 << 60
        assert told == [(2, 3, 2), (4, 9, 1), (top - 10, top, 1), (0, top + 1, 1), (0, top, 1)]
        dedup = connection.replica.index.dedup
        assert all(dedup.seen(relay.producer_key, n) for n in (1, 3, 5, 7, 9, 1 << 40, top, top + 1))
        assert not dedup.seen(relay.producer_key, top + 2)
        assert relay.door.counters["repeats"] == 2, "5 and 7 are confirmed, and not published"

    asyncio.run(scenario())


def test_an_ascending_producer_whose_entry_goes_nowhere_loses_its_channel() -> None:
    """The entry has no place in the log: the next number would make its number known, and a repeat would be confirmed."""

    async def scenario() -> None:
        connection = Connection("p", vhost="lrq", ascending=True)
        relay = connection.relay

        def transmission(number: int, destination: str) -> bytes:
            entry = pb.RoutingTableEntryMsg(destinations=[destination], payload=0)
            body = pb.Transaction(client_name="c", type=pb.LOG_ENTRY_SYNC, payloads=[b"x"], entries=[entry]).SerializeToString()
            return message("LRQ_Send_LogEntries", content_header.field(ID, b"p/%d" % number), True, body)[0]

        relay.client_data(transmission(5, "west") + transmission(7, "nowhere") + transmission(8, "west"))
        connection.replica.flush()
        assert [(run.transmission.id, run.transmission.id_skipped) for run in connection.runs] == [(5, 4)]
        assert relay.channels[1].closing
        assert b"nowhere" in relay.channels[1].refusal
        assert not connection.replica.index.dedup.seen(relay.producer_key, 7)

    asyncio.run(scenario())


@pytest.mark.parametrize("local", [False, True])
def test_what_is_not_safe_costs_no_more_memory_than_its_limit(local: bool) -> None:
    """Publishes without a body on alternating channels, each a run of its own: what is kept for one is many times its bytes."""

    async def scenario() -> None:
        connection = Connection()
        connection.log_is_safe = False
        door, relay = connection.relay.door, connection.relay
        door.buffered_bytes_max = 1 << 20
        cast(Any, door).completes_locally = lambda _: local
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + encode.method_frame(2, commands.Confirm.Select()))
        connection.broker.data = b""
        header = content_header.header_payload(0)
        both = b"".join(encode.publish_method(n, "", "orders") + b"".join(encode.content(n, header, b"", 4_096)) for n in (1, 2))
        taken = 0
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            while connection.client.reads:
                relay.client_data(both * 20)
                connection.replica.flush()
                taken += 40
            assert tracemalloc.get_traced_memory()[0] - before < door.buffered_bytes_max
        finally:
            tracemalloc.stop()
        connection.replica.progress.safe_advanced(connection.log.end)
        assert connection.client.reads
        assert connection.replica.progress.unsafe_bytes == 0
        assert len(frames.scan(connection.broker.data, 0, frames.FRAME_MAX_BYTES, 0)[0]) == taken

    asyncio.run(scenario())


def test_transactions_that_the_routing_queues_have_not_taken_are_limited() -> None:
    """They are safe, and confirmed: a provider that is faster than the broker's second stream filled the primary's memory."""

    async def scenario() -> None:
        connection = Connection("p", "lrq")
        relay, replica = connection.relay, connection.replica
        relay.door.buffered_bytes_max = 1 << 20
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        sent = 0
        replica.to_apply_bytes += 1 << 21  # of others
        relay.flow.consider_pausing()
        assert connection.client.reads, "this client has sent no transaction"
        replica.to_apply_bytes -= 1 << 21
        while connection.client.reads and sent < 1_000:
            sent += 1
            body = pb.Transaction(
                client_name="stock", type=pb.LOG_ENTRY_SYNC, payloads=[b"x" * 10_000], entries=[pb.RoutingTableEntryMsg(destinations=["west"])]
            ).SerializeToString()
            raw, _ = message("LRQ_Send_LogEntries", content_header.field(ID, b"p/%d" % sent), True, body)
            relay.client_data(raw)
            replica.flush()
        assert replica.progress.unsafe_bytes == 0
        assert sent == len(replica.to_apply) == (1 << 20) // 10_000 + 1
        while replica.to_apply:
            replica.to_apply_bytes -= replica.to_apply.popleft().size
        replica.progress.room_made()
        assert connection.client.reads

    asyncio.run(scenario())


def test_a_small_publish_does_not_keep_all_that_was_read_with_it() -> None:
    """Until its batch is made, which takes a while in an alarm of the broker, it stays as it came. Only its own bytes count as not safe."""

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        raw, _ = message("orders", b"", True, b"x")
        relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        relay.channels[2].state = ChannelState.TOLD  # what comes on it counts no more
        rest = on(2, message("orders", b"", True, b"y" * 100_000)[0]) * 2
        connection.broker.data = b""
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20):
                relay.client_data(raw + rest)
            assert connection.replica.progress.unsafe_bytes < 50_000
            assert tracemalloc.get_traced_memory()[0] - before < len(rest)
        finally:
            tracemalloc.stop()
        connection.replica.flush()
        assert b"".join(run.enqueues.frames for run in connection.runs) == raw * 20

    asyncio.run(scenario())


def test_confirms_that_wait_for_backups_are_kept_up_to_a_limit() -> None:
    """A primary that still waits for its expected backups confirms nothing; who publishes on is not read past door.client_buffer_bytes_max."""

    async def scenario() -> None:
        connection = Connection()
        connection.replica.node.role = Role.RECOVERING
        relay, limit = connection.relay, connection.relay.door.config.client_buffer_bytes_max
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        raw, _ = message("orders", b"", True, b"x")
        tag = 0
        while connection.client.reads:
            relay.client_data(raw)
            connection.replica.flush()
            tag += 1
            relay.broker_data(encode.ack(1, tag))
            assert relay.held_bytes <= limit + 100
        assert relay.held_bytes > limit
        connection.client.data = b""
        connection.replica.node.role = Role.ACTIVE
        relay.give_confirms()
        assert connection.client.reads
        assert len(frames.scan(connection.client.data, 0, frames.FRAME_MAX_BYTES, 0)[0]) == tag

    asyncio.run(scenario())


def test_what_comes_before_a_malformed_publish_is_taken() -> None:
    """As by a broker, which takes one after the other: of what came in the same read nothing was in the log."""

    async def scenario() -> None:
        connection = Connection()
        bad = content_header.header_payload(0, b"\x20\x00\xff\xff\xff\xff")  # headers that are longer than their frame
        sent = [message("orders", b"", True, b"%d" % n)[0] for n in range(3)]
        data = b"".join((*sent, encode.publish_method(1, "", "orders"), *encode.content(1, bad, b""), sent[0]))
        items, _ = frames.scan(data)
        with pytest.raises(LrqError):
            methods_publish.take(connection.relay, data, items, 0)
        connection.replica.flush()
        assert [len(run.enqueues.lengths) for run in connection.runs] == [3]
        assert connection.broker.data.count(b"orders") == 3

    asyncio.run(scenario())


def test_what_comes_back_is_forgotten_with_its_ack() -> None:
    """Without IDs, too: it was noted for the life of its channel."""

    async def scenario() -> None:
        connection = Connection("p")
        relay = connection.relay
        for tag, table in enumerate((b"", content_header.field(ID, b"p/1"), b""), 1):
            relay.client_data(message("orders", table, True, b"x")[0])
            connection.replica.flush()
            [item] = frames.scan(connection.broker.data)[0][-1:]
            content = connection.broker.data[frames.end_of(item) - (item[6] - item[4] + 7) : item[6]]
            relay.broker_data(encode.method_frame(1, commands.Basic.Return(312, "NO_ROUTE", "", "orders")) + content)
            assert relay.channels[1].returned == {connection.log.end}
            relay.broker_data(encode.ack(1, tag))
            assert not relay.channels[1].returned
        connection.replica.flush()
        assert [list(run.refused.sequences) for run in connection.runs if run.WhichOneof("kind") == "refused"] == [[FIRST + 1, FIRST + 1]]

    asyncio.run(scenario())


@pytest.mark.parametrize("nacked", [True, False])
def test_a_publish_whose_id_gets_free_is_answered_when_that_is_safe(nacked: bool) -> None:
    """Who hears of it uses the number for another message, which a node that has not heard of it takes for a repeat."""

    async def scenario() -> None:
        connection = Connection("p")
        relay = connection.relay
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        relay.client_data(b"".join(message("orders", content_header.field(ID, b"p/%d" % number), True, b"x")[0] for number in (1, 2, 3)))
        connection.replica.flush()
        connection.log_is_safe = False
        back = frames.scan(connection.broker.data)[0][1]
        connection.client.data = b""
        if nacked:
            relay.broker_data(encode.nack(1, 2))
        else:
            content = connection.broker.data[back[3] + 1 : back[6]]
            relay.broker_data(encode.method_frame(1, commands.Basic.Return(312, "NO_ROUTE", "", "orders")) + content)
            connection.client.data = b""
        relay.broker_data(encode.ack(1, 3, True))
        connection.replica.flush()
        assert connection.client.data == encode.ack(1, 1) + encode.ack(1, 3)
        assert not connection.replica.index.dedup.seen(relay.producer_key, 2)
        connection.replica.progress.safe_advanced(connection.log.end)
        assert connection.client.data[len(encode.ack(1, 1)) * 2 :] == (encode.nack if nacked else encode.ack)(1, 2)

    asyncio.run(scenario())


def test_an_ack_costs_no_look_at_every_repeat_that_waits() -> None:
    """Each was looked at whenever anything was applied, on any connection: so a thousand of them cost all connections."""

    async def scenario() -> None:
        connection, count = Connection("p"), 500
        relay = connection.relay
        looks: list[int] = []

        class Tracker(AppliedTracker):
            def is_applied(self, seq: int) -> bool:
                looks.append(seq)
                return super().is_applied(seq)

        connection.replica.progress.tracker = Tracker()
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        for _ in range(2):
            relay.client_data(b"".join(message("orders", content_header.field(ID, b"p/%d" % n), True, b"x")[0] for n in range(1, count + 1)))
        connection.replica.flush()
        connection.client.data = b""
        looks.clear()
        for tag in (count, 2, *(tag for tag in range(1, count) if tag != 2)):
            relay.broker_data(encode.ack(1, tag))
            assert len(looks) <= 2, "for the one whose first one this is"
            looks.clear()
        answers = [frames.tag_and_bits(connection.client.data, item[2]) for item in frames.scan(connection.client.data)[0]]
        assert sorted(tag for tag, _ in answers) == list(range(1, 2 * count + 1))
        assert not any(bits for _, bits in answers)
        assert not relay.busy

    asyncio.run(scenario())


def test_a_connection_that_ends_waits_for_nothing() -> None:
    async def scenario() -> None:
        connection = Connection("p")
        relay, progress = connection.relay, connection.replica.progress
        cast(Any, relay.door).session_closed = lambda _: None
        relay.client_data(b"".join(message("orders", content_header.field(ID, b"p/%d" % n), True, b"x")[0] for n in (1, 2, 1, 2, 1)))
        connection.replica.flush()
        assert (relay.repeats.waiting, len(progress._awaited), progress._awaited_entries) == (3, 2, [FIRST, FIRST + 1])
        relay.close()
        assert (relay.repeats.waiting, progress._awaited, progress._awaited_entries) == (0, {}, [])

    asyncio.run(scenario())


def on(channel: int, data: bytes) -> bytes:
    return encode.rechannel(data, channel)


async def commits(connection: Connection, *publishes: bytes) -> None:
    """On channel 2, and the broker has done it."""
    relay = connection.relay
    relay.client_data(b"".join(on(2, each) for each in publishes) + encode.method_frame(2, commands.Tx.Commit()))
    relay.broker_data(encode.method_frame(2, commands.Tx.RollbackOk()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not relay.from_client.stalled
    connection.replica.flush()
    relay.broker_data(encode.method_frame(2, commands.Tx.CommitOk()))


@pytest.mark.parametrize("refused", [False, True])
def test_a_commit_stands_for_its_repeats(refused: bool) -> None:
    """It is answered when those are in the queues, and before what was committed later. One whose first one was refused was told to be done."""

    async def scenario() -> None:
        connection = Connection("p")
        relay, done = connection.relay, encode.method_frame(2, commands.Tx.CommitOk())
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + encode.method_frame(2, commands.Tx.Select()))
        of = {number: message("orders", content_header.field(ID, b"p/%d" % number), True, b"abc")[0] for number in (1, 2, 3, 4)}
        relay.client_data(of[1] + of[2])
        connection.replica.flush()
        connection.client.data = connection.broker.data = b""
        await commits(connection, of[3], of[1], of[3], of[2])
        await commits(connection, of[4])
        assert connection.client.data == b"", "the second waits behind the first"
        relay.broker_data(encode.ack(1, 2))
        assert connection.client.data == encode.ack(1, 2)
        assert connection.replica.progress.tracker.applied < FIRST, "it has not waited for all before that"
        connection.client.data = connection.broker.data = b""
        relay.client_data(encode.method_frame(2, commands.Tx.Commit()))
        relay.broker_data(encode.nack(1, 1) if refused else encode.ack(1, 1))
        connection.replica.flush()
        relay.broker_data(done)
        if not refused:
            assert connection.client.data == done * 2 + encode.ack(1, 1) + done
            return
        assert connection.client.data == encode.nack(1, 1)
        assert frames.scan(connection.broker.data)[0][-1][:2] == (frames.CHANNEL_CLOSE, 2), "and what was committed later is no answer to this"
        connection.client.data = b""
        relay.broker_data(encode.method_frame(2, commands.Channel.CloseOk()))
        text = "PRECONDITION_FAILED - partial tx completion"
        assert connection.client.data == encode.channel_close(2, 406, text, frames.TX_COMMIT)
        assert not relay.busy

    asyncio.run(scenario())


def test_commits_of_repeats_that_wait_are_limited() -> None:
    """A repeat costs the log nothing, nor does a commit that consists of repeats; each answer was kept until the first one is applied."""

    async def scenario() -> None:
        connection = Connection("p")
        relay, done = connection.relay, encode.method_frame(2, commands.Tx.CommitOk())
        relay.door.config = cast(DoorTable, relay.door.config).model_copy(update={"questions_max": 100})
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + encode.method_frame(2, commands.Tx.Select()))
        raw, _ = message("orders", content_header.field(ID, b"p/1"), True, b"x")
        relay.client_data(raw)
        connection.replica.flush()
        connection.client.data = b""
        sent = 0
        while connection.client.reads and sent < 1_000:
            await commits(connection, raw, raw)
            relay.flow.consider_pausing()  # as with the next word of the client
            sent += 1
        assert sent == 34, "each with two repeats"
        relay.broker_data(encode.ack(1, 1))
        assert connection.client.data == done * sent + encode.ack(1, 1)
        assert connection.client.reads
        assert not relay.repeats.waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_closed_is_kept_by_no_timer(whole: bool) -> None:
    """Each channel and connection that closed with publishes under way was kept for door.drain_timeout_s, when it was long over."""

    async def scenario() -> None:
        connection = Connection()
        relay, loop = connection.relay, asyncio.get_running_loop()
        cast(Any, relay.door).session_closed = lambda _: None
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        relay.client_data(message("orders", b"", True, b"x")[0])
        connection.replica.flush()
        number = 0 if whole else 1
        close = (commands.Connection if whole else commands.Channel).Close(200, "", 0, 0)
        relay.client_data(encode.method_frame(number, close))
        far = loop.time() + relay.door.config.drain_timeout_s / 2
        timers = [timer for timer in cast(Any, loop)._scheduled if timer.when() > far]
        assert len(timers) == 1, "the broker has not confirmed it"
        assert not timers[0].cancelled()
        relay.broker_data(encode.ack(1, 1))
        assert timers[0].cancelled()
        assert frames.scan(connection.broker.data)[0][-1][:2] == (close.index, number)
        if whole:
            relay.client_data(message("orders", b"", True, b"x")[0])
            relay.client_lost()
            assert relay.closed
            assert all(timer.cancelled() for timer in cast(Any, loop)._scheduled if timer.when() > far)

    asyncio.run(scenario())


def test_a_consume_that_waited_for_its_tag_waits_for_a_queue_that_is_moved() -> None:
    """That had begun meanwhile: its consumer took what was to stand still."""

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay

        async def until(done: Callable[[], bool]) -> None:
            for _ in range(2_000):
                if done():
                    return
                await asyncio.sleep(0.005)
            pytest.fail("not in time")

        relay.client_data(encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag="c")))
        relay.broker_data(encode.method_frame(1, commands.Basic.ConsumeOk("c")))
        relay.client_data(encode.method_frame(1, commands.Basic.Cancel("c")))
        relay.client_data(encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag="c", nowait=True)))
        assert relay.from_client.stalled
        moving = connection.replica.moving[("/", "orders")] = QueueHold(("/", "orders"))
        connection.broker.data = b""
        relay.broker_data(encode.method_frame(1, commands.Basic.CancelOk("c")))
        await until(lambda: relay.from_client.stalled and len(relay._tasks) == 1 and "_unstall_after" in repr(relay._tasks))
        assert connection.broker.data == b""
        del connection.replica.moving[("/", "orders")]
        moving.over.set()
        await until(lambda: connection.broker.data != b"")
        assert frames.scan(connection.broker.data)[0][0][0] == frames.BASIC_CONSUME

    asyncio.run(scenario())


def test_repeats_that_wait_for_the_own_stream_are_limited() -> None:
    """With local completion, as those that wait for anything else: the log does not grow by them, so nothing else bounds them."""

    async def scenario() -> None:
        connection = Connection("p")
        relay, node = connection.relay, cast(Any, connection.replica.node)
        connection.log_is_safe, node.durable = False, FIRST - 1
        relay.door.config = cast(DoorTable, relay.door.config).model_copy(update={"questions_max": 100})
        cast(Any, relay.door).completes_locally = lambda _: True
        raw, _ = message("orders", content_header.field(ID, b"p/1"), True, b"x")
        sent = 0
        while connection.client.reads and sent < 1_000:
            relay.client_data(raw)
            sent += 1
        assert sent == 101
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        connection.client.data = b""
        connection.replica.flush()
        node.durable = FIRST
        connection.replica.progress.durable_advanced()
        assert connection.client.reads
        assert connection.client.data == b"".join(encode.ack(1, tag) for tag in range(1, sent + 1))

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["answered", "closed by the broker", "closed by the client"])
def test_confirms_behind_a_select_are_kept_up_to_a_limit(ends: str) -> None:
    """What the door itself confirms waits for the broker's confirm.select-ok, and that for a publish before it, which may not be safe for long."""

    async def scenario() -> None:
        connection = Connection("p")
        relay, limit = connection.relay, connection.relay.door.config.client_buffer_bytes_max
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        first, second = (message("orders", content_header.field(ID, b"p/%d" % n), True, b"x")[0] for n in (1, 2))
        relay.client_data(first)
        connection.replica.flush()
        relay.broker_data(encode.ack(1, 1))
        connection.log_is_safe = False
        relay.client_data(second)
        connection.replica.flush()
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + encode.method_frame(2, commands.Confirm.Select()))
        connection.client.data = b""
        sent = 0
        while connection.client.reads and sent < 10_000:
            relay.client_data(on(2, first))
            sent += 1
        acks = b"".join(encode.ack(2, tag) for tag in range(1, sent + 1))
        assert connection.client.data == b""
        assert limit < len(acks) == relay.held_bytes < limit + 100
        if ends == "answered":
            ok = encode.method_frame(2, commands.Confirm.SelectOk())
            relay.broker_data(ok)
            assert connection.client.data == ok + acks
        elif ends == "closed by the broker":
            relay.broker_data(encode.channel_close(2, 404, "NOT_FOUND", frames.QUEUE_DECLARE))
        else:
            relay.client_data(encode.method_frame(2, commands.Channel.Close(200, "", 0, 0)))
            relay.broker_data(encode.method_frame(2, commands.Channel.CloseOk()))
        assert connection.client.reads
        assert relay.held_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["channels in turn", "every second one has an ID", "one waits"])
def test_a_publish_is_asked_once_whether_it_waits_for_a_queue_that_is_moved(ends: str) -> None:
    """All that were left of a read were asked for each run of them: of publishes on two channels in turn, each is one."""

    class Counting(QueueHold):
        looks = 0

        def reached_by(self, vhost: str, definitions: Definitions, method: bytes, header: bytes) -> bool:
            self.looks += 1
            return super().reached_by(vhost, definitions, method, header)

    async def scenario() -> None:
        connection, many = Connection("p"), 200
        relay = connection.relay
        relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        moving = connection.replica.moving[("/", "deep")] = Counting(("/", "deep"))
        publishes = []
        for number in range(1, many + 1):
            table = content_header.field(ID, b"p/%d" % number) if number % 2 and ends != "channels in turn" else b""
            publish, _ = message("deep" if ends == "one waits" and number == many else "orders", table, True, b"")
            publishes.append(encode.rechannel(publish, 1 + number % 2) if ends == "channels in turn" else publish)
        relay.client_data(b"".join(publishes))
        connection.replica.flush()
        assert moving.looks == many
        waits = ends == "one waits"
        assert relay.from_client.stalled == waits
        assert sum(len(run.enqueues.lengths) for run in connection.runs) == many - waits

    asyncio.run(scenario())


def test_a_cancel_looks_at_no_consume_that_has_no_answer() -> None:
    class Counting(deque[Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            self.looks += len(self)
            return super().__iter__()

        def __reversed__(self) -> Iterator[Any]:
            self.looks += len(self)
            return super().__reversed__()

    async def scenario() -> None:
        relay = Connection().relay
        channel = relay.channels[1]
        channel.consuming = consuming = Counting()
        for tag in "abcdefgh":
            relay.client_data(encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag=tag)))
        for tag in "hgfedcbax":
            relay.client_data(encode.method_frame(1, commands.Basic.Cancel(consumer_tag=tag)))
        assert not consuming.looks
        assert all(consumer.cancelled for consumer in list(consuming))

    asyncio.run(scenario())


def test_a_cancel_is_of_the_last_consumer_that_was_asked_for_by_its_tag() -> None:
    async def scenario() -> None:
        relay = Connection().relay
        channel = relay.channels[1]
        consume = encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag="c"))
        cancel = encode.method_frame(1, commands.Basic.Cancel(consumer_tag="c"))
        relay.client_data(consume + cancel + consume)
        first, second = channel.consuming
        relay.broker_data(encode.method_frame(1, commands.Basic.ConsumeOk("c")) + encode.method_frame(1, commands.Basic.CancelOk("c")))
        relay.client_data(cancel)
        assert first.cancelled
        assert second.cancelled
        relay.broker_data(encode.method_frame(1, commands.Basic.ConsumeOk("c")))
        assert channel.consumers == {b"c": second}
        assert not channel.asked

    asyncio.run(scenario())
