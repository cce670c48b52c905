"""Vhosts with a default queue type: a queue that is declared without a type is on every node of the type that the primary's broker gives it."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from load import eventually, in_sync
from pamqp import commands
from talk import Talk

from broker_plugin.amqp import default_queue_type
from broker_plugin.amqp.connection import Address, Channel
from broker_plugin.amqp.default_queue_type import DefaultTypes
from lrq_ha.lab import Lab
from lrq_ha.lab.files import APP_USER, SIDECAR_USER

pytestmark = pytest.mark.broker

Q = commands.Queue


def types(lab: Lab, node: str, vhost: str) -> dict[str, str]:
    return dict(row.split("\t")[:2] for row in lab.ctl(node, "-q", "list_queues", "-p", vhost, "name", "type", "--no-table-headers").splitlines())


def create(lab: Lab, node: str, vhost: str, default: str) -> None:
    lab.ctl(node, "add_vhost", vhost, "--default-queue-type", default)
    for user in (APP_USER, SIDECAR_USER):
        lab.ctl(node, "set_permissions", "-p", vhost, user, ".*", ".*", ".*")


@pytest.mark.quick("3.10", only="quorum")
@pytest.mark.parametrize("default", ["quorum", "stream"])
def test_the_type_is_the_brokers_default(pair: Lab, default: str) -> None:
    primary, backup = in_sync(pair)
    vhost = f"default-{default}-{uuid.uuid4().hex[:6]}"
    for node, kind in ((primary, default), (backup, "classic")):
        create(pair, node, vhost, kind)
    heard = []
    for url, mark in ((pair.nodes[primary].broker, "direct"), (pair.nodes[primary].door, "door")):
        with Talk(url, mark, default, vhost=vhost) as t:
            t.open()
            for name, typed, options in (
                ("lasting", "", {"durable": True}),
                ("lasting", "classic", {"durable": True}),
                ("typed", default, {"durable": True}),
                ("typed", "", {"durable": True}),
                ("other", "classic", {"durable": True}),
                ("passing", "", {}),
            ):
                if t.do(Q.Declare(queue=t.name(name), arguments={"x-queue-type": typed} if typed else None, **options)) is None:
                    t.open()
            heard.append(re.sub(vhost, "*", repr(t.transcript())))
    assert heard[0] == heard[1]
    wanted = {"talk-lasting-door": default, "talk-typed-door": default, "talk-other-door": "classic", "talk-passing-door": "classic"}
    for node in (primary, backup):
        eventually(f"the same types at {node}", lambda node=node: {n: t for n, t in types(pair, node, vhost).items() if n in wanted} == wanted)
    with Talk(pair.nodes[primary].door, "door", default, vhost=vhost) as t:
        t.open()
        assert t.do(Q.Declare(queue="talk-other-door", durable=True)) is not None, "a queue of the log keeps its type"
        for name in wanted:
            t.do(Q.Delete(queue=name))
    assert not [name for name in types(pair, primary, vhost) if name.startswith("LRQ_")], "nothing is left of finding out"


@pytest.mark.parametrize("limit", ["max-queues", "max-connections"])
def test_a_queue_of_the_log_where_a_limit_keeps_the_default_from_being_found_out(pair: Lab, limit: str) -> None:
    """The broker itself looks at these limits for what is new alone."""
    primary, backup = in_sync(pair)
    vhost = f"limited-{limit}-{uuid.uuid4().hex[:6]}"
    for node in (primary, backup):
        create(pair, node, vhost, "quorum")
    with (
        Talk(pair.nodes[primary].broker, "limited", "quorum", vhost=vhost) as direct,
        Talk(pair.nodes[primary].door, "limited", "quorum", vhost=vhost) as through,
    ):
        direct.open()
        through.open()
        queue = through.queue()
        pair.ctl(primary, "set_vhost_limits", "-p", vhost, json.dumps({limit: 1}))
        for client in (direct, through):
            assert client.do(Q.Declare(queue=queue, durable=True)) is not None
        pair.ctl(primary, "clear_vhost_limits", "-p", vhost)
        through.do(Q.Delete(queue=queue))


# ---- how it is found out ---------------------------------------------------------------------------------------------

class Asked:
    """A vhost with a default queue type at a broker, and who asks for it."""

    def __init__(self, lab: Lab, vhost: str) -> None:
        self.lab, self.vhost = lab, vhost
        create(lab, "e1", vhost, "quorum")
        self.types = DefaultTypes(Address.parse(lab.nodes["e1"].admin))

    async def find_out(self) -> bytes | None:
        await self.types.find_out(self.vhost)
        return self.types.of(self.vhost)

    def left(self) -> list[str]:
        """Queues in the vhost."""
        return [*types(self.lab, "e1", self.vhost)]


@pytest.fixture
def asked(brokers: Lab) -> Iterator[Asked]:
    """The vhost's name is so long that no reply of the broker tells more than it."""
    found = Asked(brokers, uuid.uuid4().hex.ljust(200, "x"))
    yield found
    brokers.ctl("e1", "delete_vhost", found.vhost)


def test_what_was_found_out_counts_for_a_while_and_longer_where_nothing_can_be(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_queue_type, "KNOWN_S", 0.0)

    async def go() -> None:
        assert await asked.find_out() is None, "it counts no longer"
        asked.lab.ctl("e1", "set_vhost_limits", "-p", asked.vhost, '{"max-queues": 0}')
        assert await asked.find_out() == b"quorum"
        unknown = DefaultTypes(Address.parse(asked.lab.nodes["e1"].admin))
        await unknown.find_out(asked.vhost)
        assert unknown.of(asked.vhost) == b"classic"

    asyncio.run(go())
    assert asked.left() == []


def test_who_goes_meanwhile_leaves_no_queue_behind(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    declare = Channel.queue_declare

    async def go() -> None:
        async def then_cancel(self: Channel, *args: Any, **options: Any) -> Any:
            try:
                return await declare(self, *args, **options)
            finally:
                waiting.cancel()

        monkeypatch.setattr(Channel, "queue_declare", then_cancel)
        waiting = asyncio.create_task(asked.types.find_out(asked.vhost))
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        monkeypatch.undo()
        assert await asked.find_out() == b"quorum"

    asyncio.run(go())
    assert asked.left() == []


def test_a_deletion_that_fails(asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    delete = Channel.queue_delete

    async def lost(self: Channel, *args: Any) -> int:
        self.connection.abort()
        return await delete(self, *args)

    async def go() -> None:
        monkeypatch.setattr(Channel, "queue_delete", lost)
        assert await asked.find_out() == b"quorum"

    asyncio.run(go())
    (left,) = asked.left()
    assert f"queue '{left}' in vhost '{asked.vhost}' is left behind" in caplog.text
