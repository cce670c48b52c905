"""Errors of the Spark source. Rule: nothing is skipped, cut short or read in part without one of these (or `failOnDataLoss` = false)."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class OptionError(LrqError, ValueError):
    """An option is unknown, missing, or has a value that is not allowed. Nothing was read."""


class OffsetError(LrqError):
    """The offsets in a query's checkpoint do not fit the queue. Nothing was read."""


class DataLoss(LrqError):
    """Transactions that belong to the range are no longer in the queue."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            todo='Raise the retention of the queue, or read with startingOffsets = "earliest" what is left, '
            "or set failOnDataLoss = false to go on with a hole",
        )
