"""Plans batch reads on the driver: the queues, and the ranges of what they hold now.

Rules: planning reads a handful of messages, never a queue; a node that is lost is not an error, and planning begins again on the next one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence

from lrq_ha.direct_http import NOT_HTTP, http_open
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.moments import find_sequence, find_start
from lrq_ha.spark.options import ALLOWED, EARLIEST, LATEST, Bound, Bounds, Moment, ReadOptions, matching
from lrq_ha.spark.ranges import Range, extent, split
from lrq_ha.spark.reading import CONNECTION_NAME, RECONNECT_TIMEOUT_S, Patience
from lrq_ha.streams.errors import ConnectionLost, MissingQueue, NoNode, StreamSilent
from lrq_ha.streams.node_connection import CONNECT_TIMEOUT_S, NodeConnection

HTTP_TIMEOUT_S = 5.0


def plan(options: ReadOptions) -> list[Range]:
    """The ranges for `options`, as the queues stand now.

    Raises:
        NoNode, MissingQueue, DataLoss, OptionError: The range asked for cannot be read.
    """
    queues = options.subscribe or discover_queues(options)
    patience, timeout_s = Patience(), CONNECT_TIMEOUT_S
    while True:
        try:
            with NodeConnection.open(options.access.reader_parameters(), CONNECTION_NAME, timeout_s) as node:
                return _plan(node, queues, options)
        except (ConnectionLost, StreamSilent) as error:
            patience.bear(error, "planning again")
            timeout_s = RECONNECT_TIMEOUT_S
        except MissingQueue as error:
            # A queue that a sidecar lists is in the log; its stream is made when that entry is safe and applied.
            patience.bear(error, "waiting for the queue", missing=not options.subscribe)


def _plan(node: NodeConnection, queues: Sequence[str], options: ReadOptions) -> list[Range]:
    for queue in queues:
        node.count(queue)  # a missing queue is reported before anything is read
    extents = [
        extent(
            node,
            queue,
            _starting_sequence(node, options.starting, queue),
            _ending_sequence(node, options.ending, queue),
            strict=options.fail_on_data_loss,
        )
        for queue in queues
    ]
    return split(node, [one for one in extents if one is not None], options.min_partitions, options.max_entries_per_partition)


def bound_of(bounds: Bounds, queue: str, option: str) -> Bound:
    """The bound for a queue. Raises OptionError if `bounds` does not name the queue."""
    if isinstance(bounds, int | Moment):
        return bounds
    if queue not in bounds:
        raise OptionError(f"{option} does not name queue {queue}", todo="Name every queue that is read")
    return bounds[queue]


def _starting_sequence(node: NodeConnection, bounds: Bounds, queue: str) -> int | None:
    if isinstance(bounds, Moment):
        return find_start(node, queue, bounds)
    return _sequence(bounds, queue, "startingOffsets", EARLIEST)


def _ending_sequence(node: NodeConnection, bounds: Bounds, queue: str) -> int | None:
    if isinstance(bounds, Moment):
        return find_sequence(node, queue, bounds)
    return _sequence(bounds, queue, "endingOffsets", LATEST)


def _sequence(bounds: Bounds, queue: str, option: str, unbounded: int) -> int | None:
    """The sequence in a bound of a batch read; None if there is no bound."""
    bound = bound_of(bounds, queue, option)
    if not isinstance(bound, int) or (bound < 0 and bound != unbounded):
        raise OptionError(f"{option} of a batch read is {bounds!r}: latest and positions are for streaming", todo=f"Allowed: {ALLOWED[option]}")
    return None if bound == unbounded else bound


def discover_queues(options: ReadOptions) -> tuple[str, ...]:
    """The queues that match `subscribePattern`, from the first sidecar that answers. Raises NoNode."""
    answers: dict[str, str] = {}
    for address in options.http:
        try:
            with http_open(f"{address.rstrip('/')}/queues", timeout=HTTP_TIMEOUT_S) as response:
                names = json.load(response)
        except (OSError, ValueError) as error:
            answers[address] = str(error)
            continue
        except http.client.HTTPException:
            answers[address] = NOT_HTTP
            continue
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return matching(options.pattern or "", names)
        answers[address] = "the answer is no JSON list of names"
    raise NoNode(answers, retriable=True)
