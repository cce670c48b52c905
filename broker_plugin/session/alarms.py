"""connection.blocked and connection.unblocked: tell a publishing client that a memory or disk alarm of a broker holds its publishes.

Every publish passes the log's connection to the broker first, then the client's own. The broker may block either connection.

Rules:
- The client hears of either block as RabbitMQ would report it: from its first publish on, and only if it announced the capability.
- The door itself always asks to be notified (`sasl.told_of_alarms`): a broker does not read a blocked connection at all.
"""

from __future__ import annotations

from pamqp import commands

from ..amqp import encode
from .session import ClientSession


class Alarm:
    """The alarms of one client. `understands`: whether the client announced the capability connection.blocked."""

    __slots__ = ("_publishes", "_session", "_told", "_understands", "broker")

    def __init__(self, session: ClientSession, understands: bool) -> None:
        self._session = session
        self._understands = understands
        self._publishes = False
        self._told = False
        self.broker = ""  # why the client's own connection is blocked

    @property
    def reason(self) -> str:
        """Why one of the two connections is blocked; empty if neither is."""
        return self.broker or self._session.door.log_blocked

    def publishes(self) -> None:
        """Takes note that the client publishes."""
        if not self._publishes:
            self._publishes = True
            self.changed()

    def changed(self) -> None:
        """One of the two connections was blocked or unblocked."""
        reason = self.reason
        if reason and self._session.replies:  # the answer to a declaration may not come before the end of the alarm
            self._session.replica.barrier.ease()
        if bool(reason) == self._told or not (self._publishes and self._understands):
            return
        self._told = bool(reason)
        method = commands.Connection.Blocked(reason) if reason else commands.Connection.Unblocked()
        self._session.to_client(encode.method_frame(0, method))
