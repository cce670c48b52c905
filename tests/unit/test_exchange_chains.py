"""Auto-delete exchanges that clients have bound to each other, however many: what is declared again for them, and how often. No broker."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands
from test_levels import classify, declare, note, relay
from test_publishing import Connection

from broker_plugin.amqp import declarations, encode, frames
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.errors import AccessRefused, ConnectionRefused, ReplyTimeout, VhostNotFound
from broker_plugin.amqp.frames import EXCHANGE_BIND, EXCHANGE_DECLARE, QUEUE_BIND
from broker_plugin.apply import partial_queues
from broker_plugin.apply.partial_queues import PartialQueues
from broker_plugin.log.definitions import Definitions
from broker_plugin.methods import declare as methods_declare
from broker_plugin.methods import declare_rules
from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import epoch_number

LONG = 2_000  # more than Python calls within each other
AT_MOST = declare_rules.REPEATED_EXCHANGES_MAX


def exchanges(at: Any, *names: str) -> None:
    for name in names:
        note(at, classify(at, EXCHANGE_DECLARE, commands.Exchange.Declare(exchange=name, exchange_type="fanout", auto_delete=True)))


def bind(at: Any, destination: str, source: str) -> declare_rules.Action:
    return classify(at, EXCHANGE_BIND, commands.Exchange.Bind(destination=destination, source=source))


def bind_queue(at: Any, queue: str, exchange: str) -> declare_rules.Action:
    return classify(at, QUEUE_BIND, commands.Queue.Bind(queue=queue, exchange=exchange))


def chain(at: Any, count: int, queue: str) -> None:
    """From x0 to the queue, made from its end: so no binding has anything before it."""
    exchanges(at, *(f"x{number}" for number in range(count)))
    note(at, declare(at, queue, "configuration"))
    note(at, bind_queue(at, queue, f"x{count - 1}"))
    for number in range(count - 1, 0, -1):
        action = bind(at, f"x{number}", f"x{number - 1}")
        assert isinstance(action, declare_rules.Replicate)
        assert len(action.before) == 2
        note(at, action)


class Broker:
    """Notes what it is asked, by name of the first that is named."""

    error = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    async def connection(self, *_: object, **__: object) -> Broker:
        return self

    async def channel(self) -> Broker:
        return self

    async def close(self) -> None:
        pass

    async def _call(self, method: int, arguments: bytes) -> None:
        self.asked.append((method, declarations.first_name(method.to_bytes(4, "big") + arguments)))


@pytest.mark.parametrize("what", ["take_over", "unbind"])
def test_a_long_chain_ends_no_incarnation_and_is_declared_once(what: str) -> None:
    """Of a log that has one the door never opened again, and the next backup never followed."""
    at = relay()
    chain(at, LONG, "q")
    note(at, declare(at, "other", "configuration"))
    note(at, bind_queue_unlimited(at, "other", f"x{LONG - 1}"))
    at.replica.declared.safe(at.replica.index.last_publish, at.replica.index.last_publish)
    at.replica.node.log.state = lambda: SimpleNamespace(epochs=((epoch_number(1, 1), 1),))
    broker: Any = Broker()
    configured = PartialQueues(at.replica, Address.parse("amqp://a:b@127.0.0.1:1"))
    configured._vhosts = broker
    asyncio.run(getattr(configured, what)())
    declared = [name for method, name in broker.asked if method == EXCHANGE_DECLARE]
    assert sorted(declared) == sorted(f"x{number}" for number in range(LONG))
    assert sorted(name for method, name in broker.asked if method == EXCHANGE_BIND) == sorted(f"x{number}" for number in range(1, LONG))
    kinds = [method for method, _ in broker.asked if method in (EXCHANGE_DECLARE, EXCHANGE_BIND, QUEUE_BIND)]
    assert kinds == [EXCHANGE_DECLARE] * LONG + [EXCHANGE_BIND] * (LONG - 1) + [QUEUE_BIND] * (2 if what == "take_over" else 0)


class Trouble(Broker):
    """Cannot be used so many times."""

    def __init__(self, error: LrqError, times: int) -> None:
        super().__init__()
        self._error, self._left = error, times

    async def connection(self, *_: object, **__: object) -> Broker:
        if self._left:
            self._left -= 1
            raise self._error
        return self


@pytest.mark.parametrize(
    ("error", "times", "bound"),
    [
        (ConnectionRefused("nobody listens"), 3, True),
        (ReplyTimeout("no answer"), 3, True),
        (ConnectionRefused("nobody listens"), 10_000, False),
        (AccessRefused(403, "no"), 10_000, False),
        (VhostNotFound(530, "none"), 10_000, False),
    ],
)
def test_a_queue_is_bound_though_its_vhost_could_not_be_used_for_a_moment(
    error: LrqError, times: int, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was passed over: what clients published to its exchange was confirmed, and reached nobody until the next promotion."""
    monkeypatch.setattr(partial_queues, "PATIENCE_S", 0.5)
    monkeypatch.setattr(partial_queues, "AGAIN_S", 0.01)
    at = relay()
    note(at, declare(at, "q", "configuration"))
    note(at, bind_queue(at, "q", "amq.fanout"))
    at.replica.declared.safe(at.replica.index.last_publish, at.replica.index.last_publish)
    at.replica.node.log.state = lambda: SimpleNamespace(epochs=((epoch_number(1, 1), 1),))
    broker: Any = Trouble(error, times)
    configured = PartialQueues(at.replica, Address.parse("amqp://a:b@127.0.0.1:1"))
    configured._vhosts = broker
    asyncio.run(configured.take_over())
    assert [method for method, _ in broker.asked if method == QUEUE_BIND] == [QUEUE_BIND] * bound


def bind_queue_unlimited(at: Any, queue: str, exchange: str) -> declare_rules.Replicate:
    """As it stands in a log from before there was a limit."""
    payload = bytes(encode.method_frame(1, commands.Queue.Bind(queue=queue, exchange=exchange))[7:-1])
    return declare_rules._replicate(at, QUEUE_BIND, payload, queue)


def test_a_circle_is_gone_through_once() -> None:
    at = relay()
    exchanges(at, "x", "y")
    note(at, bind(at, "x", "y"))
    note(at, bind(at, "y", "x"))
    action = bind(at, "x", "x")
    assert isinstance(action, declare_rules.Replicate)
    named = [(frames.method_id(method), declarations.first_name(method)) for method in action.before]
    assert sorted(named) == [(EXCHANGE_DECLARE, "x"), (EXCHANGE_DECLARE, "y")]


def test_what_one_binding_brings_into_the_log_is_limited() -> None:
    at = relay()
    exchanges(at, "end", *(f"x{number}" for number in range(AT_MOST)))
    note(at, declare(at, "q"))
    for number in range(AT_MOST - 1):
        note(at, bind(at, "end", f"x{number}"))
    action = bind_queue(at, "q", "end")
    assert isinstance(action, declare_rules.Replicate)
    assert len(action.before) == AT_MOST
    note(at, action)
    refused = bind(at, "end", f"x{AT_MOST - 1}")
    assert isinstance(refused, declare_rules.Refuse)
    assert refused.code == 406
    assert f"{AT_MOST + 1} auto-delete exchanges lead to this" in refused.text
    assert f"at most {AT_MOST} may" in refused.text
    assert len(refused.text) <= 255, "as much as a broker can say"
    assert isinstance(bind_queue(at, "q", "end"), declare_rules.PassOn), "it is there already"


def test_a_binding_at_the_end_of_a_chain_that_was_made_from_its_end_is_refused() -> None:
    at = relay()
    chain(at, LONG, "q")
    note(at, declare(at, "other"))
    assert isinstance(bind_queue(at, "other", f"x{LONG - 1}"), declare_rules.Refuse)
    assert isinstance(bind_queue(at, "other", f"x{AT_MOST - 1}"), declare_rules.Replicate)


# ---- what is declared, and what of it is safe ------------------------------------------------------------------------


def some_method(chance: random.Random) -> bytes:
    x, y, q = (chance.choice(names) for names in (("x1", "x2"), ("x1", "x2", "x3"), ("q1", "q2")))
    made = chance.choice(
        [
            commands.Exchange.Declare(exchange=y, exchange_type="fanout", durable=chance.random() < 0.5),
            commands.Exchange.Delete(exchange=y),
            commands.Queue.Declare(queue=q, durable=chance.random() < 0.5),
            commands.Queue.Delete(queue=q),
            commands.Exchange.Bind(destination=y, source=x),
            commands.Exchange.Unbind(destination=y, source=x),
            commands.Queue.Bind(queue=q, exchange=x),
            commands.Queue.Unbind(queue=q, exchange=x),
        ]
    )
    return encode.encode_method(made)


@pytest.mark.parametrize("seed", range(50))
def test_cuts_take_back_what_was_noted(seed: int) -> None:
    """Compared with the same log read from its beginning, at any time."""
    chance = random.Random(seed)
    found, log, safe, reached = Definitions(), list[bytes](), 0, 0
    keys = {("/", "q1"), ("/", "q2")}
    for _ in range(200):
        kind = chance.random()
        if kind < 0.7:
            log.append(some_method(chance))
            found.noted(len(log), "/", log[-1])
        elif kind < 0.85:
            safe = chance.randint(safe, len(log))
            reached = chance.randint(reached, safe)
            found.safe(safe, reached)
        else:
            del log[chance.randint(safe, len(log)) :]
            found.cut(len(log) + 1)
        now, of_safe = (Definitions(("/", method) for method in methods) for methods in (log, log[:safe]))
        assert sorted(found.rows()) == sorted(now.rows())
        assert sorted(found.export()) == sorted(now.export())
        assert found.queues() == now.queues()
        assert [found.queue(key) for key in sorted(keys)] == [now.queue(key) for key in sorted(keys)]
        for name in ("x1", "x2", "x3"):
            assert found.exchange("/", name) == now.exchange("/", name)
            assert sorted(found.bound_to_exchange("/", name)) == sorted(now.bound_to_exchange("/", name))
        assert sorted(found.bindings_to(keys)) == sorted(of_safe.bindings_to(keys))
        assert [sorted(rows) for rows in found.forgotten()] == [sorted(rows) for rows in of_safe.forgotten()]
        come_to = chance.randint(reached, len(log))
        assert sorted(found.at(come_to).rows()) == sorted(Definitions(("/", method) for method in log[:come_to]).rows())


# ---- nested arguments ------------------------------------------------------------------------------------------------


def declaration(depth: int) -> bytes:
    """An exchange's, with tables and arrays by turns."""
    value = b"t\1"
    for level in range(depth):
        inner = b"\x01n" + value if level % 2 else value
        value = (b"F" if level % 2 else b"A") + len(inner).to_bytes(4, "big") + inner
    fields = b"\x01n" + value
    return bytes(encode.raw_method_frame(1, EXCHANGE_DECLARE, b"\0\0\x01x\x06fanout\x02", len(fields).to_bytes(4, "big"), fields)[7:-1])


def deeper(calls: int, payload: bytes) -> Any:
    return deeper(calls - 1, payload) if calls else frames.decode_method(payload)


@pytest.mark.parametrize("depth", [64, 65, 400])
def test_a_declaration_whose_arguments_another_node_might_not_decode_is_no_entry(depth: int) -> None:
    """How deep decoding goes depends on what has been called before: what the door could decode would end incarnations elsewhere, for ever."""
    payload, connection = declaration(depth), Connection()
    spawned: list[Any] = []
    connection.relay.spawn = lambda coroutine: spawned.append(coroutine)  # type: ignore[method-assign]
    if depth <= 64:
        methods_declare.declare(connection.relay, connection.relay.channel(1), EXCHANGE_DECLARE, payload)
        spawned.pop().close()
        deeper(500, payload)
        return
    frames.decode_method(payload)
    with pytest.raises(frames.FrameError, match=r"nested deeper than 64: door\.header_depth_max"):
        methods_declare.declare(connection.relay, connection.relay.channel(1), EXCHANGE_DECLARE, payload)
    assert not spawned
