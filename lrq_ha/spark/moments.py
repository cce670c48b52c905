"""The place of a time in a receive queue. Pure.

The time of a transaction is its publisher's clock. So it is equal on all nodes, and nearly ascending. Where clocks differ, or one steps back,
bisection finds one of the places at which the times reach the wanted one. A transaction without a time counts as one before every time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.options import ALLOWED, Moment
from lrq_ha.streams.message import Message, Stream, find_ends, locate_first


def find_start(stream: Stream, queue: str, moment: Moment) -> int | None:
    """The least source sequence to read from a moment on; None: the queue is empty.

    Raises:
        OptionError: All transactions are before it, and `or_latest` is not set.
    """
    ends = find_ends(stream, queue)
    if ends is None:
        return None
    head, tail = ends
    found = _find_between(stream, queue, head, tail, moment)
    if found is not None:
        return found
    if not moment.or_latest:
        raise OptionError(
            f"Queue {queue} has no transaction from {_text(moment)} on: startingTimestamp {moment.ms} is after its last one",
            todo=f"startingOffsetsByTimestampStrategy: {ALLOWED['startingOffsetsByTimestampStrategy']}",
        )
    return max(head.last, tail.last).sequence + 1


def find_sequence(stream: Stream, queue: str, moment: Moment) -> int | None:
    """The source sequence of the first transaction that is not before a moment; None: there is none."""
    ends = find_ends(stream, queue)
    return None if ends is None else _find_between(stream, queue, *ends, moment)


def _find_between(stream: Stream, queue: str, head: Message, tail: Message, moment: Moment) -> int | None:
    us = moment.ms * 1000
    message = locate_first(stream, queue, head, tail, partial(_is_before, us))
    found = (one.position.sequence for one in message.batch.transactions if one.timestamp_us >= us)
    return next(found, None)


def _is_before(us: int, message: Message) -> bool:
    return all(transaction.timestamp_us < us for transaction in message.batch.transactions)


def _text(moment: Moment) -> str:
    return datetime.fromtimestamp(moment.ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
