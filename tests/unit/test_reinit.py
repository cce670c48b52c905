"""A node that is to begin anew: when that is refused, what is said of it, and that what is saved before is whole. No broker: nothing is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import commands
from test_node import E1_1, LOG, Driver, diverged, follower, leader, leaders_log

from broker_plugin.amqp import content_header, encode
from broker_plugin.amqp.address import Address
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Hello, PeerDisconnected
from lrq_ha.replication.log import BatchHeader, LogIndex
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.node.task_scope import TaskScope
from lrq_ha.sidecar.operations.commands import OperatorCommands
from lrq_ha.sidecar.operations.reinit import tail

REFUSED = "no primary answers e2, so what it holds may be the last copy of what the group has: all of it would be lost. Bring the primary back"


def order(
    d: Driver, *, force: bool = False, dry_run: bool = False, meanwhile: Callable[[], object] = lambda: None
) -> tuple[bool, str, bool]:
    """Whether it was obeyed, what was said, and whether anything is deleted. `meanwhile`: what happens while its broker is asked."""

    async def counts(*_: object) -> str:
        meanwhile()
        return ""

    async def go() -> tuple[bool, str, bool]:
        marked: list[bool] = []

        async def mark_anew() -> None:
            marked.append(True)

        life, core = TaskScope(), SimpleNamespace(node=d.node, replica=SimpleNamespace(declared=SimpleNamespace(partial=())))
        own_log: Any = SimpleNamespace(streams=SimpleNamespace(mark_anew=mark_anew))
        orders = OperatorCommands("e2", Address("127.0.0.1"), core, life, own_log, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lrq_ha.sidecar.operations.commands.in_no_export", counts)
            ok, text = await orders.reinit(force=force, dry_run=dry_run)
        assert life.over is bool(marked)
        return ok, text, bool(marked)

    return asyncio.run(go())


def owns_entries(d: Driver) -> str:
    """What is said to who asks for the entries of a node that is not diverged."""

    async def go() -> str:
        none: Any = SimpleNamespace()
        orders = OperatorCommands("e2", Address("127.0.0.1"), SimpleNamespace(node=d.node), TaskScope(), none, none, none)  # type: ignore[arg-type]
        with pytest.raises(LrqError) as caught:
            orders.tail()
        return caught.value.what

    return asyncio.run(go())


def test_only_a_primary_tells_whether_a_node_has_entries_of_its_own() -> None:
    assert owns_entries(Driver(2)) == "e2 is catch-up, not diverged: no primary has said yet whether it has entries of its own"
    for told in (follower(), leader()):
        assert owns_entries(told).endswith("not diverged: it has no entries of its own")


def widowed(make: Callable[[], Driver]) -> Driver:
    """Its primary is gone."""
    d = make()
    d.feed(PeerDisconnected(1))
    return d


@pytest.mark.parametrize("make", [follower, diverged, lambda: Driver(2)], ids=["ready", "diverged", "started"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_last_copy_is_kept(make: Callable[[], Driver], dry_run: bool) -> None:
    """With the primary dead, a backup that was in sync deleted all that was left of the group's data."""
    ok, text, deletes = order(widowed(make), dry_run=dry_run)
    assert (ok, deletes) == (False, False)
    assert text == f"{REFUSED} first, or promote e2, or repeat with --force"


def test_force_gives_it_up() -> None:
    d = widowed(follower)
    would = "would drop its log, and the queues and exchanges that its log declared; no primary answers, so this may be the last copy of them"
    assert order(d, force=True, dry_run=True) == (True, would, False)
    assert order(d, force=True) == (True, "e2 drops its log, and begins again", True)


@pytest.mark.parametrize("force", [False, True])
def test_a_primary_is_not_made_anew(force: bool) -> None:
    assert order(leader(), force=force) == (False, "e2 is primary: only a backup can be rebuilt", False)


@pytest.mark.parametrize(
    ("head", "base", "then"),
    [
        (1, 0, "it then follows from the first entry"),
        (4, 0, "the log of e1 begins at entry 4, its broker has dropped what was before: to let e2 join, run lrq-ha renew"),
        (4, 5, "it then follows from entry 5, where e1 has renewed the log"),
    ],
)
def test_a_dry_run_says_how_it_joins_again(head: int, base: int, then: str) -> None:
    """It said that the node follows from the first entry, whether the primary has that or not."""
    d = follower()
    d.hear(1, Hello(Role.ACTIVE, replace(leaders_log(), head=head, base=base), d.node.leader_epoch))
    would = f"would drop its log, and the queues and exchanges that its log declared; {then}"
    assert order(d, dry_run=True) == (True, would, False)
    assert order(d) == (True, "e2 drops its log, and begins again", True)


def test_a_dry_run_says_that_confirms_wait_for_it() -> None:
    d = follower(strict=True)
    d.hear(1, Hello(Role.ACTIVE, leaders_log(), d.node.leader_epoch))
    assert order(d, dry_run=True)[1].endswith("; it then follows from the first entry; nothing is confirmed until it has caught up")


# ---- the tail --------------------------------------------------------------------------------------------------------


def saved(first: int, *in_stream: int) -> list[int]:
    """What is saved from entry `first` on of a log of single entries up to 9. `in_stream`: those that its stream still gives."""
    log = LogIndex(2)
    for batch in (*LOG, *map(single, range(6, 10))):
        log.accept(batch)

    async def batches(_start: int | str, *, silence_s: float) -> AsyncIterator[tuple[int, BatchHeader, bytes]]:
        for number in in_stream:
            yield number, single(number), pb.Batch(runs=[pb.Run(dequeue=pb.Dequeue(vhost="/", queue="orders"))]).SerializeToString()

    async def go() -> list[int]:
        reader: Any = SimpleNamespace(batches=batches)
        return [entry["sequence"] async for entry in tail(reader, log, first, "first")]

    return asyncio.run(go())


def test_what_happens_while_its_broker_is_asked_counts() -> None:
    """Its primary was lost, or it had become primary itself, and all the same it deleted what nobody else had."""
    d = follower()
    ok, text, deleted = order(d, meanwhile=lambda: d.lose(1))
    assert (ok, deleted) == (False, False)
    assert text.startswith(REFUSED)

    def takes_over() -> None:
        d.lose(1)
        d.ask(1)
        d.confirm()

    d = follower()
    ok, text, deleted = order(d, meanwhile=takes_over)
    assert (ok, text, deleted) == (False, "e2 is primary: only a backup can be rebuilt", False)


def publishing(key: str, producer: str = "", exchange: str = "") -> pb.Run:
    header = content_header.header_payload(1, content_header.properties(b""))
    frames = encode.publish_method(1, exchange, key) + b"".join(encode.content(1, header, b"x"))
    return pb.Run(enqueues=pb.Enqueues(vhost="/", channel=1, frames=frames, lengths=[len(frames)], producer=producer, id_first=1))


def moving(queue: str, done: bool = False) -> pb.Run:
    return pb.Run(moving=pb.Moving(vhost="/", queue=queue, done=done))


def declaring(queue: str) -> pb.Run:
    return pb.Run(topology=pb.Topology(vhost="/", method=encode.method_frame(1, commands.Queue.Declare(queue=queue))[7:-1]))


def dequeue(queue: str, sequence: int = 1) -> pb.Run:
    return pb.Run(dequeue=pb.Dequeue(vhost="/", queue=queue, sequences=[sequence, sequence]))


VISIT = pb.Run(moved=pb.Moved(vhost="/", queue="p", sequence=1))
GIVEN_UP = pb.Run(renewed=pb.Renewed(given_up=True))
TAILS: dict[str, list[tuple[list[pb.Run], list[str]]]] = {
    "refused": [
        ([publishing("q")], ["publish"]),
        ([publishing("q")], ["refused"]),
        ([pb.Run(refused=pb.Refused(sequences=[2, 2]))], ["refused"]),
    ],
    "moved, and not": [
        ([publishing("q")], ["publish"]),
        ([moving("q")], ["moving"]),
        ([publishing("q"), dequeue("q")], ["moved", "dequeue"]),
        ([publishing("q"), VISIT, dequeue("q")], ["moved", "moved", "dequeue"]),
        ([publishing("p"), dequeue("q"), publishing("q", exchange="x"), dequeue("q")], ["publish", "dequeue", "publish", "dequeue"]),
        ([publishing("q", "//user/app"), dequeue("q"), publishing("q")], ["publish", "dequeue", "publish"]),
        ([moving("q", done=True)], ["moving"]),
        ([publishing("q"), dequeue("q")], ["publish", "dequeue"]),
    ],
    "a renewal that was under way where the tail begins": [
        ([pb.Run(checkpoint=pb.Checkpoint(moving=[pb.MovingQueue(vhost="/", queue="r", before=2)]))], ["checkpoint"]),
        ([publishing("r"), dequeue("r")], ["moved", "dequeue"]),
        ([GIVEN_UP], ["renewed"]),
        ([publishing("r"), dequeue("r")], ["publish", "dequeue"]),
    ],
    "a queue that is given up: clients go on before the log says so": [
        ([moving("q")], ["moving"]),
        ([publishing("q")], ["publish"]),
        ([publishing("q"), dequeue("q", 2), publishing("q"), GIVEN_UP], ["publish", "dequeue", "publish", "renewed"]),
    ],
    "a copy from before there was a log": [([moving("q")], ["moving"]), ([publishing("q")], ["publish"]), ([dequeue("q")], ["dequeue"])],
    "a queue that is gone, and declared anew": [
        ([moving("q")], ["moving"]),
        ([declaring("q")], ["topology"]),
        ([publishing("q"), dequeue("q")], ["publish", "dequeue"]),
    ],
}


@pytest.mark.parametrize("batched", TAILS.values(), ids=list(TAILS))
def test_what_was_refused_or_only_moved_is_no_publish(batched: list[tuple[list[pb.Run], list[str]]]) -> None:
    """It was published again as well: beside its publisher's own second try; beside what the group has of it. And nothing else is left out."""
    log, found = LogIndex(2), []
    for runs, _ in batched:
        found.append((log.end + 1, len(runs)))
        log.accept(BatchHeader(E1_1, log.end + 1, log.end + len(runs), E1_1 if log.end else 0, E1_1))

    async def batches(_start: int | str, *, silence_s: float) -> AsyncIterator[tuple[int, BatchHeader, bytes]]:
        for (first, count), (runs, _) in zip(found, batched, strict=True):
            yield first, BatchHeader(E1_1, first, first + count - 1, E1_1, E1_1), pb.Batch(epoch=E1_1, runs=runs).SerializeToString()

    async def go() -> list[str]:
        return [entry["kind"] async for entry in tail(cast(Any, SimpleNamespace(batches=batches)), log, 1, "first")]

    assert asyncio.run(go()) == [kind for _, kinds in batched for kind in kinds]


def single(sequence: int) -> BatchHeader:
    return BatchHeader(E1_1, sequence, sequence, E1_1, E1_1)


def test_what_is_saved_begins_where_the_logs_part() -> None:
    assert saved(7, 5, 6, 7, 8, 9) == [7, 8, 9]
    assert saved(7, 7, 8, 8, 9) == [7, 8, 9], "a batch may stand there twice"


@pytest.mark.parametrize(("in_stream", "lacks"), [((8, 9), "entries 7 to 7"), ((5, 6, 7, 9), "entries 8 to 8"), ((9,), "entries 7 to 8")])
def test_a_tail_that_is_not_whole_is_no_tail(in_stream: tuple[int, ...], lacks: str) -> None:
    """The broker has dropped its beginning, say: the rest was saved as if it were all, and then everything was deleted."""
    with pytest.raises(LrqError, match=f"{lacks} are not in this node's stream any more"):
        saved(7, *in_stream)
