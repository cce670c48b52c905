"""Errors of the Spark source and sink. Rule: nothing is skipped, cut short, read or written in part without one of these (or `failOnDataLoss` =
false)."""

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


class RowError(LrqError):
    """A row, or a partition as a whole, that cannot be written."""


class WriteError(LrqError):
    """A partition was not written to its end: a piece of it was refused, or no node took it. What was written stays, and is known as written."""


class LowerVersion(LrqError):
    """A write has a lower version than one that the log has already. Nothing was written."""
