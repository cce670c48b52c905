"""A connection whose client has vanished, or hears nothing of its broker for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from pamqp import commands
from test_publishing import FIRST, POSITION, Connection, message

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.door.broker_reader import BrokerReader
from broker_plugin.door.client_connection import LEAVE_POLL_S, SEEN_S, ClientConnection
from broker_plugin.door.intercept import InterceptPoints
from broker_plugin.door.method_table import FROM_BROKER, FROM_CLIENT
from broker_plugin.door.server import Door
from broker_plugin.log.messages import Delivery
from broker_plugin.methods import acknowledge, consume, deliver
from broker_plugin.methods import publish as methods_publish
from broker_plugin.renewal.queue_pause import QueuePause
from broker_plugin.session.channel import ClientChannel
from broker_plugin.session.flow_control import FlowControl
from broker_plugin.session.session import FEW_QUESTIONS
from broker_plugin.session.unacked import Unacked
from lrq_ha.errors import LrqError, NotPrimary
from lrq_ha.interceptors.events import Outcome, Point


def publish(channel: int, queue: str, body: bytes) -> bytes:
    return encode.rechannel(message(queue, b"", True, body)[0], channel)


def test_a_client_that_has_vanished_is_looked_after_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the log gets safe further meanwhile: each time began one more series of looks, which went on to the end."""
    looks: list[Any] = []

    async def vanish() -> None:
        def call_later(after_s: float, look: Any) -> None:
            if after_s == LEAVE_POLL_S:
                looks.append(look)

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        relay = ClientConnection.__new__(ClientConnection)
        mocks = {name: MagicMock() for name in ("client", "outbox", "flow", "from_client", "replica")}
        state: dict[str, Any] = {**mocks, "watch": None}
        door = SimpleNamespace(config=SimpleNamespace(drain_timeout_s=60))
        for name, value in {**state, "door": door, "closed": False, "channels": {}, "timer": None}.items():
            setattr(relay, name, value)
        relay.outbox.__bool__.return_value = True  # type: ignore[attr-defined]
        relay.client_lost()
        for _ in range(10):
            relay.broker_full(False)
        assert len(looks) == 1
        looks.pop()()
        assert len(looks) == 1

    asyncio.run(vanish())


def test_a_client_hears_heartbeats_while_nothing_is_read_from_its_broker() -> None:
    """As more is withheld than may be: the broker's own heartbeats are not read, and the client would take the connection for dead."""
    told: list[bytes] = []
    config = SimpleNamespace(connection_buffer_bytes_max=10, message_bytes_max=100)
    relay = SimpleNamespace(closed=False, client=MagicMock(), broker=MagicMock(), to_client=told.append, outbox=SimpleNamespace(sent_at=0.0))
    relay.frame_max_bytes = frames.FRAME_MAX_BYTES
    relay.broker.is_closing.return_value = False
    relay.door = SimpleNamespace(now=lambda: 0.0, config=config)
    relay.flow = FlowControl(cast(ClientConnection, relay), heartbeat_s=10)
    relay.from_broker = BrokerReader(cast(ClientConnection, relay))
    relay.from_broker.withheld[1] = []
    relay.from_broker._withhold(1, b"x")
    relay.flow.tick(1.0)
    assert told == []
    relay.from_broker._withhold(1, b"x" * 10)
    relay.broker.pause_reading.assert_called_once()
    relay.flow.tick(2.0)
    assert told == [frames.HEARTBEAT_FRAME]


CONSUME = encode.method_frame(1, commands.Basic.Consume(queue="q", consumer_tag="c", nowait=True))
WAITS = {  # what the client sends before it reads no more, and then; and the broker's answer, before which nothing more is taken from it
    "a commit": (
        encode.method_frame(2, commands.Tx.Select()),
        publish(2, "orders", b"x") + encode.method_frame(2, commands.Tx.Commit()),
        encode.method_frame(2, commands.Tx.RollbackOk()),
    ),
    "a consumer's end": (
        CONSUME + encode.method_frame(1, commands.Basic.Cancel(consumer_tag="c")),
        CONSUME,
        encode.method_frame(1, commands.Basic.CancelOk(consumer_tag="c")),
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_while_an_answer_is_waited_for_the_broker_is_read_from_though_the_client_reads_nothing(what: str) -> None:
    """The answer may stand behind deliveries that this client does not read, as it is not taken from before: nobody would ever go on."""
    before, asks, answer = WAITS[what]

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + before)
        relay.client_full(True)
        assert not connection.broker.reads
        relay.client_data(asks)
        await asyncio.sleep(0.02)
        assert relay.from_client.stalled
        assert connection.broker.reads
        relay.broker_data(answer)
        await asyncio.sleep(0.02)
        assert not relay.from_client.stalled
        assert not connection.broker.reads

    asyncio.run(scenario())


def test_a_commit_that_waits_for_a_declaration_does_not_have_the_broker_read() -> None:
    """Its broker has answered: no need to give the client more than it reads."""
    before, asks, answer = WAITS["a commit"]

    async def scenario() -> None:
        connection = Connection()
        relay, barrier = connection.relay, connection.replica.barrier
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + before)
        relay.client_full(True)
        relay.client_data(asks)
        await asyncio.sleep(0)
        barrier._free.clear()
        relay.broker_data(answer)
        await asyncio.sleep(0.02)
        assert relay.from_client.stalled
        assert not connection.broker.reads
        barrier._free.set()
        await asyncio.sleep(0.02)
        assert not relay.from_client.stalled

    asyncio.run(scenario())


@pytest.mark.parametrize(("error", "code"), [(ValueError("hunter2"), 541), (NotPrimary("it is not"), 320), (LrqError("no"), 541)])
def test_what_fails_in_the_background_ends_the_connection(error: Exception, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its client would wait forever; and nobody would hear why."""

    async def fail() -> None:
        raise error

    async def scenario() -> None:
        connection = Connection()
        relay: Any = connection.relay
        relay.close_client = MagicMock()
        relay.spawn(fail())
        for _ in range(3):
            await asyncio.sleep(0)
        assert relay.close_client.call_args.args[0] == code

    asyncio.run(scenario())
    assert ("could not be handled: ValueError at" in caplog.text) is isinstance(error, ValueError)
    assert "hunter2" not in caplog.text


LAST_WORDS: dict[str, Callable[[Connection], None]] = {
    "the client's close": lambda connection: connection.relay.client_data(encode.method_frame(0, commands.Connection.Close(200, "", 0, 0))),
    "the door's close": lambda connection: connection.relay.stop("it stops"),
    "the client's end": lambda connection: connection.relay.client_lost(),
}


class UnackedClient(Connection):
    """Its channel 2 has a consumer without acks, or asks for one message so; channel 1 waits for a confirm."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.replica.index.generations.opened(0, 1)
        self.relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        if asks:
            self.relay.client_data(encode.method_frame(2, commands.Basic.Get(queue="orders", no_ack=True)))
        else:
            self.relay.client_data(encode.method_frame(2, commands.Basic.Consume(queue="orders", consumer_tag="c", no_ack=True)))
            self.relay.broker_data(encode.method_frame(2, commands.Basic.ConsumeOk("c")))
        self.relay.client_data(publish(1, "orders", b"the broker owes an answer"))
        self.replica.flush()

    def dequeued(self) -> list[list[int]]:
        """Ranges of sequences, by entries of the log."""
        self.replica.flush()
        return [list(run.dequeue.sequences) for run in self.runs if run.WhichOneof("kind") == "dequeue"]


def comes(sequence: int, body: bytes, *, asked: bool = False) -> tuple[bytes, bytes]:
    """A delivery on channel 2: (method and header, body)."""
    method = encode.method_frame(2, commands.Basic.Deliver("c", sequence, False, "", "orders"))
    if asked:
        method = encode.method_frame(2, commands.Basic.GetOk(sequence, False, "", "orders", 0))
    payload = content_header.header_payload(len(body), content_header.properties(content_header.field(POSITION, b"257.%d/1" % sequence)))
    header, *bodies = encode.content(2, payload, body)
    return method + header, b"".join(bodies)


@pytest.mark.parametrize("asks", [False, True], ids=["consumer", "get"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in pieces"])
@pytest.mark.parametrize("word", LAST_WORDS)
def test_what_comes_behind_the_last_word_is_not_taken_by_a_consumer_without_acks(word: str, whole: bool, asks: bool) -> None:
    """The door acked it, though nobody had it: it was in no queue any more."""

    async def scenario() -> None:
        connection = UnackedClient(asks)
        LAST_WORDS[word](connection)
        if word == "the door's close":
            connection.relay.broker_data(encode.ack(1, 1))
            await asyncio.sleep(SEEN_S + 2 * LEAVE_POLL_S)
            assert b"it stops" in connection.client.data
        first, rest = comes(FIRST, b"x" * (1 if whole else 2 * frames.HOLD_BYTES_MAX), asked=asks)
        if whole:
            connection.relay.broker_data(first + rest)
        else:
            connection.relay.broker_data(first)
            connection.relay.broker_data(rest)
        assert connection.dequeued() == []
        assert encode.ack(2, FIRST) not in connection.broker.data
        relay, key = connection.relay, ("/", "orders")
        channel, door = relay.channels[2], cast(Door, SimpleNamespace(sessions=[relay]))
        assert key in connection.unsure, "it is neither ready nor held: a tally would be too low"
        channel.paused.update(channel.consumers)
        assert not QueuePause(door, relay.replica, key, {})._is_idle(), "a renewal would look for it too soon"

    asyncio.run(scenario())


def test_what_comes_for_a_channel_that_is_closing_is_not_taken_by_a_consumer_without_acks() -> None:
    """It goes back with the channel: until then it is neither ready nor held."""

    async def scenario() -> None:
        connection = UnackedClient()
        connection.relay.client_data(encode.method_frame(2, commands.Channel.Close(200, "", 0, 0)))
        connection.relay.broker_data(b"".join(comes(FIRST, b"x")))
        assert connection.dequeued() == []
        assert encode.ack(2, FIRST) not in connection.broker.data
        assert ("/", "orders") in connection.unsure, "a tally would be too low"
        connection.relay.broker_data(encode.method_frame(2, commands.Channel.CloseOk()))
        assert not connection.unsure

    asyncio.run(scenario())


KEY = b"x\nERROR lrq_ha.core: this node is diverged"
TABLES: dict[str, bytes] = {
    "a long name": bytes([200]) + KEY.ljust(200, b"p") + b"t\1",
    "no UTF-8": b"\1kS\0\0\0\3\xff\xfea",
    "a time after the year 9999": b"\1kT" + b"\xff" * 8,
    "small numbers": b"\1kb\5\1ls\0\5",
}


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_the_arguments_of_a_consumer_reach_the_broker_to_the_octet(table: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """They were decoded and encoded anew, and so cut, changed or refused, and told to whoever reads the log."""
    connection = Connection()
    arguments = len(table).to_bytes(4, "big") + table
    method = encode.encode_method(commands.Basic.Consume(queue="orders", consumer_tag="c"))
    connection.relay.client_data(encode.frame(frames.METHOD, 1, method[:-4] + arguments))
    assert connection.broker.data == encode.frame(frames.METHOD, 1, method[:-4] + arguments)
    assert not caplog.records


def test_a_consumer_that_ends_too_early() -> None:
    connection = Connection()
    channel = connection.relay.channels[1]
    payload = encode.encode_method(commands.Basic.Consume(queue="orders"))
    for size in (4, 6, 8, len("orders") + 7):
        with pytest.raises(frames.FrameError):
            consume.consume(connection.relay, channel, frames.BASIC_CONSUME, payload[:size])


def test_what_has_begun_for_a_consumer_without_acks_comes_whole_before_the_door_closes() -> None:
    """It counts as taken from its beginning on."""

    async def scenario() -> None:
        connection = UnackedClient()
        relay = connection.relay
        relay.broker_data(encode.ack(1, 1))
        begun, rest = comes(FIRST, b"x" * 2 * frames.HOLD_BYTES_MAX)
        relay.broker_data(begun + rest[:-1])
        relay.stop("it stops")
        await asyncio.sleep(SEEN_S + 3 * LEAVE_POLL_S)
        assert b"it stops" not in connection.client.data
        late, _ = comes(FIRST + 1, b"")
        relay.broker_data(rest[-1:] + late)
        await asyncio.sleep(2 * LEAVE_POLL_S)
        assert begun + rest + encode.connection_close(320, "it stops") in connection.client.data
        assert late not in connection.client.data
        assert connection.dequeued() == [[FIRST, FIRST]]

    asyncio.run(scenario())


def test_a_stop_does_not_wait_for_confirms_that_do_not_come() -> None:
    """The client hears that the connection ends, and why, though its publish has no answer: half of the time is for that."""

    async def scenario() -> None:
        connection = Connection()
        door: Any = connection.relay.door
        door.config = door.config.model_copy(update={"stop_timeout_s": 0.2})
        connection.relay.client_data(publish(1, "orders", b"the broker owes an answer"))
        connection.replica.flush()
        connection.relay.stop("it stops")
        await asyncio.sleep(0)
        assert b"it stops" not in connection.client.data
        async with asyncio.timeout(60):
            while b"it stops" not in connection.client.data:
                await asyncio.sleep(LEAVE_POLL_S)
        assert connection.relay.unanswered

    asyncio.run(scenario())


def test_questions_are_not_counted_with_each() -> None:
    """A client may have thousands of channels, and ask on each thousands of times: each question looked at all of them."""

    class Channels(dict[int, ClientChannel]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        limit = relay.door.config.questions_max
        relay.channels = channels = Channels(relay.channels)
        gets = encode.method_frame(1, commands.Basic.Get(queue="none"))
        relay.client_data(gets * (limit - 1))
        assert channels.looks <= 10
        relay.broker_data(encode.method_frame(1, commands.Basic.GetEmpty()) * (limit // 2))
        relay.client_data(gets * (limit // 2))
        assert channels.looks <= 10 + limit / FEW_QUESTIONS
        assert relay.channels[1].questions == limit - 1 + limit % 2
        cast(Any, relay).close_client = close = MagicMock()
        relay.client_data(gets * (FEW_QUESTIONS + 1))
        assert "door.questions_max" in close.call_args.args[1]

    asyncio.run(scenario())


def test_an_interceptor_hears_of_each_publish_that_a_channels_end_leaves_unanswered() -> None:
    heard: list[tuple[int, Any, Any]] = []

    async def scenario() -> None:
        connection = Connection()
        interceptors = SimpleNamespace(points={Point.ROUTED}, full=False)
        interceptors.tell = lambda _, event: heard.append((event.channel, event.message, event.outcome))
        relay = connection.relay
        cast(Any, connection.replica.node).leading = 257
        relay.watch = watch = InterceptPoints(relay, cast(Any, interceptors))
        relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        for number in 1, 2, 1, 2:
            relay.client_data(publish(number, "orders", b"x"))
        relay.broker_data(encode.ack(1, 1))
        assert [(number, outcome) for number, _, outcome in heard] == [(1, Outcome.ACCEPTED)]
        heard.clear()
        watch.unanswered(2)
        watch.unanswered(2)
        assert [(number, message.position.sequence, outcome) for number, message, outcome in heard] == [
            (2, FIRST + 1, Outcome.UNANSWERED), (2, FIRST + 3, Outcome.UNANSWERED),
        ]  # fmt: skip
        heard.clear()
        relay.broker_data(encode.ack(1, 2))
        assert [(number, message.position.sequence, outcome) for number, message, outcome in heard] == [(1, FIRST + 2, Outcome.ACCEPTED)]
        assert watch._followed.count == 0

    asyncio.run(scenario())


def watched(points: set[Point]) -> Connection:
    """A connection with an interceptor at these points."""
    connection = Connection()
    relay = connection.relay
    cast(Any, connection.replica.node).leading = 257
    relay.watch = watch = InterceptPoints(relay, cast(Any, SimpleNamespace(points=points, full=False, refuse=False, tell=lambda *_: None)))
    relay.take, relay.acks = watch.take, watch.acks
    return connection


@pytest.mark.parametrize("points", [set(), {Point.ROUTED}, {Point.ROUTING}])
def test_what_comes_before_a_malformed_publish_is_taken_whoever_listens(points: set[Point]) -> None:
    async def scenario() -> None:
        connection = watched(points)
        cast(Any, connection.relay).close_client = close = MagicMock()
        method = encode.publish_method(1, "", "orders")
        malformed = encode.frame(1, 1, method[7:-1] + b"more") + publish(1, "orders", b"x")[len(method) :]
        connection.relay.client_data(publish(1, "orders", b"x") * 3 + malformed)
        connection.replica.flush()
        assert [len(run.enqueues.lengths) for run in connection.runs] == [3]
        close.assert_called_once()

    asyncio.run(scenario())


def test_an_ack_of_several_costs_an_interceptor_what_it_covers() -> None:
    class Counted(int):
        looks = 0

        def __le__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) <= other

        def __lt__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) < other

    async def scenario() -> None:
        connection, many = watched({Point.ACCEPT}), 1_000
        watch = cast(InterceptPoints, connection.relay.watch)
        watch._held[1] = Unacked((Counted(tag), cast(Any, tag)) for tag in range(1, many + 1))
        connection.relay.channels[1].deliveries.update((tag, Delivery(("/", "orders"), tag, ())) for tag in range(1, many + 1))
        connection.relay.client_data(b"".join(encode.ack(1, tag, True) for tag in range(2, many + 1, 2)))
        assert not watch._held[1]
        assert Counted.looks < 2 * many

    asyncio.run(scenario())


def test_without_interceptors_the_doors_own_functions_are_called() -> None:
    """So they cost nothing: there is no place where it is asked whether there are any, on the way of a message."""

    async def scenario() -> None:
        relay = Connection().relay
        assert relay.watch is None
        assert (relay.take, relay.deliver, relay.acks) == (methods_publish.take, deliver.deliver, acknowledge.acks)
        assert relay.on_client is FROM_CLIENT
        assert relay.on_broker is FROM_BROKER

    asyncio.run(scenario())


class Unread(Connection):
    """Its client has published, and does not read what is on its way to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.unread, self.aborted = 0.0, 0, False
        door: Any = self.relay.door
        door.now = lambda: self.now
        client: Any = self.client
        client.get_write_buffer_size, client.abort = lambda: self.unread, self._abort
        self.buffer_bytes_max, self.patience_s = door.config.client_buffer_bytes_max, door.config.hold_up_timeout_s
        self.relay.client_data(publish(1, "orders", b"x"))
        self.replica.flush()
        self.unread = self.buffer_bytes_max + 1
        self.relay.client_full(True)
        assert not self.broker.reads

    def _abort(self) -> None:
        self.aborted = True

    def comes(self, size: int) -> bool:
        """So much comes from the broker, and waits for the client. Returns whether the broker is read from."""
        self.unread += size
        self.relay.broker_data(frames.HEARTBEAT_FRAME)
        return self.broker.reads

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.relay.flow.tick(self.now)


def test_a_confirm_for_which_declarations_wait_is_read_though_its_client_reads_nothing() -> None:
    """It stood behind deliveries, and others' declarations waited until the client was cut off: for ten seconds, where a broker waits for thirty."""

    async def scenario() -> None:
        c = Unread()
        async with c.replica.barrier.nobody_declares():
            c.replica.barrier._free.clear()
            c.replica.barrier._tell_changed()
            assert c.comes(12 * c.buffer_bytes_max)
            c.passes(10 * c.patience_s)
            assert not c.aborted
            assert c.client.reads, "it may be writing, and read when that is done"
            c.relay.broker_data(encode.ack(1, 1))
            assert not c.broker.reads
            c.replica.barrier._lower()
        assert not c.broker.reads

    asyncio.run(scenario())


def test_who_has_buried_a_confirm_for_which_declarations_wait_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Not sooner than by a broker, and the log says why."""

    async def scenario() -> None:
        c = Unread()
        c.replica.barrier._free.clear()
        c.replica.barrier._tell_changed()
        assert not c.comes(16 * c.buffer_bytes_max)
        assert c.patience_s >= 30
        c.passes(c.patience_s - 1)
        assert not c.aborted
        c.passes(1)
        assert c.aborted

    asyncio.run(scenario())
    assert "a client of app that does not read holds up a declaration" in caplog.text


@pytest.mark.parametrize("reads", [False, True])
def test_that_the_broker_has_ended_the_connection_of_a_client_that_does_not_read_is_said(reads: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        c = Unread()
        cast(Any, c.relay.door).session_closed = lambda _: None
        c.relay.client_full(not reads)
        c.relay.broker_lost()
        assert not c.replica.barrier.changed

    asyncio.run(scenario())
    assert ("whose client does not read: 16385 bytes wait for it" in caplog.text) is not reads
