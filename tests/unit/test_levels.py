"""Levels: what is chosen by name, by argument and by the log, and what the door says of a declaration. No broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands

from broker_plugin.amqp import content_header, declarations, encode, frames
from broker_plugin.amqp.frames import QUEUE_BIND, QUEUE_DECLARE, QUEUE_DELETE, QUEUE_PURGE, QUEUE_UNBIND
from broker_plugin.log.replica import Replica
from broker_plugin.methods import declare_rules, routes
from broker_plugin.session import decisions
from broker_plugin.session.channel import ClientChannel
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import ALLOWED, ARGUMENT, BadLevel, Level, Levels, parse
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings

pytestmark = pytest.mark.proves("queue: levels")

LEVELS = Levels({"^cache": "configuration", "^tmp": "none", "^t": "all", "^own": "none", "": "all"})


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_every_level_by_its_name() -> None:
    assert [parse(name) for name in ALLOWED.split(", ")] == list(Level)


@pytest.mark.parametrize("value", ["", "All", "messages", "x" * 300, None, True, 1, b"all", ["all"]])
def test_what_is_no_level_is_refused_with_those_that_there_are(value: object) -> None:
    with pytest.raises(BadLevel, match="none, configuration, all"):
        parse(value)


@pytest.mark.parametrize(
    ("name", "level"),
    [("cache.1", "configuration"), ("a-cache", "all"), ("tmp", "none"), ("t", "all"), ("", "none"), ("amq.gen-x", "none"), ("amq.topic", "none")],
)
def test_the_first_pattern_that_fits(name: str, level: str) -> None:
    assert LEVELS.of(name).value == level


def test_no_pattern_fits() -> None:
    assert Levels({"^a": "all"}).of("b") is Levels({}).of("b") is Level.NONE


@pytest.mark.parametrize(
    ("patterns", "told"), [({"(": "all"}, r"pattern '\(' is no regular"), ({"^a": "some"}, f"pattern '.a': 'some' is none of the levels {ALLOWED}")]
)
def test_a_bad_pattern_or_level_is_named(patterns: dict[str, str], told: str) -> None:
    with pytest.raises(BadLevel, match=told):
        Levels(patterns)


# ---- by argument, and what the log says ------------------------------------------------------------------------------


def relay() -> Any:
    """As much of a connection as declarations look at, on a node with an empty log."""
    replica = Replica(Node(NodeSettings(1, {1: "e1"})), LEVELS, lambda *_: None)
    default_types = SimpleNamespace(of=lambda _vhost: declarations.CLASSIC)
    return SimpleNamespace(vhost="/", replica=replica, door=SimpleNamespace(completes_locally=lambda _queue: False, default_types=default_types))


def classify(at: Any, kind: int, method: Any) -> declare_rules.Action:
    payload = bytes(encode.method_frame(1, method)[7:-1])
    return declare_rules.classify(at, ClientChannel(1), kind, payload, frames.decode_method(payload))


def declare(at: Any, queue: str, level: Any = None, **options: Any) -> declare_rules.Action:
    arguments = {**options.pop("arguments", {}), **({} if level is None else {ARGUMENT: level})}
    return classify(at, QUEUE_DECLARE, commands.Queue.Declare(queue=queue, arguments=arguments, **options))


def note(at: Any, action: declare_rules.Action) -> None:
    """The broker has accepted it: its entries are in the log."""
    assert isinstance(action, declare_rules.Replicate)
    for sequence, (method, _level) in enumerate(action.entries, at.replica.index.last_publish + 1):
        at.replica.index.note(pb.Run(topology=pb.Topology(vhost="/", method=method)), sequence, sweep=False)
        at.replica.index.last_publish = sequence


def level_of(at: Any, queue: str) -> str:
    return str(at.replica.declared.level(("/", queue)).value)


@pytest.mark.parametrize(("queue", "by_name"), [("q", "all"), ("cache", "configuration"), ("tmp", "none")])
@pytest.mark.parametrize("asked", ["none", "configuration", "all"])
def test_the_argument_goes_before_the_name_and_stays(queue: str, by_name: str, asked: str) -> None:
    at = relay()
    assert level_of(at, queue) == by_name
    action = declare(at, queue, asked)
    assert isinstance(action, declare_rules.Replicate)
    assert action.level.value == asked
    note(at, action)
    assert level_of(at, queue) == asked
    again = declare(at, queue, asked)
    assert isinstance(again, declare_rules.PassOn)
    assert again.asked == action.asked
    without = declare(at, queue)  # says nothing of the level, so it stays
    if isinstance(without, declare_rules.Replicate):
        assert without.level.value == asked
        note(at, without)
        assert isinstance(declare(at, queue), declare_rules.PassOn)
    assert level_of(at, queue) == asked


@pytest.mark.parametrize(("queue", "level"), [("q", Level.ALL), ("cache", Level.CONFIGURATION)])
def test_by_name_it_is_settled_by_the_first_declaration(queue: str, level: Level) -> None:
    at = relay()
    action = declare(at, queue)
    assert isinstance(action, declare_rules.Replicate)
    assert action.level is level
    assert declarations.level_of(action.entry) is level
    note(at, action)
    at.replica.declared._levels = Levels({"": "none"})
    at.replica.declared._known_levels.clear()
    assert at.replica.declared.level(("/", queue)) is level


def test_by_name_none_is_in_no_log() -> None:
    at = relay()
    assert declare(at, "tmp") == declare_rules.PassOn("tmp")
    assert not at.replica.declared.knows(("/", "tmp"))


@pytest.mark.parametrize("value", ["some", "", "ALL", 7, True])
@pytest.mark.parametrize("options", [{}, {"exclusive": True}, {"auto_delete": True}])
def test_a_bad_argument_is_refused(value: object, options: dict[str, bool]) -> None:
    action = declare(relay(), "q", value, **options)
    assert isinstance(action, declare_rules.Refuse)
    assert action.code == 406
    assert action.text.startswith("PRECONDITION_FAILED - invalid arg 'x-lrq-replicate' for queue 'q' in vhost '/'")
    assert action.text.endswith("none of the levels none, configuration, all")


def test_a_passive_declaration_says_nothing() -> None:
    assert declare(relay(), "q", "some", passive=True) == declare_rules.PassOn("q")


@pytest.mark.parametrize("level", ["configuration", "all"])
@pytest.mark.parametrize(("queue", "options"), [("q", {"exclusive": True}), ("", {})])
def test_what_no_other_node_can_have(level: str, queue: str, options: dict[str, bool]) -> None:
    action = declare(relay(), queue, level, **options)
    assert isinstance(action, declare_rules.Refuse)
    assert action.text.endswith("allowed: none")
    assert isinstance(declare(relay(), queue, "none", **options), declare_rules.PassOn)


@pytest.mark.parametrize("first", ["none", "configuration", "all", None])
@pytest.mark.parametrize("then", ["none", "configuration", "all"])
def test_another_level_is_refused_until_the_queue_is_deleted(first: str | None, then: str) -> None:
    at = relay()
    note(at, declare(at, "q", first))
    action = declare(at, "q", then)
    if then == (first or "all"):
        assert not isinstance(action, declare_rules.Refuse)
        return
    assert isinstance(action, declare_rules.Refuse)
    assert f"inequivalent arg 'x-lrq-replicate' for queue 'q' in vhost '/': received '{then}' but current is '{first or 'all'}'" in action.text
    note(at, classify(at, QUEUE_DELETE, commands.Queue.Delete(queue="q")))
    assert level_of(at, "q") == "all"
    action = declare(at, "q", then)
    assert isinstance(action, declare_rules.Replicate)
    assert action.level.value == then


def test_what_falls_out_of_the_log_is_no_level() -> None:
    at = relay()
    note(at, declare(at, "q", "none"))
    note(at, classify(at, QUEUE_DELETE, commands.Queue.Delete(queue="q")))
    note(at, declare(at, "q", "configuration"))
    levels = [level_of(at, "q")]
    for first in (3, 2, 1):
        at.replica.cut(first)
        levels.append(level_of(at, "q"))
    assert levels == ["configuration", "all", "none", "all"]


@pytest.mark.parametrize(
    ("kind", "method", "logged"),
    [
        (QUEUE_BIND, commands.Queue.Bind(queue="q", exchange="x"), ALLOWED),
        (QUEUE_UNBIND, commands.Queue.Unbind(queue="q", exchange="x"), ALLOWED),
        (QUEUE_PURGE, commands.Queue.Purge(queue="q"), "all"),
        (QUEUE_DELETE, commands.Queue.Delete(queue="q"), ALLOWED),
    ],
)
def test_what_else_enters_the_log(kind: int, method: Any, logged: str) -> None:
    at = relay()
    method.queue = "tmp"  # none by its name: nothing of it
    assert classify(at, kind, method) == declare_rules.PassOn()
    method.queue = "q"
    for level in ALLOWED.split(", "):
        at = relay()
        note(at, declare(at, "q", level))
        action = classify(at, kind, method)
        assert isinstance(action, declare_rules.Replicate) is (level in logged.split(", "))
        if isinstance(action, declare_rules.Replicate):
            assert action.level.value == level


# ---- auto-delete -----------------------------------------------------------------------------------------------------


def test_an_auto_delete_queue_is_this_nodes_own() -> None:
    for level in (None, "none"):
        assert declare(relay(), "q", level, auto_delete=True) == declare_rules.PassOn("q", local=("/", "q"), waited_for=True)


@pytest.mark.parametrize("level", ["configuration", "all"])
def test_an_auto_delete_queue_that_is_to_be_replicated_is_none_to_the_broker(level: str) -> None:
    at = relay()
    action = declare(at, "q", level, auto_delete=True)
    assert isinstance(action, declare_rules.Replicate)
    for method in (action.asked, action.entry):
        asked: Any = frames.decode_method(method)
        assert asked.auto_delete is False
        assert declarations.goes_unused(method)
    note(at, action)
    for again in (declare(at, "q", level, auto_delete=True), declare(at, "q", auto_delete=True)):
        assert not isinstance(again, declare_rules.Refuse)
        assert not (isinstance(again, declare_rules.PassOn) and again.local)
    refused = declare(at, "q", level)
    assert isinstance(refused, declare_rules.Refuse)
    assert "inequivalent arg 'auto_delete' for queue 'q' in vhost '/': received 'false' but current is 'true'" in refused.text
    as_exported = declare(at, "q", level, arguments={declarations.AUTO_DELETE: "true"})
    assert not isinstance(as_exported, declare_rules.Refuse)


def test_a_queue_that_is_none_does_not_become_one() -> None:
    at = relay()
    note(at, declare(at, "q", "all"))
    refused = declare(at, "q", "all", auto_delete=True)
    assert isinstance(refused, declare_rules.Refuse)
    assert "received 'true' but current is 'false'" in refused.text


# ---- publishes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "key", "decision"),
    [
        ("", "q", "LOGGED"),
        ("", "cache", "PASSED"),
        ("", "tmp", "PASSED"),
        ("cache", "q", "LOGGED"),
        ("tmp", "q", "PASSED"),
        ("amq.direct", "tmp", "LOGGED"),
        ("", "amq.rabbitmq.reply-to.x", "PASSED"),
    ],
)
def test_where_publishes_go(exchange: str, key: str, decision: str) -> None:
    assert routes.decide(relay(), frames.publish_route(encode.publish_method(1, exchange, key)[7:-1])).name == decision


def test_further_keys_may_be_those_of_replicated_queues() -> None:
    plain = content_header.header_payload(1)
    more = content_header.header_payload(1, content_header.properties(content_header.field(b"CC", b"q")))
    assert routes.names_more(decisions.Decision.PASSED, more)
    assert not routes.names_more(decisions.Decision.PASSED, plain)
    assert not routes.names_more(decisions.Decision.TRANSMIT, more)


# ---- what a backup keeps empty ---------------------------------------------------------------------------------------


def test_bindings_of_queues_and_how_to_undo_them() -> None:
    at = relay()
    note(at, declare(at, "q", "configuration"))
    note(at, declare(at, "other"))
    bind = commands.Queue.Bind(queue="q", exchange="x", routing_key="k", arguments={"x-match": "any"})
    note(at, classify(at, QUEUE_BIND, bind))
    note(at, classify(at, QUEUE_BIND, commands.Queue.Bind(queue="other", exchange="x")))
    assert at.replica.declared.partial == {("/", "q")}
    bindings_to = at.replica.declared.definitions.bindings_to
    assert not list(bindings_to({("/", "q")}))  # nothing is safe yet
    at.replica.declared.definitions.safe(4, 4)
    [(key, exchange, binds, unbinds)] = bindings_to({("/", "q"), ("/", "none")})
    assert (key, exchange) == (("/", "q"), "x")
    bound: Any = frames.decode_method(binds)
    assert (bound.queue, bound.exchange, bound.routing_key, bound.arguments) == ("q", "x", "k", {"x-match": "any"})
    undone: Any = frames.decode_method(QUEUE_UNBIND.to_bytes(4, "big") + unbinds)
    assert (undone.queue, undone.exchange, undone.routing_key, undone.arguments) == ("q", "x", "k", {"x-match": "any"})
    note(at, classify(at, QUEUE_DELETE, commands.Queue.Delete(queue="q")))
    assert not at.replica.declared.partial
