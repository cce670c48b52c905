"""What the log's declarations say of a queue."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands

from broker_plugin.amqp import declarations, encode, frames


def declaration(**options: Any) -> bytes:
    return encode.encode_method(commands.Queue.Declare(queue="a-queue", **options))


def test_arguments() -> None:
    assert declarations.queue_arguments(b"") == declarations.queue_arguments(declaration(durable=True)) == {}
    assert declarations.queue_arguments(declaration(arguments={"x-expires": 5_000})) == {"x-expires": 5_000}


@pytest.mark.parametrize(
    ("options", "vanishes"),
    [({"durable": True}, False), ({"durable": False}, True), ({"durable": True, "arguments": {"x-expires": 1}}, True)],
)
def test_which_queues_may_go_by_themselves(options: dict[str, Any], vanishes: bool) -> None:
    assert declarations.may_vanish(declaration(**options)) is vanishes


NAMES = {
    commands.Exchange.Bind: ("destination", "source"),
    commands.Exchange.Declare: ("exchange",),
    commands.Exchange.Delete: ("exchange",),
    commands.Exchange.Unbind: ("destination", "source"),
    commands.Queue.Bind: ("queue", "exchange"),
    commands.Queue.Declare: ("queue",),
    commands.Queue.Delete: ("queue",),
    commands.Queue.Unbind: ("queue", "exchange"),
}


def method(of: Any, **values: str) -> tuple[int, bytes]:
    """A method's id and payload, with names that pamqp would refuse; those that are not given are plain."""
    made = of(**dict.fromkeys(NAMES[of], "plain"))
    for name, value in values.items():
        setattr(made, name, value)
    return made.index, encode.encode_method(made)


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in NAMES.items() for name in names])
def test_cr_and_lf_are_in_no_name_of_a_queue_or_exchange(of: Any, name: str) -> None:
    """RabbitMQ strips them: the log named a queue that no broker has. In a routing key they stay."""
    key = {"routing_key": "k\n"} if hasattr(of(), "routing_key") else {}
    kind, given = method(of, **{name: "\r\nor\nders\r"}, **key)
    assert declarations.as_named(kind, given) == method(of, **{name: "orders"}, **key)[1]
    assert declarations.as_named(kind, given[:12]) == given[:12]


@pytest.mark.parametrize(("of", "left"), [(commands.Queue.Declare, ""), (commands.Queue.Delete, "\r\n"), (commands.Queue.Bind, "\r\n")])
def test_a_name_of_cr_and_lf_alone_is_not_the_last_declared_queues(of: Any, left: str) -> None:
    kind, given = method(of, queue="\r\n")
    assert declarations.as_named(kind, given) == method(of, queue=left)[1]


def test_a_purge_names_its_queue_to_the_octet() -> None:
    made = commands.Queue.Purge()
    made.queue = "orders\n"
    payload = encode.encode_method(made)
    assert declarations.as_named(made.index, payload) == payload


def test_deletions_of_what_has_any_name() -> None:
    """pamqp takes some names for invalid that RabbitMQ allows."""
    for kind, of, name in ((frames.QUEUE_DELETE, commands.Queue.Delete, "queue"), (frames.EXCHANGE_DELETE, commands.Exchange.Delete, "exchange")):
        made = of()
        setattr(made, name, "caf\u00e9")
        assert declarations.deletion(kind, "caf\u00e9") == encode.encode_method(made)
