"""When a publish is confirmed: by the broker, or with local completion by the own stream; and never while a new primary waits for its backups.

The door's functions run on a connection without sockets; what the client is told is read from the frames.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.amqp import encode, frames
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.log.replica import Replica
from broker_plugin.methods import closing, publish, publisher_confirms, routes
from broker_plugin.session import decisions
from broker_plugin.session.channel import ClientChannel
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Append, Opened, OwnConfirmed, Recovered
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings

pytestmark = pytest.mark.proves("local-completion")


class Connection:
    """What of a Relay these functions touch, with one channel."""

    confirm = ClientConnection.confirm
    give_confirms = ClientConnection.give_confirms

    def __init__(self) -> None:
        self.one = ClientChannel(1)
        self.one.confirms.selected = True
        self.channels = {1: self.one}
        self.pending_durable: Any = deque()
        self.held_confirms: Any = []
        self.held_bytes = 0
        self.flow: Any = SimpleNamespace(consider_pausing=self.nothing)
        self.may_publish = True
        self.asks = self.safe = 0
        self.watch, self.on_settled = None, b""
        self.told: list[tuple[int, bool]] = []
        self.lost = 0
        node = SimpleNamespace(durable=0)
        progress = SimpleNamespace(waiting_durable=set(), applied=self.nothing, confirmed_early=self.nothing)
        self.replica: Any = SimpleNamespace(node=node, holds_confirms=False, progress=progress, refuse=self.nothing)
        self.door: Any = SimpleNamespace(refused_after_confirm=self.count_lost)

    def channel(self, number: int) -> ClientChannel:
        return self.channels[number]

    def count_lost(self, publishes: int) -> None:
        self.lost += publishes

    def nothing(self, *_: object) -> None: ...

    def to_client(self, data: bytes) -> None:
        self.read(data)

    def read(self, data: bytes) -> None:
        """Counts each publish that these frames answer."""
        for kind, _, start, *_ in frames.scan(data, 0, frames.FRAME_MAX_ANY_BYTES)[0]:
            tag, bits = frames.tag_and_bits(data, start)
            answered = {n for n, _ in self.told}
            covered = [n for n in range(1, tag + 1) if n not in answered] if bits & 1 else [tag]
            self.told += [(n, kind == frames.BASIC_ACK) for n in covered]

    def early(self, sequence: int, count: int) -> None:
        run = pb.Run(enqueues=pb.Enqueues(vhost="/", channel=1, frames=b"x" * count, lengths=[1] * count))
        confirms, channel = self.one.confirms, self.one
        tag = confirms.forwarded_early(count, sequence)
        channel.early.append((sequence, run))
        publisher_confirms.until_durable(self, channel, tag, count, sequence + count - 1, count)  # type: ignore[arg-type]

    def broker(self, tag: int, *, multiple: bool, ok: bool) -> None:
        answer = encode.ack(1, tag, multiple) if ok else encode.nack(1, tag, multiple)
        kind = frames.BASIC_ACK if ok else frames.BASIC_NACK
        self.read(publish.answered(self, 1, kind, answer, 7))  # type: ignore[arg-type]

    def durable(self, upto: int) -> None:
        self.replica.node.durable = upto
        publisher_confirms.durable_advanced(self)  # type: ignore[arg-type]


@given(st.data())
def test_every_publish_is_answered_once_and_not_before_its_time(data: st.DataObject) -> None:
    c = Connection()
    sequence = tag = broker = durable = 0
    early: dict[int, int] = {}  # by client's tag: its entry
    by_broker: dict[int, int] = {}  # by the broker's tag: the client's
    open_at_broker: list[int] = []
    heard: set[int] = set()
    held: set[int] = set()
    kinds = st.sampled_from(["early", "ordinary", "durable", "broker", "broker", "hold"])
    for kind in data.draw(st.lists(kinds, max_size=40)):
        if kind in ("early", "ordinary"):
            count = data.draw(st.integers(1, 4))
            if kind == "early":
                c.early(sequence + 1, count)
            else:
                c.one.confirms.forwarded(count, sequence + 1)
            for _ in range(count):
                sequence, tag, broker = sequence + 1, tag + 1, broker + 1
                by_broker[broker] = tag
                open_at_broker.append(broker)
                if kind == "early":
                    early[tag] = sequence
        elif kind == "durable":
            durable = data.draw(st.integers(durable, sequence))
            c.durable(durable)
        elif kind == "broker" and open_at_broker:
            answered = data.draw(st.sampled_from(open_at_broker))
            multiple = data.draw(st.booleans())
            due = [t for t in open_at_broker if t <= answered] if multiple else [answered]
            open_at_broker = [t for t in open_at_broker if t not in due]
            ok = data.draw(st.sampled_from([True, True, False]))
            c.broker(answered, multiple=multiple, ok=ok)
            for t in due:
                if by_broker[t] not in early:
                    (held if ok and c.replica.holds_confirms else heard).add(by_broker[t])
        elif kind == "hold" and not heard and not c.replica.holds_confirms:
            c.replica.holds_confirms = True
        elif kind == "hold" and c.replica.holds_confirms:
            c.replica.holds_confirms = False
            c.give_confirms()
            heard, held = heard | held, set()
        told = Counter(n for n, _ in c.told)
        assert set(told.values()) <= {1}
        # A run is confirmed as a whole.
        assert {n for n in told if n in early} <= {n for n, s in early.items() if s <= durable}
        assert {n for n in told if n not in early} == heard
    c.replica.holds_confirms = False
    c.give_confirms()
    c.durable(sequence)
    for t in open_at_broker:
        c.broker(t, multiple=False, ok=True)
    assert sorted(n for n, _ in c.told) == list(range(1, tag + 1))
    assert not c.one.early
    assert not c.one.confirms.open


def test_one_multiple_ack_for_a_run_that_nothing_older_waits_for() -> None:
    c = Connection()
    sent: list[bytes] = []
    c.to_client = sent.append  # type: ignore[method-assign,assignment]
    c.early(1, 3)
    c.durable(3)
    c.one.confirms.forwarded(1, 4)
    c.early(5, 2)
    c.durable(6)
    assert sent == [encode.ack(1, 3, True), encode.ack(1, 5) + encode.ack(1, 6)]


def test_a_refusal_after_the_confirm_is_counted() -> None:
    c = Connection()
    c.early(1, 2)
    c.durable(2)
    c.broker(2, multiple=True, ok=False)
    assert c.told == [(1, True), (2, True)]
    assert c.lost == 2


def test_a_confirm_that_is_held_is_not_for_another_channel_of_this_number() -> None:
    c = Connection()
    c.replica.holds_confirms = True
    c.one.confirms.forwarded(1, 1)
    c.broker(1, multiple=False, ok=True)
    c.replica.holds_confirms = False
    c.channels[1] = ClientChannel(1)
    c.give_confirms()
    assert not c.told


def header(flags: int, fields: bytes = b"") -> bytes:
    return bytes(4) + (10).to_bytes(8, "big") + flags.to_bytes(2, "big") + fields


@pytest.mark.parametrize(
    ("flags", "fields", "size", "may"),
    [
        (0x1000, b"\x02", 100, True),
        (0x1110, b"\x02\x0260\x03app", 100, True),  # expiration and user-id: the broker has allowed them
        (0x2000, b"\x00\x00\x00\x09\x02CCA\x00\x00\x00\x00", 100, False),  # more queues than its routing key says
        (0x1000, b"\x02", publish.EARLY_BYTES_MAX + 1, False),
    ],
)
def test_only_what_the_broker_will_take(flags: int, fields: bytes, size: int, may: bool) -> None:
    assert publish._may_be_early(header(flags, fields), size) is may


@pytest.mark.parametrize(
    ("exchange", "key", "mandatory", "decision"),
    [
        ("", "metrics.cpu", False, decisions.LOCAL),
        ("", "metrics.stream", False, decisions.LOGGED),  # its broker ends the connection over some headers
        ("", "metrics.cpu", True, decisions.LOGGED),  # its return comes before its confirm
        ("", "orders", False, decisions.LOGGED),
        ("metrics.x", "metrics.cpu", False, decisions.LOGGED),
        ("", "amq.rabbitmq.reply-to", False, decisions.Decision.PASSED),
    ],
)
def test_which_publishes_have_local_completion(exchange: str, key: str, mandatory: bool, decision: decisions.Decision) -> None:
    declared = SimpleNamespace(
        replicates=lambda _key: True, replicates_exchange=lambda _name: True, is_stream=lambda key: key == ("/", "metrics.stream")
    )
    relay: Any = SimpleNamespace(
        vhost="/",
        replica=SimpleNamespace(declared=declared, undeclared=SimpleNamespace(note_publish=lambda *_: None)),
        door=SimpleNamespace(completes_locally=lambda name: name.startswith("metrics.")),
    )
    assert routes.decide(relay, frames.Route(exchange, key, mandatory, False)) is decision


# ---- what becomes of it when nobody knows whether the broker has it --------------------------------------------------------


class Alone:
    """A primary without backups, whose stream confirms when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.node = Node(NodeSettings(1, {1: "e1"}, **settings))
        self.runs: list[pb.Run] = []
        self.replica = Replica(self.node, Levels({"^.*$": "all"}), self.emit)
        self.open = 2
        self.node.handle(Opened(0, False), 0.0)
        self.node.handle(OwnConfirmed(1), 0.0)
        self.node.handle(OwnConfirmed(1), 0.0)
        self.node.handle(Recovered(self.node.leading), 0.0)
        self.replica.index.generations.opened(0, 1)
        self.replica.progress.applied(1, 1)

    def emit(self, first: int, count: int, runs: list[Any]) -> None:
        self.node.handle(Append(count, (first, runs)), 0.0)
        self.runs += runs


def publishes(count: int) -> pb.Run:
    blobs = [b"%d" % n * n for n in range(1, count + 1)]
    entry = pb.Enqueues(vhost="/", channel=1, frames=b"".join(blobs), lengths=[len(b) for b in blobs], producer="p", id_first=11)
    return pb.Run(enqueues=entry)


def test_what_was_confirmed_and_is_in_doubt_is_logged_anew_but_for_what_was_seen() -> None:
    async def scenario() -> None:
        alone = Alone()
        replica = alone.replica
        relay: Any = SimpleNamespace(replica=replica, watch=None)
        channel = ClientChannel(1)
        first = replica.append(run := publishes(5), 5, 15)
        channel.confirms.selected = True
        channel.confirms.forwarded_early(5, first, "p", 11)
        channel.early.append((first, run))
        ordinary = replica.append(pb.Run(enqueues=pb.Enqueues(vhost="/", channel=1, frames=b"o", lengths=[1])))
        channel.confirms.forwarded(1, ordinary)
        channel.confirms.answered(1, False)
        replica.progress.applied(first, first)
        replica.progress.seen(first + 2)
        closing.resolve_unanswered(relay, channel, refused=True)
        replica.flush()
        kinds = [run.WhichOneof("kind") for run in alone.runs]
        assert kinds == ["enqueues", "enqueues", "refused", "refused", "enqueues", "enqueues"]
        assert list(alone.runs[2].refused.sequences) == [ordinary, ordinary]
        assert list(alone.runs[3].refused.sequences) == [first + 1, first + 1, first + 3, first + 4]
        again = [(e.enqueues.id_first, list(e.enqueues.lengths), e.enqueues.frames) for e in alone.runs[4:]]
        assert again == [(12, [2], b"22"), (14, [4, 5], b"444455555")]
        assert [(e.first, e.count) for e in replica.to_apply] == [(ordinary + 3, 1), (ordinary + 4, 2)]
        assert not channel.early

    asyncio.run(scenario())


def test_a_run_among_thousands_is_found_without_a_look_at_the_others() -> None:
    """Each of them is looked for when a broker's connection dies, in one turn of the event loop."""
    looks = 0

    class Run:
        @property
        def enqueues(self) -> pb.Enqueues:
            nonlocal looks
            looks += 1
            return pb.Enqueues(lengths=[1, 1])

    channel = ClientChannel(1)
    channel.early = cast(Any, [(first, Run()) for first in range(10, 8_010, 4)])
    for first, run in channel.early:
        assert [channel.early_run(first + n) for n in range(-1, 3)] == [None, (first, run), (first, run), None]
    assert looks <= 4 * len(channel.early)


def test_what_is_at_stake() -> None:
    async def scenario() -> None:
        replica = Alone().replica
        replica.progress.safe_advanced(10)
        for last, entries, size in ((10, 3, 30), (12, 2, 20), (15, 3, 30)):
            replica.progress.confirmed_early(last, entries, size)
        assert (replica.progress.at_stake_entries, replica.progress.at_stake_bytes) == (5, 50)
        replica.progress.safe_advanced(14)
        assert (replica.progress.at_stake_entries, replica.progress.at_stake_bytes) == (3, 30)
        replica.progress.safe_advanced(15)
        assert (replica.progress.at_stake_entries, replica.progress.at_stake_bytes) == (0, 0)

    asyncio.run(scenario())

