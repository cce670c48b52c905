"""Errors of the pipeline. Rule: nothing of a batch is visible when one of these was raised, except after DeltaFailed."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class BadVersion(LrqError):
    """A version's file cannot be used."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} cannot be used: {why}", todo="Restore it from a backup, or begin with an empty path")


class NoVersion(LrqError):
    """A version is not there (yet, or any more)."""


class PathTaken(LrqError):
    """Another job writes to this path."""


class DeltaFailed(LrqError):
    """A Delta table cannot follow a version that was made."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="The version is there as a whole: start the job again, which completes its Delta tables")


class SnapshotGone(LrqError):
    """A queue does not hold the full snapshot from which a table would be rebuilt."""

    def __init__(self, what: str, resync: str) -> None:
        super().__init__(what, todo=f"Demand another one with `{resync}`, and run the job: it replaces all tables of the queue")


class QueueBehind(LrqError):
    """A queue holds less than what was applied: the node that was read is behind."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="Try again when the sink has caught up: lrq-ha list", retriable=True)


class BadRecord(LrqError):
    """A payload or a row in it cannot be applied."""


class SchemaChanged(LrqError):
    """A table's definition does not go with the tables on disk."""
