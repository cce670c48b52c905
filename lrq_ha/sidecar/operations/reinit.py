"""Reinit of a node (R14): gives the tail of its log to the operator, to view and to publish again; then deletes the node's data.

Rules:

- A tail is given as JSON lines, one per entry, in log order. A publish is given whole, as its publisher sent it: `lrq-ha republish` sends it again
  with its replication ID, so messages that the group holds already are not enqueued twice.
- Deleted are the routing queues and every queue and exchange that the node's log declared, except queues of the level `none`; its bindings of
  exchanges that every broker has are removed. The node has then an empty log, follows, and applies everything again.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from broker_plugin.amqp import declarations, frames
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.errors import VhostNotFound
from broker_plugin.amqp.vhosts import open_vhost
from broker_plugin.apply.declarer import unconditional
from broker_plugin.log.definitions import Definitions
from broker_plugin.log.log_reader import LogReader
from broker_plugin.log.producers import split_key
from broker_plugin.log.streams import Streams
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Level
from lrq_ha.replication.log import LogIndex
from lrq_ha.replication.positions import RangeSet, epoch_name
from lrq_ha.routing import names
from lrq_ha.routing.names import ROUTING_VHOST

log = logging.getLogger("lrq_ha.node")

SILENCE_MAX_S = 10.0


async def batches(reader: LogReader, index: LogIndex, start: int | str = "first") -> AsyncIterator[tuple[int, pb.Batch]]:
    """(first sequence, batch) of the own log from `start` to its end, each once, without batches that were cut off.

    Args:
        start: Offset in the stream at which reading begins, or "first".

    Raises:
        LrqError: The stream gives nothing more before the log's end.
    """
    end, upto = index.end, 0
    if not end:
        return
    async with aclosing(reader.batches(start, silence_s=SILENCE_MAX_S)) as records:
        async for _, batch, body in records:
            if batch is None or batch.first <= upto or batch.last > end or index.epoch_at(batch.last) != batch.epoch:
                continue
            upto = batch.last
            yield batch.first, pb.Batch.FromString(body)
            if upto == end:
                return
    raise LrqError(f"the log ends at {end}, but its stream gives nothing after entry {upto}", retriable=True)


async def tail(reader: LogReader, index: LogIndex, first: int, start: int | str) -> AsyncIterator[dict[str, Any]]:
    """The entries from `first` on, as values for JSON. Read twice: a publish that a later entry refuses, or a renewal moved, is no publish.

    Raises:
        LrqError: As of `batches`; or the stream lacks an entry, as the broker has dropped or lost it.
    """
    refused = RangeSet()
    async for _, batch in batches(reader, index, start):
        for run in batch.runs:
            for begin, end in RangeSet.from_flat(run.refused.sequences):
                refused.add(begin, end)
    due = first
    moving: dict[tuple[str, str], int] = {}
    async for sequence, batch in batches(reader, index, start):
        for at, run in enumerate(batch.runs):
            _note_moving(moving, run, sequence)
            for entry in _entries(run, sequence):
                if entry["kind"] == "publish" and entry["sequence"] in refused:
                    entry["kind"] = "refused"  # its publisher heard of the refusal, or nothing, and has sent it again
                elif entry["kind"] == "publish" and _is_moved(entry, moving, batch.runs[at:]):
                    entry["kind"] = "moved"  # the group has it from before, or it stands in the tail as it was published
                if entry["sequence"] > due:
                    lacks = f"entries {due} to {entry['sequence'] - 1} are not in this node's stream any more"
                    raise LrqError(lacks, todo="lrq-ha reinit with --discard gives up the others, too")
                if entry["sequence"] == due:
                    due += 1
                    yield {"epoch": epoch_name(batch.epoch), **entry}
            sequence += len(run.enqueues.lengths) if run.WhichOneof("kind") == "enqueues" else 1


def _note_moving(moving: dict[tuple[str, str], int], run: pb.Run, sequence: int) -> None:
    """The queues that a renewal is moving behind this run, each with the entry before which moved messages were published (R17)."""
    match run.WhichOneof("kind"):
        case "moving" if run.moving.done:
            moving.pop((run.moving.vhost, run.moving.queue), None)
        case "moving":
            moving[run.moving.vhost, run.moving.queue] = sequence
        case "checkpoint":
            moving.clear()
            moving.update({(each.vhost, each.queue): each.before for each in run.checkpoint.moving})
        case "renewed":
            moving.clear()
        case "topology" if frames.method_id(run.topology.method) == frames.QUEUE_DECLARE:
            moving.pop((run.topology.vhost, declarations.first_name(run.topology.method)), None)  # the queue that was moved has gone


def _is_moved(publish: dict[str, Any], moving: dict[tuple[str, str], int], runs: Sequence[pb.Run]) -> bool:
    """Whether a renewal has moved this message, of the first of these runs of a batch: then the DEQUEUE of its old copy is behind it.

    If a renewal gives a queue up, clients' publishes to it may precede the log entry that says so; a message without old copy is only here.
    """
    queue = publish["vhost"], publish["routing_key"]
    if publish["exchange"] or publish["replication_id"] or queue not in moving or len(runs[0].enqueues.lengths) != 1:
        return False
    behind = next((run.dequeue for run in runs[1:] if not run.HasField("moved")), pb.Dequeue())
    return (behind.vhost, behind.queue) == queue and behind.sequences[0] < moving[queue]


def _entries(run: pb.Run, sequence: int) -> list[dict[str, Any]]:
    kind = run.WhichOneof("kind") or ""
    match kind:
        case "enqueues":
            return _publishes(run.enqueues, sequence)
        case "transmission":
            t = run.transmission
            return [_publish(sequence, ROUTING_VHOST, "", t.queue, b"", t.body, t.producer, t.id)]
        case "dequeue" | "reject":
            op = run.dequeue if kind == "dequeue" else run.reject
            return [{"sequence": sequence, "kind": kind, "vhost": op.vhost, "queue": op.queue, "sequences": list(op.sequences)}]
        case "topology":
            method = type(frames.decode_method(run.topology.method)).__qualname__.lower()
            return [{"sequence": sequence, "kind": kind, "vhost": run.topology.vhost, "method": method}]
    return [{"sequence": sequence, "kind": kind}]


def _publishes(run: pb.Enqueues, first: int) -> list[dict[str, Any]]:
    items, _ = frames.scan(run.frames, 0, frames.FRAME_MAX_ANY_BYTES)
    found = []
    for offset, (_, _, start, end, header, header_end, stop) in enumerate(items):
        route = frames.publish_route(run.frames[start:end])
        number = run.id_first + offset if run.producer else 0
        content = run.frames[header:header_end], frames.body_of(run.frames, header_end, stop)
        found.append(_publish(first + offset, run.vhost, route.exchange, route.routing_key, *content, run.producer, number))
    return found


def _publish(sequence: int, vhost: str, exchange: str, key: str, header: bytes, body: bytes, producer_key: str, number: int) -> dict[str, Any]:
    user, producer = split_key(producer_key)
    return {
        "sequence": sequence,
        "kind": "publish",
        "vhost": vhost,
        "exchange": exchange,
        "routing_key": key,
        "user": user,
        "replication_id": f"{producer}/{number}" if producer else "",
        "header": base64.b64encode(header).decode(),
        "body": base64.b64encode(body).decode(),
    }


async def wipe(streams: Streams, broker: Address, index: LogIndex, definitions: Definitions) -> None:
    """Deletes everything that belongs to this node's log from its broker. The incarnation must have stopped writing.

    `definitions`: the log's declarations, also if its beginning was dropped.

    Raises:
        LrqError: The broker does not answer or refuses; the rest is deleted at the next start.
    """
    declared: dict[str, set[tuple[int, str]]] = {}
    bound: dict[str, list[bytes]] = {}  # bindings between exchanges that every broker has: nothing else removes them
    views = {names.SEND_LOG_ENTRIES, names.SEND_SNAP_SYNC, names.STATUS}
    for vhost, row in definitions.rows():
        kind = frames.method_id(row)
        if kind in (frames.QUEUE_DECLARE, frames.EXCHANGE_DECLARE):
            declared.setdefault(vhost, set()).add((kind, declarations.first_name(row)))
        elif kind == frames.EXCHANGE_BIND:
            _, (destination, source, _), arguments = unconditional(row)
            if destination.startswith("amq.") and source.startswith("amq."):
                bound.setdefault(vhost, []).append(arguments)
    async for _, batch in batches(streams.reader, index):
        for run in batch.runs:
            if run.WhichOneof("kind") == "topology":
                method = frames.method_id(run.topology.method)
                if method in (frames.QUEUE_DECLARE, frames.EXCHANGE_DECLARE):
                    declared.setdefault(run.topology.vhost, set()).add((method, declarations.first_name(run.topology.method)))
            elif run.WhichOneof("kind") == "reception":
                views.add(run.reception.queue)
            elif run.WhichOneof("kind") == "checkpoint":
                views.update(received.queue for received in run.checkpoint.received)
    for vhost, queue in definitions.queues():
        if declarations.level_of(definitions.queue((vhost, queue)) or b"") is Level.NONE:
            declared[vhost].discard((frames.QUEUE_DECLARE, queue))
    for vhost in declared.keys() | bound.keys():
        try:
            connection = await open_vhost(broker, vhost)
        except VhostNotFound:
            continue  # it was deleted, with its messages
        try:
            channel = await connection.channel()
            for arguments in bound.get(vhost, ()):
                await channel._call(frames.EXCHANGE_UNBIND, arguments)
            for method, name in sorted(declared.get(vhost, ())):
                if method == frames.QUEUE_DECLARE:
                    await channel.queue_delete(name)
                else:
                    await channel.exchange_delete(name)
        finally:
            await connection.close()
    await streams.delete(views)
    log.warning("this node's log and everything in it was deleted from its broker, as the operator wished")
