"""Queues at which the census cannot look, or finds another one: what leaves the others of their vhost is told to the backup all the same.

And a queue that is looked into is left as it was."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from door_rig import Rig
from load import consume, eventually

from broker_plugin.amqp.connection import Address, Channel
from broker_plugin.log.replica import Replica
from broker_plugin.reconcile.reconciler import LengthReconciler
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings

pytestmark = [pytest.mark.broker, pytest.mark.proves("queue: silent removals")]

BODIES = [b"%d" % i for i in range(3)]
VHOST_UNSEEN = "what leaves queues by itself in vhost"
#: Kills a classic queue's process until its supervisor gives it up.
CRASHES = """
Name = rabbit_misc:r(<<"/">>, queue, <<"{queue}">>),
Kill = fun Again(0) -> alive;
           Again(Left) ->
               {{ok, Queue}} = rabbit_amqqueue:lookup(Name),
               case amqqueue:get_state(Queue) of
                   crashed -> crashed;
                   _ -> exit(amqqueue:get_pid(Queue), boom), timer:sleep(100), Again(Left - 1)
               end
       end,
Kill(200).
"""


def filled(rig: Rig) -> str:
    """A queue that both nodes have, with what is in it."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    for body in BODIES:
        channel.basic_publish("", queue, body)
    rig.both_hold(queue, BODIES)
    return queue


def purged_around_the_door(rig: Rig, queue: str) -> None:
    """The backup hears of it."""
    with rig.at(rig.primary) as broker:
        broker.queue_purge(queue)
    rig.both_hold(queue, [])


def test_a_clients_own_queue_under_the_name_of_one_that_is_gone(rig: Rig) -> None:
    """Exclusive, it is the client's alone, and not the one that the log has: that one goes on the backup, too, as long as the client may stay."""
    gone, other = filled(rig), filled(rig)
    with rig.at(rig.primary) as broker:
        broker.queue_delete(gone)
    owner = rig.channel(confirms=True)
    owner.queue_declare(gone, exclusive=True)
    purged_around_the_door(rig, other)
    eventually("the backup's to go", lambda: not rig.exists(rig.backup, gone))
    owner.basic_publish("", gone, b"its own")
    assert owner.basic_get(gone, auto_ack=True)[2] == b"its own"
    owner.connection.close()
    assert filled_again(rig, gone)


def filled_again(rig: Rig, queue: str) -> bool:
    """Declared anew, as another kind, it is replicated as any other."""
    channel = rig.channel(confirms=True)
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    channel.basic_publish("", queue, b"anew")
    rig.both_hold(queue, [b"anew"])
    return True


def test_a_queue_that_has_crashed(rig: Rig) -> None:
    """It is not gone, so it stays on the backup; who looks after it is told its name."""
    file = rig.lab.nodes[rig.primary].log
    crashed, other = filled(rig), filled(rig)
    before = file.read_text().count(VHOST_UNSEEN)
    assert rig.lab.ctl(rig.primary, "eval", CRASHES.format(queue=crashed)).strip() == "crashed"
    eventually("the log to name it", lambda: f"what leaves queue '{crashed}' in vhost '/' by itself cannot be seen now" in file.read_text())
    purged_around_the_door(rig, other)
    assert rig.bodies(rig.backup, crashed) == BODIES
    assert file.read_text().count(VHOST_UNSEEN) == before


@pytest.mark.quick
def test_what_comes_while_it_looks_stays_in_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On RabbitMQ 3 it gave back what it had got in a way that puts that at the end of a quorum queue."""
    with rig.at(rig.primary) as broker:
        queue = rig.declare(broker, kind="quorum")
        broker.confirm_delivery()
        asked = Channel.queue_declare

        async def published_meanwhile(self: Channel, name: str, **options: Any) -> tuple[str, int, int]:
            if not broker.queue_declare(queue, passive=True).method.message_count:
                for number in range(10):
                    broker.basic_publish("", queue, b"%d" % number)
            await asyncio.sleep(0.5)  # it has got the first
            assert not replica.moving["/", queue].over.is_set(), "clients wait"
            return await asked(self, name, **options)

        monkeypatch.setattr(Channel, "queue_declare", published_meanwhile)
        replica = Replica(Node(NodeSettings(1, {1: "e1"})), Levels({"^.*$": "all"}), lambda _first, _count, _runs: None)
        door: Any = SimpleNamespace(sessions=[])
        census = LengthReconciler(replica, door, Address.parse(rig.broker_url(rig.primary)))

        async def look() -> bool:
            try:
                return await census._is_empty(("/", queue), limited=False)
            finally:
                await census._vhosts.close()

        assert not asyncio.run(look())
        monkeypatch.undo()
        assert not replica.moving
        assert consume(rig.broker_url(rig.primary), queue, 10) == list(range(10))
