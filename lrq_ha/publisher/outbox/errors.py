"""Errors of the outbox."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class OutboxError(LrqError):
    """Root of the outbox's errors."""


class NoTransaction(OutboxError):
    """The connection is in autocommit: the entries would be committed apart from the application's data. Nothing was written."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"A write to outbox {table} is not in a transaction",
            todo="Begin a transaction, or turn autocommit off: the data and the outbox are committed together",
        )


class NoOutbox(OutboxError):
    """The tables of the outbox are not complete."""

    def __init__(self, table: str) -> None:
        super().__init__(f"The outbox {table} has no row in {table}_counter or {table}_relay", todo="Call Outbox.create once")


class RelayFenced(OutboxError):
    """Another relay has taken over this outbox, or the outbox was renewed: this relay must end."""

    def __init__(self, table: str) -> None:
        super().__init__(f"Another relay has taken over outbox {table}", todo="Run one relay for each outbox")


class OutboxRestored(OutboxError):
    """The log holds transactions of this outbox that its database does not know.

    Attributes:
        known: The highest number in the log.
        sent: The highest number that may have been sent, as the database has it.
    """

    def __init__(self, table: str, producer: str, known: int, sent: int) -> None:
        super().__init__(
            f"The log has transactions up to {producer}/{known}, but outbox {table} has sent none above {sent}: its database was restored from a"
            " backup, or is a copy, and the numbers that follow would be taken for repeats",
            todo="If this database is the one to go on with, call Outbox.renew, then start the relay; have the sites ask for a full sync",
        )
        self.known, self.sent = known, sent
