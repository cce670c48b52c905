"""What the log's declarations say of a queue."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands

from broker_plugin import building, topology


def declaration(**options: Any) -> bytes:
    return building.encode_method(commands.Queue.Declare(queue="a-queue", **options))


def test_arguments() -> None:
    assert topology.queue_arguments(b"") == topology.queue_arguments(declaration(durable=True)) == {}
    assert topology.queue_arguments(declaration(arguments={"x-expires": 5_000})) == {"x-expires": 5_000}


@pytest.mark.parametrize(
    ("options", "vanishes"),
    [({"durable": True}, False), ({"durable": False}, True), ({"durable": True, "arguments": {"x-expires": 1}}, True)],
)
def test_which_queues_may_go_by_themselves(options: dict[str, Any], vanishes: bool) -> None:
    assert topology.may_vanish(declaration(**options)) is vanishes
