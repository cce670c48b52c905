"""Views of the log that are streams: their entries are appended here, each with its position.

Rules: an entry counts as applied when the stream has confirmed it.
"""

from __future__ import annotations

from collections.abc import Callable

from broker_plugin.log.replica import Replica
from broker_plugin.log.streams import Streams
from lrq_ha.replication.applied import format_stamp

from .sessions import Sites
from .snapshot_keeper import SnapshotKeeper


class ViewWriter:
    """Writes the view streams: the applier's Views.

    Args:
        replica: Of this node.
        streams: Of its broker.
        sites: Informed of entries that they may read.
        keeper: Informed of batches in receive queues.

    Attributes:
        on_applied: Called when an entry counts as applied.
    """

    def __init__(self, replica: Replica, streams: Streams, sites: Sites, keeper: SnapshotKeeper) -> None:
        self.on_applied: Callable[[], None] = lambda: None
        self._replica = replica
        self._streams = streams
        self._sites = sites
        self._keeper = keeper

    async def append(self, queue: str, body: bytes, sequence: int, epoch: int) -> None:
        """Appends an entry to a view stream. Returns when it is written to the socket."""
        stamp = format_stamp(epoch, sequence, self._replica.index.generations.newest).decode()
        self._sites.view_written(queue, sequence, len(body))
        self._keeper.batch_written(queue)
        await self._streams.write_view(queue, body, {"x-lrq-pos": stamp}, lambda: self._applied(sequence))

    def _applied(self, sequence: int) -> None:
        self._replica.progress.applied(sequence, sequence)
        self.on_applied()
