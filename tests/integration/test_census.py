"""Queues at which the census cannot look, or finds another one: what leaves the others of their vhost is told to the backup all the same."""

from __future__ import annotations

import pytest
from door_rig import Rig
from load import eventually

pytestmark = pytest.mark.broker

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
