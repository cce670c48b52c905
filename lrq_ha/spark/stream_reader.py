"""The reader for Structured Streaming: the offsets of micro-batches on the driver, and their ranges in the workers.

Rules:

- The constructor does no I/O: Spark makes a reader on the driver, and pickles a second one for the workers.
- A call on the driver outlives a failover, a switchover and a restart, as long as a node takes readers again within `RECONNECT_TIMEOUT_S`.
- `latestOffset` never waits for a message: an empty queue has nothing to read.
- A message is never split: a limit of rows is exact but for a message that alone has more.

Source: Spark's `DataSourceStreamReader` and `MicroBatchExecution`; the names of the options are those of Spark's Kafka source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.offsets import extent_between, format_offset, parse_offset, resolve_start
from lrq_ha.spark.options import EARLIEST, LATEST, Moment, ReadOptions
from lrq_ha.spark.planning import bound_of, discover_queues
from lrq_ha.spark.ranges import Extent, count_rows, split
from lrq_ha.spark.reading import CONNECTION_NAME, RECONNECT_TIMEOUT_S, Patience, read_batches, read_from
from lrq_ha.streams.errors import ConnectionLost, MissingQueue, NoNode, StreamSilent
from lrq_ha.streams.message import Hint
from lrq_ha.streams.node_connection import NodeConnection

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LrqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Receive queues as a stream of entries.

    Args:
        options: The options.
        refused: Why the source cannot be read; raised by the first call, because Spark hides an error of a constructor.
    """

    def __init__(self, options: ReadOptions, refused: LrqError | None = None) -> None:
        self._options = options
        self._refused = refused
        if options.ending != LATEST:
            name = "endingTimestamp" if isinstance(options.ending, Moment) else "endingOffsets"
            self._refused = OptionError(f"A streaming read has no end: {name} is for batch reads", todo=f"Leave out {name}")
        self._node: NodeConnection | None = None
        self._found: tuple[str, ...] = options.subscribe
        self._discover_at = 0.0
        self._target: dict[str, Position] | None = None  # of Trigger.AvailableNow
        self._newest: dict[str, Position] = {}  # the last looks at the queues
        self._places: dict[str, tuple[str, Hint]] = {}  # the node on which a queue was planned last, and the message in which that ended

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """The empty offset: batch 0 fixes the positions at which queues begin."""
        if self._refused is not None:
            raise self._refused
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit by option maxEntriesPerTrigger, in rows."""
        limit = self._options.max_entries
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of the query: the last message that each queue has now.

        Raises:
            NoNode, MissingQueue: The queues cannot be read.
        """
        queues = self._queues({})
        self._target = self._with_node("taking the end of the queues", lambda node: {queue: _end(node, queue) for queue in queues})

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        """The end of the next micro-batch.

        Args:
            start: The end of the one before; {} at the beginning.
            limit: ReadMaxRows or ReadAllAvailable.

        Raises:
            NoNode, MissingQueue, DataLoss, OptionError, OffsetError: The queues cannot be read.
        """
        if self._refused is not None:
            raise self._refused
        given = parse_offset(start)
        queues = self._queues(given)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return format_offset(self._with_node("looking for new entries", lambda node: self._advance(node, queues, given, rows_max), given))

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """The last position of each queue at the last look, for the query's progress."""
        return format_offset(self._newest) or None

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[InputPartition]:
        """One InputPartition per Range between two offsets.

        Raises:
            NoNode, MissingQueue, DataLoss, OffsetError: The range cannot be read.
        """
        after, through = parse_offset(start), parse_offset(end)
        wanted = [queue for queue in through if queue in after and after[queue] != through[queue]]
        if not wanted:
            return []
        return self._with_node("planning again", lambda node: self._plan(node, wanted, after, through), after)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Raises as `reading.read_range` does."""
        if partition.value is not None:
            yield from read_batches(partition.value, self._options)

    def stop(self) -> None:
        """Closes the driver's connection."""
        self._drop_node()

    def _queues(self, given: Mapping[str, Position]) -> list[str]:
        """The queues to look at: those in the offset, and those found."""
        if self._options.pattern is not None and time.monotonic() >= self._discover_at:
            try:
                self._found = discover_queues(self._options)
            except NoNode as error:
                if not given:
                    raise
                _log.warning("%s; reading the queues that are known", error)
            self._discover_at = time.monotonic() + self._options.discovery_interval_s
        return sorted({*given, *self._found})

    def _advance(
        self, node: NodeConnection, queues: Sequence[str], given: Mapping[str, Position], rows_max: int | None
    ) -> dict[str, Position]:
        offset, behind = dict(given), {}
        for queue in queues:
            if queue not in given:
                offset[queue] = self._begin(node, queue, first=not given)
            else:
                end = self._end(node, queue, given[queue])
                if end > given[queue]:
                    behind[queue] = end
        return offset | (behind if rows_max is None else self._admit(node, given, behind, rows_max))

    def _begin(self, node: NodeConnection, queue: str, *, first: bool) -> Position:
        """The position before the first transaction to read. A queue that appears while the query runs is read from its beginning."""
        bound = bound_of(self._options.starting, queue, "startingOffsets") if first else EARLIEST
        node.count(queue)  # a missing queue is reported
        return resolve_start(node, queue, bound, strict=self._options.fail_on_data_loss)

    def _end(self, node: NodeConnection, queue: str, after: Position) -> Position:
        if self._target is not None:
            return max(after, self._target.get(queue, after))
        end = self._newest[queue] = max(after, _end(node, queue))
        return end

    def _admit(
        self, node: NodeConnection, given: Mapping[str, Position], behind: Mapping[str, Position], rows_max: int
    ) -> dict[str, Position]:
        """The ends of the queues for `rows_max` rows: equal shares, and a queue that needs less leaves the rest to longer ones."""
        extents = [self._extent(node, queue, given[queue], end) for queue, end in behind.items()]
        admitted: dict[str, Position] = {}
        rows_left = rows_max
        for number, one in enumerate(sorted(extents, key=lambda one: one.messages)):
            queues_left = len(extents) - number
            end, rows = self._count(node, one, rows_left // queues_left, at_least_one=queues_left == 1 and not admitted)
            if rows:
                admitted[one.whole.queue] = end
            rows_left -= rows
        return admitted

    def _count(self, node: NodeConnection, one: Extent, rows_max: int, *, at_least_one: bool) -> tuple[Position, int]:
        """The last position of the messages with `rows_max` rows in all, and their rows."""
        end, rows = one.whole.after, 0
        with closing(read_from(node, one.whole, self._options)) as steps:
            for _, taken, rest in steps:
                more = count_rows(taken.transactions)
                if rows + more > rows_max and not (at_least_one and not rows):
                    break
                rows += more
                end = one.whole.through if rest is None else rest.after
                if rest is None:
                    break
        return end, rows

    def _extent(self, node: NodeConnection, queue: str, after: Position, through: Position) -> Extent:
        address, place = self._places.get(queue, ("", None))
        strict = self._options.fail_on_data_loss
        return extent_between(node, queue, after, through, place if address == node.address else None, strict=strict)

    def _plan(
        self, node: NodeConnection, queues: Sequence[str], after: Mapping[str, Position], through: Mapping[str, Position]
    ) -> list[InputPartition]:
        extents = [self._extent(node, queue, after[queue], through[queue]) for queue in queues]
        for one in extents:
            if one.end.last == one.whole.through:
                self._places[one.whole.queue] = node.address, one.end
        return [InputPartition(part) for part in split(node, extents, self._options.min_partitions, self._options.max_entries_per_partition)]

    def _with_node(self, then: str, call: Callable[[NodeConnection], T], given: Mapping[str, Position] | None = None) -> T:
        """The result of `call` with a node that takes readers.

        Args:
            then: The purpose, for the log.
            call: Gets the connection, which stays open for the next call.
            given: The offset: a queue in it was there, so it is waited for.
        """
        patience = Patience()
        while True:
            try:
                if self._node is None:
                    self._node = NodeConnection.open(self._options.access.reader_parameters(), CONNECTION_NAME, RECONNECT_TIMEOUT_S, empty_wait_s=0)
                return call(self._node)
            except (ConnectionLost, StreamSilent, MissingQueue) as error:
                self._drop_node()
                patience.bear(error, then, missing=bool(given))

    def _drop_node(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None


def _end(node: NodeConnection, queue: str) -> Position:
    """The last position of a queue; START if it is empty. Raises MissingQueue."""
    tail = node.tail(queue)
    return START if tail is None else tail.last
