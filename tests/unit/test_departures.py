"""Queues that come and go: what a node knows of them goes with them, so that its applied record and its CHECKPOINTs stay as small as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from pamqp import base, commands
from pamqp.common import FieldTable
from test_completion import Alone

from broker_plugin.amqp import encode
from broker_plugin.log.replica import Replica
from broker_plugin.log.retired_queues import RetiredQueues
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication import delivery_filter
from lrq_ha.replication.checkpoints import Checkpoints
from lrq_ha.sidecar.node.recovery import applied_record

pytestmark = pytest.mark.proves("limit: deleted queues")

MANY = 10_000
KEPT = 100
DEAD_LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
Key = tuple[str, str]
Use = Callable[[Replica, Key, int], None]


def declare(replica: Replica, name: str, arguments: FieldTable | None = None) -> None:
    topology(replica, commands.Queue.Declare(queue=name, durable=True, arguments=arguments or {}))


def delete(replica: Replica, name: str) -> None:
    topology(replica, commands.Queue.Delete(queue=name))


def topology(replica: Replica, method: base.Frame) -> None:
    replica.append(pb.Run(topology=pb.Topology(vhost="/", method=bytes(encode.method_frame(1, method)[7:-1]))))


def publish(replica: Replica) -> int:
    return replica.append(pb.Run(enqueues=pb.Enqueues(vhost="/", channel=1, frames=b"x", lengths=[1])))


def apply(replica: Replica) -> None:
    replica.flush()
    replica.progress.safe_advanced(replica.end)
    replica.progress.applied(replica.progress.tracker.applied + 1, replica.end)


def size(replica: Replica) -> int:
    return len(applied_record(replica, Checkpoints()).SerializeToString())


def remembered(replica: Replica) -> list[str]:
    return [record.queue for record in replica.index.filter.export()[0]]


def short_lived(use: Use, arguments: FieldTable | None = None, count: int = MANY) -> tuple[Alone, list[int], list[int]]:
    """Queues made, used and deleted one after the other; the sizes of record and CHECKPOINT before and after."""
    alone = Alone()

    async def live() -> tuple[list[int], list[int]]:
        replica = alone.replica
        declare(replica, "dead")
        apply(replica)
        before = [size(replica), replica.checkpoint() and replica.checkpoint_bytes]
        for number in range(count):
            name = f"reply-{number}"
            declare(replica, name, arguments)
            sequence = publish(replica)
            use(replica, ("/", name), sequence)
            apply(replica)
        return before, [size(replica), replica.checkpoint() and replica.checkpoint_bytes]

    return alone, *asyncio.run(live())


def acked(replica: Replica, key: Key, sequence: int) -> None:
    replica.dequeue(key, [sequence], ())
    delete(replica, key[1])


def acked_when_it_was_gone(replica: Replica, key: Key, sequence: int) -> None:
    delete(replica, key[1])
    apply(replica)
    replica.dequeue(key, [sequence], ())


def rejected(replica: Replica, key: Key, sequence: int) -> None:
    replica.reject(key, [sequence], ())
    delete(replica, key[1])


def died_and_acked(replica: Replica, key: Key, sequence: int) -> None:
    delete(replica, key[1])
    apply(replica)
    replica.dequeue(("/", "dead"), [sequence], ((key[1], 1),))


@pytest.mark.full(only="rejected")
@pytest.mark.parametrize("use", [acked, rejected])
def test_queues_that_are_gone_leave_nothing_behind(use: Use) -> None:
    alone, before, after = short_lived(use)
    assert after[0] < before[0] + 16, "but for the digits of R"
    assert 0 < after[1] < before[1] + 16
    assert remembered(alone.replica) == []
    assert list(alone.replica.declared.queues) == list(alone.replica.declared.declarations) == [("/", "dead")]
    assert not alone.replica.record_parts


@pytest.mark.parametrize(
    ("use", "arguments"),
    [(acked, DEAD_LETTERS), (acked_when_it_was_gone, None), (died_and_acked, DEAD_LETTERS), (died_and_acked, None)],
)
def test_of_those_that_may_be_needed_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch, use: Use, arguments: FieldTable | None) -> None:
    monkeypatch.setattr(delivery_filter, "DEPARTED_MAX", KEPT)
    alone, before, after = short_lived(use, arguments, count=1_000)
    replica = alone.replica
    kept = [f"reply-{number}" for number in range(1_000 - KEPT, 1_000)]
    assert [name for name in remembered(replica) if name != "dead"] == kept
    assert len(replica.index.filter.followers) <= KEPT
    assert after[0] < before[0] + 250 * KEPT
    assert 0 < after[1] < before[1] + 16


def test_a_hundred_thousand_queues_fit_into_a_checkpoint() -> None:
    alone = Alone()

    async def live() -> None:
        replica = alone.replica
        names = [f"reply-{number:030}" for number in range(100_000)]
        for name in names:
            declare(replica, name)
        apply(replica)
        assert replica.checkpoint()
        assert replica.checkpoint_bytes < 10 << 20
        again = Alone().replica
        again.index.restore(replica.end, alone.runs[-1].checkpoint)
        assert list(again.declared.queues) == [("/", name) for name in names]
        assert again.declared.declarations == replica.declared.declarations
        replica.checkpoint_bytes_max = 1 << 20
        end = replica.end
        assert not replica.checkpoint()
        assert (replica.end, replica.checkpoint_bytes > 4 << 20) == (end, True)

    asyncio.run(live())


def test_nothing_goes_before_everything_up_to_the_deletion_is_applied() -> None:
    alone = Alone()

    async def live() -> None:
        replica = alone.replica
        declare(replica, "q")
        first, second = publish(replica), publish(replica)
        replica.dequeue(("/", "q"), [first], ())
        delete(replica, "q")
        replica.flush()
        replica.progress.safe_advanced(replica.end)
        replica.progress.applied(second, second)
        assert remembered(replica) == ["q"]
        assert ("/", "q") in replica.declared.queues
        replica.progress.applied(first, first)
        assert remembered(replica) == []
        assert ("/", "q") not in replica.declared.queues

    asyncio.run(live())


def test_a_queue_that_is_declared_anew_is_there() -> None:
    alone = Alone()

    async def live() -> None:
        replica = alone.replica
        declare(replica, "q")
        publish(replica)
        delete(replica, "q")
        declare(replica, "q")
        replica.dequeue(("/", "q"), [publish(replica)], ())
        apply(replica)
        assert replica.declared.queues == {("/", "q"): 0}
        assert remembered(replica) == ["q"]
        delete(replica, "q")
        apply(replica)
        assert (replica.declared.queues, remembered(replica)) == ({}, [])

    asyncio.run(live())


def test_what_falls_out_of_the_log_is_no_departure() -> None:
    departures = RetiredQueues()
    for sequence, name in enumerate("abc", 11):
        departures.deleted(sequence, ("/", name), dead_letters=False)
    departures.undeclared(14, ("/", "d"))
    departures.cut(13)
    assert [gone.queue[1] for gone in departures.take(11)] == ["a"]
    assert [gone.queue[1] for gone in departures.take(99)] == ["b"]
    assert list(departures.take(99)) == []
