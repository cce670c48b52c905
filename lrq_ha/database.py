"""The connections to an application's SQL database."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lrq_ha.errors import MalformedInput

#: A connection or cursor of a DB-API 2 module.
Connection = Any
Cursor = Any

_PLACEHOLDERS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class Database:
    """One connection of a database for each thread.

    Args:
        connect: Opens a connection. The first call of each thread is made in that thread.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._local = threading.local()

    def connection(self) -> Connection:
        """This thread's connection."""
        if getattr(self._local, "connection", None) is None:
            self._local.connection = self._connect()
        return self._local.connection

    @contextmanager
    def transaction(self) -> Iterator[Cursor]:
        """A cursor, whose work is committed at the end of the block. An error rolls back, and closes the connection."""
        try:
            connection = self.connection()
            yield connection.cursor()
            connection.commit()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Rolls back, and closes this thread's connection: the next call opens another one."""
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            try:
                connection.rollback()
                connection.close()
            except Exception:  # the connection is lost, and with it all that was not committed
                pass

    def placeholder(self) -> str:
        """The mark of a parameter in this database's statements. Raises MalformedInput for a paramstyle that is not supported."""
        module = sys.modules[type(self.connection()).__module__.partition(".")[0]]
        style = getattr(module, "paramstyle", "qmark")
        if style not in _PLACEHOLDERS:
            raise MalformedInput(f"{module.__name__} has paramstyle {style!r}", todo=f"Use a module with one of {', '.join(_PLACEHOLDERS)}")
        return _PLACEHOLDERS[style]
