"""What waits for the log on its way to the broker, where the broker closes channels meanwhile."""

from __future__ import annotations

import asyncio
from time import process_time
from typing import Any, cast

from pamqp import commands
from test_publishing import Connection, message, on

from broker_plugin.amqp import encode, frames
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.methods import acknowledge
from broker_plugin.session.outbox import Outbox


def closed_by_broker(channel: int) -> bytes:
    return encode.channel_close(channel, 404, "NOT_FOUND - no queue 'none'", frames.QUEUE_DECLARE)


def publishes_that_wait(count: int) -> Connection:
    """A connection on which so many publishes on channel 1 wait, each by itself."""
    connection = Connection()
    connection.log_is_safe = False
    raw, _ = message("orders", b"", True, b"x")
    for _ in range(count):
        connection.relay.client_data(raw)
    connection.replica.flush()
    return connection


def test_only_what_waits_for_a_closed_channel_is_dropped() -> None:
    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        for number in (2, 3):
            relay.client_data(encode.method_frame(number, commands.Channel.Open()))
        connection.broker.data = b""
        connection.log_is_safe = False
        raw, _ = message("orders", b"", True, b"x")
        for number in (2, 2, 3, 1, 2):
            relay.client_data(on(number, raw))
        relay.client_data(encode.method_frame(2, commands.Basic.Qos()) + encode.method_frame(3, commands.Basic.Qos()))
        connection.replica.flush()
        before = relay.outbox.waiting_bytes
        relay.broker_data(closed_by_broker(2))
        assert 0 < relay.outbox.waiting_bytes < before
        assert not relay.outbox.drop(2)
        relay.client_data(encode.method_frame(2, commands.Channel.CloseOk()))
        relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        connection.replica.progress.safe_advanced(connection.log.end)
        passed = [(item[1], item[0]) for item in frames.scan(connection.broker.data)[0] if item[0] != frames.CONFIRM_SELECT]
        assert passed == [
            *((n, frames.BASIC_PUBLISH) for n in (3, 1)),
            (3, frames.BASIC_QOS),
            (2, frames.CHANNEL_CLOSE_OK),
            (2, frames.CHANNEL_OPEN),
        ]
        assert (relay.outbox.waiting_bytes, bool(relay.outbox), relay.outbox.gone) == (0, False, relay.outbox.total)

    asyncio.run(scenario())


def test_what_is_dropped_holds_nothing_up() -> None:
    """As it was all that waited, what comes next goes at once, though what it waited for is not safe."""

    async def scenario() -> None:
        connection = publishes_that_wait(3)
        connection.broker.data = b""
        connection.relay.broker_data(closed_by_broker(1))
        assert not connection.relay.outbox
        connection.relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        assert connection.broker.data == encode.method_frame(2, commands.Channel.Open())

    asyncio.run(scenario())


def test_what_is_dropped_behind_what_waits_is_not_kept() -> None:
    """Nothing counted it: a client could fill the memory with one closed channel after the other."""

    async def scenario() -> None:
        connection = publishes_that_wait(1)
        relay = connection.relay
        waited = relay.outbox.waiting_bytes
        for number in range(2, 6):
            relay.client_data(encode.method_frame(number, commands.Channel.Open()))
            for _ in range(100):
                relay.client_data(encode.method_frame(number, commands.Basic.Qos()))
            relay.broker_data(closed_by_broker(number))
            relay.client_data(encode.method_frame(number, commands.Channel.CloseOk()))
        assert len(cast(Outbox, relay.outbox)._items) < 20
        connection.broker.data = b""
        connection.replica.progress.safe_advanced(connection.log.end)
        kinds = [item[0] for item in frames.scan(connection.broker.data)[0]]
        assert (kinds[0], kinds.count(frames.BASIC_QOS)) == (frames.BASIC_PUBLISH, 0)
        assert (waited > 0, relay.outbox.waiting_bytes, bool(relay.outbox), relay.outbox.gone) == (True, 0, False, relay.outbox.total)

    asyncio.run(scenario())


def test_what_is_dropped_behind_what_waits_does_not_count_for_it() -> None:
    """What went back to its queue with an ack before that was taken for returned, and the census may have counted a queue without it."""

    async def scenario() -> None:
        connection = publishes_that_wait(3)
        relay = connection.relay
        relay.gives_back([("/", "orders")])
        relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        for _ in range(3):
            relay.client_data(encode.method_frame(2, commands.Basic.Qos()))
        relay.broker_data(closed_by_broker(2))
        assert (relay.outbox.gone, *relay.still_returning()) == (0, ("/", "orders"))
        connection.replica.progress.safe_advanced(connection.log.end)
        assert (relay.outbox.gone, *relay.still_returning()) == (relay.outbox.total,)

    asyncio.run(scenario())


def test_acks_of_several_channels_wait_by_themselves() -> None:
    async def scenario() -> None:
        connection = Connection()
        relay: Any = connection.relay
        one, other = ([encode.ack(number, tag) for tag in (1, 2)] for number in (1, 2))
        relay.ack_frames = [one[0], other[0], one[1], other[1]]
        relay.acked = {("/", "orders"): [3, 4, 5, 6]}
        connection.log_is_safe = False
        acknowledge.flush(relay)
        assert relay.outbox.drop(1)
        connection.replica.flush()
        connection.broker.data = b""
        connection.replica.progress.safe_advanced(connection.log.end)
        assert connection.broker.data == b"".join(other)

    asyncio.run(scenario())


def test_a_channel_that_the_broker_closes_costs_no_look_at_what_waits_for_others() -> None:
    """One client could stop the sidecar for a minute: with thousands of channels, and a flood of publishes on another one."""

    def close_all(relay: ClientConnection) -> float:
        began = process_time()
        for number in range(2, 502):
            relay.broker_data(closed_by_broker(number))
        return process_time() - began

    async def scenario() -> None:
        took = []
        for waiting in (20, 5_000):
            connection = publishes_that_wait(waiting)
            for number in range(2, 502):
                connection.relay.client_data(encode.method_frame(number, commands.Channel.Open()))
            took.append(close_all(connection.relay))
        assert took[1] < 5 * took[0]

    asyncio.run(scenario())
