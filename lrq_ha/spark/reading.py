"""Reads ranges, from each node that takes readers in turn.

Rules:

- A lost connection, or a node that stands still, is not an error: the reader goes on at the next node that takes it, behind the last position
  that it gave.
- A broker that starts does not know its streams for a moment. So after a lost connection a missing queue counts as one, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from lrq_ha.spark.columns import Rows, arrow_schema
from lrq_ha.spark.options import ReadOptions
from lrq_ha.spark.ranges import Range, Selection, Taken, begin
from lrq_ha.streams.errors import ConnectionLost, MissingQueue, StreamSilent
from lrq_ha.streams.message import Hint, Message
from lrq_ha.streams.node_connection import NodeConnection

RECONNECT_TIMEOUT_S = 60.0  # a failover must be over by then
RECONNECT_PAUSE_S = 0.5
CONNECTION_NAME = "lrq-ha spark reader"

_log = logging.getLogger(__name__)


class Patience:
    """Limits the retries on lost nodes without progress."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def bear(self, error: ConnectionLost | StreamSilent | MissingQueue, then: str, *, missing: bool = False) -> None:
        """Returns after a pause.

        Args:
            error: A lost node, or a queue that is missing there.
            then: The next step, for the log.
            missing: Whether a missing queue is borne without a node that was lost before.

        Raises:
            LrqError: `error`, if no progress was made for too long, or nothing explains a missing queue.
        """
        if isinstance(error, MissingQueue) and not missing and self._deadline is None:
            raise error
        now = time.monotonic()
        self._deadline = self._deadline or now + RECONNECT_TIMEOUT_S
        if now >= self._deadline:
            raise error
        _log.warning("%s; %s", error, then)
        time.sleep(RECONNECT_PAUSE_S)


def read_range(part: Range, options: ReadOptions) -> Iterator[tuple[Message, Taken]]:
    """The messages of a range with its own transactions.

    Raises:
        DataLoss: A part of the range is gone from the queue and `failOnDataLoss` is true.
        NoNode, StreamSilent, MissingQueue: The range could not be read to its end.
    """
    patience = Patience()
    while True:
        try:
            with (
                NodeConnection.open(options.access.reader_parameters(), CONNECTION_NAME, RECONNECT_TIMEOUT_S) as node,
                closing(read_from(node, part, options)) as steps,
            ):
                for message, taken, rest in steps:
                    if rest is not None and rest.after > part.after:  # else it is also the position at which the last node stopped
                        patience = Patience()
                    yield message, taken
                    if rest is None:
                        return
                    part = rest
        except (ConnectionLost, StreamSilent, MissingQueue) as error:
            patience.bear(error, f"going on behind {part.after} of {part.queue}")


def read_from(node: NodeConnection, part: Range, options: ReadOptions) -> Generator[tuple[Message, Taken, Range | None], None, None]:
    """As `read_range`, from one node; with each message the rest of the range, None at its end."""
    start, same_stream = begin(node, part)
    if start is None:
        raise StreamSilent(part.queue, 0, f"{part.through}: it is empty on {node.address}")
    selection = Selection(part, node, strict=options.fail_on_data_loss)
    with closing(node.read(part.queue, start.offset)) as messages:
        for message in messages:
            taken = selection.take(message, same_stream=same_stream)
            for hole in selection.holes:
                _log.warning("%s; failOnDataLoss is false", hole)
            selection.holes.clear()
            if selection.done(message.offset, same_stream=same_stream):
                yield message, taken, None
                return
            yield message, taken, replace(part, after=selection.greatest, start=Hint(message.offset, message.last))


def read_batches(part: Range, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The rows of a range. Raises as `read_range` does."""
    rows = Rows(part.queue, arrow_schema(options))
    for message, taken in read_range(part, options):
        if taken.transactions:
            yield from rows.add(message.batch, taken)
    yield from rows.flush()
