"""What clients are told of messages that were there before their node led, and what a node knows of queues."""

from __future__ import annotations

import asyncio
import pickle
import tomllib
from typing import Any

import pytest
from pamqp import base, commands
from test_completion import Alone

from broker_plugin.amqp import encode
from broker_plugin.door.server import Door
from broker_plugin.log import codec
from broker_plugin.log.catalog import LocalQueues
from broker_plugin.log.delivery_history import GIVEN_BACK_RANGES_MAX
from broker_plugin.log.messages import Delivery, Settled
from broker_plugin.log.replica import Replica
from lrq_ha.errors import NotPrimary
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import EntryKind, WriteBatch
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.log import BatchHeader, LogState
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.node.core import Core
from lrq_ha.sidecar.node.recovery import _LogReading
from lrq_ha.sidecar.node.task_scope import TaskScope


def led(count: int) -> Replica:
    """A primary whose log ends with entry `count` when it takes over."""
    alone = Alone()
    alone.emit(alone.node.log.end + 1, count - alone.node.log.end, [])
    assert alone.node.log.end == count
    return alone.replica


def test_after_a_loss_anything_of_before_may_have_been_delivered() -> None:
    replica = led(10)
    replica.given_out.took_over(10, None)
    assert replica.given_out.comes_again(10, flagged=False)
    assert not replica.given_out.comes_again(11, flagged=False)
    assert replica.given_out.comes_again(11, flagged=True)


def test_after_a_handover_nothing_of_before_has_been_delivered_until_it_is() -> None:
    replica = led(10)
    replica.given_out.took_over(10, ())
    assert not replica.given_out.comes_again(10, flagged=True), "the sweeper had it, and nobody else"
    assert replica.given_out.comes_again(10, flagged=True), "a client has given it back"
    assert not replica.given_out.comes_again(9, flagged=False)
    assert replica.given_out.comes_again(9, flagged=True)
    assert replica.given_out.comes_again(11, flagged=True), "no sweeper has seen what is younger"
    replica.given_out.took_over(10, ())
    assert not replica.given_out.comes_again(10, flagged=True)


def test_what_was_given_before_a_handover_comes_again_after_it() -> None:
    """Else what was in doubt after a loss, or given back, came as new: who looks for what is delivered again did its work twice."""
    first, second = led(20), led(20)
    queue = ("/", "orders")
    first.given_out.took_over(5, None)
    first.gave_back([Delivery(queue, 8, ()), Delivery(queue, 9, ()), Delivery(queue, 12, (("orders", 1),))])
    first.given_out.settled(queue, [9])
    first.given_out.given_back.pop(queue)  # the census has seen them in the queue
    given = first.given_out.given()
    assert given is not None
    second.given_out.took_over(20, given)
    assert [n for n in range(1, 21) if second.given_out.comes_again(n, flagged=True)] == [*range(1, 6), 8, 9, 12]
    third = led(20)
    third.given_out.took_over(20, second.given_out.given())
    assert [n for n in range(1, 21) if third.given_out.comes_again(n, flagged=False)] == [*range(1, 6), 8, 9, 12], "nor once more"


def test_what_is_told_of_it_is_bounded() -> None:
    given_out = led(10).given_out
    for number in range(3 * GIVEN_BACK_RANGES_MAX):
        given_out.gave_back(("/", "orders"), 2 * number + 1)
    given = given_out.given()
    assert given is not None
    assert len(given) <= GIVEN_BACK_RANGES_MAX
    assert (given[0][0], given[-1][1]) == (1, 6 * GIVEN_BACK_RANGES_MAX - 1)


def test_what_clients_have_been_given_since_a_handover_takes_little_room() -> None:
    """Also where the messages of two queues alternate."""
    count = 200_000
    replica = led(10)
    replica.given_out.took_over(count, ())
    for sequence in range(1, count, 2):
        replica.given_out.comes_again(sequence, flagged=False)
    assert replica.given_out.comes_again(count - 1, flagged=True)
    assert not replica.given_out.comes_again(count, flagged=True)
    assert len(pickle.dumps(replica.given_out)) < count // 4


def test_what_falls_out_of_the_log_is_not_of_before() -> None:
    for given in (None, ()):
        replica = led(10)
        replica.given_out.took_over(10, given)
        replica.cut(8)
        assert replica.given_out.comes_again(8, flagged=True)
        assert not replica.given_out.comes_again(8, flagged=False)


def _entry(method: base.Frame) -> pb.Run:
    return pb.Run(topology=pb.Topology(vhost="/", method=bytes(encode.method_frame(1, method)[7:-1])))


def test_declarations_that_fall_out_of_the_log_were_never_made() -> None:
    replica = led(10)
    kept, made = ("/", "kept"), ("/", "made")
    replica.index.note(_entry(commands.Queue.Declare(queue="kept", arguments={"x-expires": 60_000})), 11, sweep=True)
    replica.index.note(_entry(commands.Exchange.Declare(exchange="events", auto_delete=True)), 12, sweep=True)
    replica.progress.safe_advanced(12)
    before = dict(replica.declared.queues), dict(replica.declared.declarations), dict(replica.declared.auto_delete_exchanges)
    replica.index.note(_entry(commands.Queue.Delete(queue="kept")), 13, sweep=True)
    replica.index.note(_entry(commands.Queue.Declare(queue="kept")), 14, sweep=True)
    replica.index.note(_entry(commands.Queue.Declare(queue="made")), 15, sweep=True)
    replica.index.note(_entry(commands.Exchange.Declare(exchange="events")), 16, sweep=True)
    replica.index.note(_entry(commands.Exchange.Declare(exchange="others", auto_delete=True)), 17, sweep=True)
    assert {kept, made} == set(replica.declared.queues)
    assert list(replica.declared.auto_delete_exchanges) == [("/", "others")]
    replica.cut(13)
    assert (replica.declared.queues, replica.declared.declarations, replica.declared.auto_delete_exchanges) == before


def test_a_deletion_that_falls_out_of_the_log_leaves_the_queue_in_the_next_checkpoint() -> None:
    replica = led(10)
    replica.index.note(_entry(commands.Queue.Declare(queue="kept")), 11, sweep=True)
    replica.index.note(_entry(commands.Queue.Delete(queue="kept")), 12, sweep=True)
    replica.cut(12)
    assert replica.declared.queues == {("/", "kept"): 0}


def test_what_operators_set_is_in_the_next_checkpoint_unless_it_fell_out_of_the_log() -> None:
    replica = led(10)
    one, other = pb.BrokerObject(key=["users", "one"], value="{}"), pb.BrokerObject(key=["users", "other"], value="{}")
    replica.index.note(pb.Run(definitions=pb.DefinitionsChange(kinds=["users"], set=[one])), 11, sweep=True)
    replica.index.note(pb.Run(definitions=pb.DefinitionsChange(kinds=["users"], set=[other], deleted=[one])), 12, sweep=True)
    replica.cut(12)
    entry = replica.index.checkpoint(LogState(), renewal=False).SerializeToString()
    again = Alone().replica
    again.index.restore(13, pb.Checkpoint.FromString(entry))
    assert again.index.broker_objects.kinds == {"users"}
    assert again.index.broker_objects.rows == {("users", "one"): "{}"}


def test_how_long_a_queue_is_to_be_is_not_known_any_more_when_it_was_deleted() -> None:
    replica, queue = led(10), ("/", "kept")
    replica.index.note(_entry(commands.Queue.Declare(queue="kept")), 11, sweep=False)
    replica.index.passes.begin(12)
    replica.index.passes.noted(13, queue, done=False)
    replica.index.passes.came(queue)
    assert replica.index.passes.holds(queue) == 1
    replica.index.note(_entry(commands.Queue.Delete(queue="kept")), 15, sweep=False)
    replica.index.note(_entry(commands.Queue.Declare(queue="kept")), 16, sweep=False)
    assert replica.index.passes.holds(queue) == -1, "as many dead letters in the new one would pass for what was in the old one"


def test_of_its_own_queues_a_node_remembers_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_plugin.log.catalog.LOCAL_QUEUES_MAX", 3)
    queues = LocalQueues()
    for name in ("a", "b", "c", "a", "d"):
        queues.add(("/", name))
    queues.discard(("/", "c"))
    queues.discard(("/", "c"))
    assert [("/", name) in queues for name in "abcd"] == [True, False, False, True]
    assert len(queues) == 2


def test_of_what_is_in_doubt_only_what_was_seen_counts_as_there() -> None:
    """Its neighbour may be another's, and under way."""
    replica = led(10)
    tracker = replica.progress.tracker
    assert tracker.needs(5, 6)
    replica.progress.seen(5)
    replica.progress.seen(6)
    replica.refuse([Settled(0, 1, 5, "", 0)], unless_seen=True)
    assert tracker.needs(5, 6).flat() == [6, 6]


def test_nothing_is_appended_when_the_incarnation_is_over() -> None:
    """The core would not take it, and the next entry would get its sequence: connections that ended failed then, and the rest lived on."""

    async def go() -> None:
        life, node = TaskScope(), led(10).node
        core = Core(node, Levels({}), life, lambda _effect: None)
        assert not core.replica.active, "not ready"
        core.ready = True
        assert core.replica.active
        life.end("superseded")
        assert not core.replica.active
        core.replica.refuse([Settled(0, 1, 5, "", 0)])
        assert core.replica.end == node.log.end
        with pytest.raises(NotPrimary):
            core.replica.append(pb.Run(marker=pb.Marker()))

    asyncio.run(go())


def test_an_entry_that_a_newer_version_has_written_is_refused() -> None:
    """It was passed over: its node stayed in sync, and lacked it after a promotion."""
    replica = led(10)
    newer = pb.Run.FromString(b"\xf2\x3f\x02\x08\x01")  # a message of field 1022
    marker = pb.Run(marker=pb.Marker(nodes=[1, 2], writer=pb.Writer(software="9.1", protocol=codec.PROTOCOL)))
    with pytest.raises(codec.UnsuitableVersion, match=r"entry 13 .*, written by lrq-ha 9\.1, is of a kind that .* does not know\. Upgrade this node"):
        replica.index_batch(11, [marker, pb.Run(dequeue=pb.Dequeue(vhost="/", queue="orders", sequences=[1, 1])), newer])


@pytest.mark.parametrize(("opened", "writer"), [({codec.SOFTWARE: "9.1"}, "9.1"), ({}, "of another version")])
def test_a_record_of_an_unknown_kind_is_refused(opened: dict[str, str], writer: str) -> None:
    """It was said to be a batch with wrong headers."""
    nothing: Any = None
    reading = _LogReading(led(10), nothing, nothing, nothing, None)
    reading.take({codec.OPEN: 1, **opened}, b"")
    with pytest.raises(codec.UnsuitableVersion, match=rf"behind entry 10, written by lrq-ha {writer}, is of a kind .* Upgrade this node"):
        reading.take({"x-lrq-level": 2}, b"")


def test_a_log_names_the_version_that_writes_it() -> None:
    """In the first entry of each epoch, and in each CHECKPOINT, from which a restart reads."""
    assert led(10).index.checkpoint(LogState(), renewal=False).writer == codec.WRITER
    config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))

    async def go() -> list[pb.Run | codec.Publishes]:
        incarnation = Incarnation(config, Door(config.door_settings))
        marker = BatchHeader(257, 1, 1, 0, 257, ((1, frozenset({1, 2})),))
        return incarnation._log._own_runs(WriteBatch(marker, EntryKind.MARKER, None))

    [run] = asyncio.run(go())
    assert isinstance(run, pb.Run)
    assert (list(run.marker.nodes), run.marker.writer) == ([1, 2], codec.WRITER)


@pytest.mark.parametrize("kind", ["marker", "checkpoint"])
def test_a_log_of_a_newer_protocol_is_refused(kind: str) -> None:
    """A field of a kind that is known may be what must be understood: it would be passed over."""
    writer = pb.Writer(software="9.1", protocol=codec.PROTOCOL + 1)
    run = pb.Run(marker=pb.Marker(writer=writer)) if kind == "marker" else pb.Run(checkpoint=pb.Checkpoint(writer=writer))
    with pytest.raises(codec.UnsuitableVersion, match=r"entry 11 .* was written by lrq-ha 9\.1 .*protocol"):
        led(10).index_batch(11, [run])
    with pytest.raises(codec.UnsuitableVersion):
        led(10).index.restore(11, pb.Checkpoint(writer=writer))
