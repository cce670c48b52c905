"""Which queues a publish may reach, by the log's definitions."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from pamqp import base, commands

from broker_plugin.amqp import encode
from broker_plugin.log.bindings import BindingTable, binding_table, downstream_last
from broker_plugin.log.definitions import Definitions


def definitions(*methods: base.Frame, vhost: str = "/") -> Definitions:
    return Definitions((vhost, encode.method_frame(1, method)[7:-1]) for method in methods)


def queue(name: str, **arguments: Any) -> base.Frame:
    return commands.Queue.Declare(queue=name, arguments={key.replace("_", "-"): value for key, value in arguments.items()})


def exchange(name: str, kind: str, **arguments: Any) -> base.Frame:
    return commands.Exchange.Declare(exchange=name, exchange_type=kind, arguments={key.replace("_", "-"): value for key, value in arguments.items()})


def bind(name: str, source: str, key: str = "") -> base.Frame:
    return commands.Queue.Bind(queue=name, exchange=source, routing_key=key)


KNOWN = definitions(
    *(queue(name) for name in "abcd"),
    exchange("topics", "topic"),
    exchange("fan", "fanout", alternate_exchange="topics"),
    exchange("later", "x-delayed-message"),
    bind("a", "topics", "order.*"),
    bind("b", "topics", "order.#"),
    bind("c", "amq.direct", "c"),
    bind("c", "later", "c"),
    bind("d", "fan", "ignored"),
    commands.Exchange.Bind(destination="fan", source="topics", routing_key="all"),
)


@pytest.mark.parametrize(
    ("source", "key", "reached"),
    [
        ("", "a", "a"), ("", "nobody", ["nobody"]), ("", None, ""),
        ("topics", "order.new", "ab"), ("topics", "order", "b"), ("topics", "order.new.one", "b"), ("topics", "", ""), ("topics", "all", "d"),
        ("topics", None, "abd"), ("fan", "x", "d"), ("fan", "order", "bd"), ("amq.direct", "c", "c"), ("amq.direct", "d", ""),
        ("later", "x", "c"), ("nowhere", "x", ""),
    ],
)  # fmt: skip
def test_reached(source: str, key: str | None, reached: str) -> None:
    assert BindingTable(KNOWN, "/").queues(source, key) == frozenset(reached)


def test_the_ways_are_made_anew_when_something_was_declared() -> None:
    """And only then: each queue that a renewal moves asks for them, of ten thousand perhaps."""
    known = definitions(queue("q"))
    ways = binding_table(known, "/")
    assert binding_table(known, "/") is ways
    assert binding_table(known, "other") is not ways
    assert "q" not in ways.queues("amq.fanout", "x")
    known.noted(99, "/", encode.method_frame(1, bind("q", "amq.fanout"))[7:-1])
    assert "q" in binding_table(known, "/").queues("amq.fanout", "x")
    assert binding_table(definitions(queue("q")), "/") is not binding_table(known, "/")


def test_another_vhost_has_exchanges_of_its_own() -> None:
    assert BindingTable(KNOWN, "other").queues("amq.direct", "c") == frozenset()


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [("#", "", True), ("#", "a.b", True), ("a.#.b", "a.b", True), ("a.#.b", "a.x.y.b", True), ("a.#.b", "a.x", False), ("*", "", True),
     ("*.*", "a", False), ("#.*", "a", True), ("a.*", "a.", True)],
)  # fmt: skip
def test_topics(pattern: str, key: str, matches: bool) -> None:
    known = definitions(queue("q"), exchange("t", "topic"), bind("q", "t", pattern))
    assert ("q" in BindingTable(known, "/").queues("t", key)) is matches


def test_queues_before_those_that_their_dead_letters_go_to() -> None:
    known = definitions(
        queue("dead"), queue("late", x_dead_letter_exchange="", x_dead_letter_routing_key="dead"),
        queue("early", x_dead_letter_exchange="fan"), exchange("fan", "fanout"), bind("late", "fan"),
        queue("loop", x_dead_letter_exchange="", x_dead_letter_routing_key="pool"),
        queue("pool", x_dead_letter_exchange="", x_dead_letter_routing_key="loop"), queue("other", x_dead_letter_exchange="amq.fanout"),
    )  # fmt: skip
    names = ["dead", "late", "early", "loop", "pool", "other"]
    found = [name for _, name in downstream_last(known, [("/", name) for name in names])]
    assert sorted(found) == sorted(names)
    assert found.index("early") < found.index("late") < found.index("dead")


@pytest.mark.parametrize("with_keys", [False, True])
def test_thousands_of_queues_with_one_way_for_their_dead_letters(with_keys: bool) -> None:
    """Retry loops of two queues each. Each queue looked at all others, and kept a list of them: half a minute, and half a gigabyte, with 4,000."""
    count = 2_000
    of = [{"x_dead_letter_routing_key": f"k{number}"} if with_keys else {} for number in range(count)]
    known = definitions(
        exchange("work", "direct"), exchange("dead", "direct"),
        *(queue(f"q{number}", x_dead_letter_exchange="dead", **of[number]) for number in range(count)),
        *(queue(f"d{number}", x_dead_letter_exchange="work", **of[number]) for number in range(count)),
        *(bind(f"q{number}", "work", f"k{number}") for number in range(count)),
        *(bind(f"d{number}", "dead", f"k{number}") for number in range(count)),
        queue("first", x_dead_letter_exchange="dead"),
    )  # fmt: skip
    names = [("/", f"{kind}{number}") for kind in "qd" for number in range(count)] + [("/", "first")]
    tracemalloc.start()
    try:
        found = downstream_last(known, names)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert sorted(found) == sorted(names)
    if with_keys:
        assert found.index(("/", "first")) < min(found.index(("/", f"d{number}")) for number in range(count))
