"""Keeps a whole snapshot in each receive queue of a sink: demands a full sync before the broker drops the last one, as long as this node is primary.
It watches the receivers of these queues, too.

Rules:

- A stream drops whole segments at its head. It surely keeps its size less two of them; `receive_state` says when that is too little.
- A copy of this node may begin behind the last snapshot although the log has gone on: the node joined by a renewal, or an operator deleted the
  stream. So the first message of each copy is looked up when the node becomes primary, and at times.
- A demand goes into the log, so it outlives this primary. A source without a full sync provider leaves it open.
- A receiver is in danger that lacks more than half of what its queue surely keeps. With `on_backlog = "hold"` its queue then takes nothing more, and
  the backlog stays at the source, until no receiver lacks more than a quarter. That is decided before each batch, because a backlog comes fast. A
  receiver that lacks more than the queue surely keeps holds nothing: it waits for a snapshot, which has to come in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from broker_plugin.log.replica import Replica
from broker_plugin.log.streams import Streams, segment_bytes
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.backlog import Backlog
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.names import parse_recv_queue
from lrq_ha.routing.receive_state import ReceiveState

log = logging.getLogger("lrq_ha.sites")

LOOK_S = 0.25
CONFIRM_S = 3.0  # more than a new stream needs (streams.YOUNG_STREAM_S)
HEADS_EVERY_LOOKS = 240
SEGMENTS_TO_SPARE = 2
NAMED_MAX = 5  # queues in the reason of a node


class SnapshotKeeper:
    """Demands full syncs for the receive queues.

    Args:
        replica: This node's log.
        streams: Of its broker.
        keep_snapshot: Whether it demands anything.
        hold: Whether a queue takes nothing more while a receiver is in danger.
    """

    def __init__(self, replica: Replica, streams: Streams, *, keep_snapshot: bool, hold: bool = False) -> None:
        self._replica = replica
        self._streams = streams
        self._keep_snapshot = keep_snapshot
        if hold:
            replica.holds = self._hold
        self._held: dict[str, str] = {}  # why a queue takes nothing more
        self._backlogs: dict[str, Backlog] = {}
        self._dangers: dict[str, dict[str, str]] = {}  # texts, by queue and receiver
        self._written_at: dict[str, float] = {}  # monotonic seconds of the last batch that was written to a queue here
        self._overflows: dict[str, int] = {}  # bytes of snapshots that are too large, by queue

    async def run(self) -> None:
        """Looks until cancelled."""
        looks = 0
        while True:
            for queue, state in self._replica.index.sink.states().items():
                self._consider_size(queue, state)
                self._consider_receivers(queue, state)
            if looks % HEADS_EVERY_LOOKS == 0:
                await self._consider_heads()
            looks += 1
            await asyncio.sleep(LOOK_S)

    def trouble(self) -> str:
        """Text: the snapshots that are too large for their queues, and the receivers in danger; empty if there are none."""
        overflows = self._overflows.items()
        found = "; ".join(f"a snapshot in {queue} takes {size} bytes, and the queue surely keeps {self._kept(queue)}" for queue, size in overflows)
        large = f"{found}: raise receive.bytes_max, and the queue's size by a policy (docs/operations/capacity.md)" if found else ""
        return "; ".join(filter(None, (large, *islice(filter(None, map(_first_of, self._dangers.values())), NAMED_MAX))))

    def tell(self) -> dict[str, Any]:
        """For the status: each receive queue."""
        return {queue: self._tell_queue(queue, state) for queue, state in self._replica.index.sink.states().items()}

    def batch_written(self, queue: str) -> None:
        """An entry is written to a view of this node."""
        self._written_at[queue] = time.monotonic()

    def _age_s(self, queue: str) -> float | None:
        at = self._written_at.get(queue)
        return None if at is None else round(time.monotonic() - at, 1)

    def _kept(self, queue: str) -> int:
        size = self._streams.receive_bytes_max(queue)
        return size - SEGMENTS_TO_SPARE * segment_bytes(size)

    def _tell_queue(self, queue: str, state: ReceiveState) -> dict[str, Any]:
        commits = self._replica.index.commits.of_queue(queue)
        receivers = {commit.receiver: _tell_receiver(commit, state) | self._tell_backlog(queue, commit, state) for commit in commits}
        return _tell(queue, state, self._age_s(queue)) | {"held": self._held.get(queue), "receivers": receivers}

    def _tell_backlog(self, queue: str, commit: pb.Commit, state: ReceiveState) -> dict[str, Any]:
        backlog = self._backlogs.get(queue)
        behind = backlog.bytes_behind(position_of(commit.position), state) if backlog else None
        return {"lag_bytes": behind, "problem": self._dangers.get(queue, {}).get(commit.receiver)}

    def _hold(self, queue: str) -> str:
        """Why a queue takes no batch now; empty: it takes the next one."""
        lacks, kept = self._consider_receivers(queue, self._replica.index.sink.newest(queue)), self._kept(queue)
        limit = kept // 4 if queue in self._held else kept // 2
        late = {name: _describe_danger(name, queue, size, kept) for name, size in lacks.items() if limit < size <= kept}
        if not late:
            self._held.pop(queue, None)
            return ""
        self._held[queue] = f"it takes nothing more: {_first_of(late)}"
        return self._held[queue]

    def _consider_receivers(self, queue: str, state: ReceiveState) -> dict[str, int]:
        """Notes the receivers in danger. Returns the bytes that each receiver lacks."""
        kept = self._kept(queue)
        backlog = self._backlogs.setdefault(queue, Backlog(kept))
        backlog.note(state)
        lacks = {
            commit.receiver: backlog.bytes_behind(position_of(commit.position), state) for commit in self._replica.index.commits.of_queue(queue)
        }
        before = self._dangers.get(queue, {})
        dangers = {name: _describe_danger(name, queue, size, kept) for name, size in lacks.items() if size > kept // 2}
        for name in dangers.keys() - before.keys():
            log.warning("%s", dangers[name])
        self._dangers[queue] = dangers
        return lacks

    def _consider_size(self, queue: str, state: ReceiveState) -> None:
        kept = self._kept(queue)
        if size := state.overflow(kept):
            if queue not in self._overflows:
                log.error("a snapshot in %s takes %d bytes, and the queue surely keeps %d: raise receive.bytes_max", queue, size, kept)
            self._overflows[queue] = size
        else:
            self._overflows.pop(queue, None)
        if state.is_full_sync_due(kept):
            self._demand(queue, "the queue is about to drop the last whole snapshot")

    async def _consider_heads(self) -> None:
        """Demands full syncs for copies that lack the last snapshot, also a moment later: a new stream gets its first message late."""
        lacking = [queue for queue in self._replica.index.sink.states() if await self._lacks_snapshot(queue)]
        if lacking:
            await asyncio.sleep(CONFIRM_S)
        for queue in lacking:
            if await self._lacks_snapshot(queue):
                self._demand(queue, "this node's copy of the queue lacks the last whole snapshot")

    async def _lacks_snapshot(self, queue: str) -> bool:
        try:
            body = await self._streams.read_first(queue)
            head = position_of(pb.ReceivedBatch.FromString(body).transactions[0].position) if body is not None else None
        except (LrqError, DecodeError, IndexError) as error:
            log.warning("the first message of %s cannot be read: %s", queue, error)
            return False
        return self._replica.index.sink.status(queue).lacks_snapshot(head, self._kept(queue))

    def _demand(self, queue: str, reason: str) -> None:
        if self._keep_snapshot and self._replica.active and not self._replica.index.sink.newest(queue).demand:
            log.warning("%s: %s: a full sync is demanded from the source", queue, reason)
            self._replica.demand(queue, reason)


def _describe_danger(receiver: str, queue: str, size: int, kept: int) -> str:
    return f"receiver '{receiver}' lacks {size} bytes of {queue}, which surely keeps {kept}: start it, make it faster, or forget it"


def _first_of(dangers: Mapping[str, str]) -> str:
    """The text of one queue: its first receiver in danger, and how many more there are."""
    more = f" (and {len(dangers) - 1} more receivers)" if len(dangers) > 1 else ""
    return f"{next(iter(dangers.values()))}{more}" if dangers else ""


def _tell(queue: str, state: ReceiveState, age_s: float | None) -> dict[str, Any]:
    parts = parse_recv_queue(queue)
    return {
        "source": parts.remote_id if parts else None,
        "client": parts.client_name if parts else None,
        "log": state.log_id.hex() or None,
        "last": str(state.last),
        "age_s": age_s,
        "snapshot": {
            "request": state.snapshot_request,
            "complete": state.snapshot_complete,
            "begun": str(state.begun) if state.begun != START else None,
            "whole": str(state.whole) if state.whole != START else None,
            "bytes": state.snapshot_bytes,
            "bytes_behind": state.size - state.whole_size if state.whole != START else None,
        },
        "demand": state.demand_reason or None,
    }


def _tell_receiver(commit: pb.Commit, state: ReceiveState) -> dict[str, Any]:
    position = position_of(commit.position)
    lag = state.last.sequence - position.sequence if position.epoch == state.last.epoch else None  # entries of the source's log, of any client
    return {"position": str(position), "phase": commit.phase or None, "lag_entries": lag}
