"""How a queue comes to stand still, and how it goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from pamqp import commands

from broker_plugin.amqp import encode, frames
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.door.server import Door
from broker_plugin.log.replica import Replica
from broker_plugin.methods import closing, consume
from broker_plugin.renewal import queue_pause
from broker_plugin.renewal.queue_pause import QueuePause
from broker_plugin.session.channel import ClientChannel, Consumer
from broker_plugin.session.transaction import Commit

KEY, TAG = ("/", "single"), b"tag"
LOOK_S, SLOW_S = 0.25, 10.0


class Broker:
    """Time goes by when somebody looks at it, and the broker answers a consumer SLOW_S after it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[float, str, ClientChannel]] = []

    def monotonic(self) -> float:
        self.now += LOOK_S
        for at, _, channel in self.asked:
            if self.now >= at + SLOW_S:
                channel.resuming.clear()
        return self.now

    def client(self, name: str) -> SimpleNamespace:
        """One whose consumer stands still."""
        channel = ClientChannel(1)
        consumer = Consumer(KEY, automatic=False, tracked=True, method=commands.Basic.Consume(queue=KEY[1]))
        channel.consumers[TAG] = channel.paused[TAG] = consumer
        outbox = SimpleNamespace(put=lambda _data: self.asked.append((self.now, name, channel)))
        return SimpleNamespace(vhost=KEY[0], closed=False, client=object(), channels={1: channel}, outbox=outbox)


def test_a_single_active_consumer_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a slow broker has it, no other comes, which might be served first: it was waited for a second only."""
    broker = Broker()
    relays = [broker.client("first"), broker.client("second")]
    monkeypatch.setattr(queue_pause, "time", broker)
    monkeypatch.setattr(queue_pause, "POLL_S", 0)

    async def go() -> None:
        door, replica = SimpleNamespace(sessions=relays), SimpleNamespace(moving={})
        await QueuePause(cast(Door, door), cast(Replica, replica), KEY, {"x-single-active-consumer": True}).end()

    asyncio.run(go())
    [(first_at, first, _), (second_at, second, _)] = broker.asked
    assert (first, second) == ("first", "second")
    assert second_at >= first_at + SLOW_S


def test_a_channel_is_told_nothing_while_the_broker_commits() -> None:
    """The broker ended the whole connection: "unexpected command while processing 'tx.commit'"."""
    told: list[bytes] = []
    channel = ClientChannel(1)
    relay = cast(ClientConnection, SimpleNamespace(outbox=SimpleNamespace(put=told.append), on_settled=b"", closed=False))
    cancel = encode.raw_method_frame(1, frames.BASIC_CANCEL, b"\x03tag", b"\0")
    channel.commits.append(Commit())
    consume.cancel_here(relay, channel, TAG)
    assert told == []
    channel.commits.clear()
    closing.settled(relay, channel)
    closing.settled(relay, channel)
    assert told == [cancel]
    assert channel.stopping[TAG] == 1


@pytest.mark.parametrize("answer", [frames.BASIC_CONSUME_OK, frames.BASIC_CANCEL_OK])
def test_nothing_is_kept_of_what_the_broker_owes_no_more(answer: int) -> None:
    """A channel with consumers that come and go counted zeros for each."""
    channel = ClientChannel(1, resuming=Counter({TAG: 1}), stopping=Counter({TAG: 1}))
    handle, owed = {
        frames.BASIC_CONSUME_OK: (consume.consume_ok, channel.resuming),
        frames.BASIC_CANCEL_OK: (consume.cancelled, channel.stopping),
    }[answer]
    data = encode.raw_method_frame(1, answer, b"\x03tag")
    [item], _ = frames.scan(data)
    assert handle(cast(ClientConnection, SimpleNamespace(channel=lambda _: channel)), 1, data, item) == b""
    assert not owed


def test_a_consumer_that_the_broker_ends_while_it_stands_still_leaves_its_tag() -> None:
    """Its client, which is told so, could never use that tag again: 530."""
    relay = Broker().client("one")
    channel = relay.channels[1]
    relay.channel = relay.channels.get
    relay.replica = SimpleNamespace(index=SimpleNamespace(passes=SimpleNamespace(count_no_more=lambda _: None)))
    data = encode.method_frame(1, commands.Basic.Cancel(TAG.decode()))
    [item], _ = frames.scan(data)
    assert consume.cancelled(cast(ClientConnection, relay), 1, data, item) is None
    assert not channel.consumers
    assert not channel.paused


def test_acks_of_the_doors_own_are_no_commit_that_takes_time() -> None:
    told: list[bytes] = []
    channel = ClientChannel(1)
    channel.commits.append(Commit(own=True))
    consume.cancel_here(cast(ClientConnection, SimpleNamespace(outbox=SimpleNamespace(put=told.append))), channel, TAG)
    assert len(told) == 1
