"""What computes a table again from what the queues hold, without a change of any queue's state. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lrq_ha.routing.names import parse_recv_queue
from lrq_ha.spark.pipeline.errors import NoVersion, QueueBehind, SchemaChanged, SnapshotGone
from lrq_ha.spark.pipeline.manifest import Manifest
from lrq_ha.spark.pipeline.progress import Step, Summary, repeat_snapshot


def rebuild_steps(table: str, manifest: Manifest, held: Mapping[str, Summary]) -> dict[str, Step]:
    """Queue -> what gives its rows of a table once more.

    Args:
        table: The table.
        manifest: The newest version.
        held: Queue -> summary of what it holds, from the beginning of its newest completed snapshot up to its position.

    Raises:
        SnapshotGone: A queue no longer holds that snapshot as a whole, or has had none, though its deltas are in the table.
        QueueBehind: A queue ends before the position that is applied.
    """
    steps = {}
    for queue, state in manifest.queues.items():
        if state.base is None:
            if manifest.need_snapshot:
                continue  # the table has no rows of this queue
            raise SnapshotGone(f"Queue {queue} has had no full snapshot from which table {table} could be rebuilt", resync_command(queue))
        summary = held.get(queue)
        step = repeat_snapshot(state, summary) if summary else None
        if step is None or summary is None:
            gone = f"Queue {queue} no longer holds the whole full snapshot of {state.base}, from which table {table} would be rebuilt"
            raise SnapshotGone(gone, resync_command(queue))
        if summary.last != state.position:
            raise QueueBehind(f"Queue {queue} ends at {summary.last} for now, and the tables are at {state.position}")
        steps[queue] = step
    if not steps:
        raise NoVersion(f"Table {table} has nothing to be rebuilt from: no queue has had a full snapshot", todo="Wait for the first one")
    return steps


def check_rebuilt(table: str, manifest: Manifest) -> None:
    """Whether there is a table of this name to rebuild. Raises SchemaChanged."""
    if table not in manifest.tables:
        names = ", ".join(manifest.tables) or "none yet"
        raise SchemaChanged(f"The tables on disk have no table {table} to rebuild", todo=f"Name one of those that are there: {names}")


def resync_command(queue: str) -> str:
    """The command that demands a full snapshot for a queue, at the group of this site."""
    name = parse_recv_queue(queue)
    client, source = (name.client_name, name.remote_id) if name else ("CLIENT", "SOURCE")
    return f"lrq-ha resync {client} --group GROUP --from {source}"
