"""connection.blocked and unblocked: a client that publishes is told when a broker's memory or disk alarm keeps its publishes waiting.

Rule: there are two connections on which a broker may take no publishes, the client's own and that of the log, which every publish passes first.
The client hears of the one or the other as RabbitMQ would tell it: from its first publish on, and only if it said that it understands. The door
itself is told in any case (`sasl.told_of_alarms`): a connection on which the broker takes no publishes is not read at all.
"""

from __future__ import annotations

from pamqp import commands

from ..amqp import encode
from .session import ClientSession


class Alarm:
    """What one client knows of alarms. `understands`: whether it announced the capability connection.blocked."""

    __slots__ = ("_publishes", "_session", "_told", "_understands", "broker")

    def __init__(self, session: ClientSession, understands: bool) -> None:
        self._session = session
        self._understands = understands
        self._publishes = False
        self._told = False
        self.broker = ""  # why the client's own connection is blocked

    @property
    def reason(self) -> str:
        """Why one of the two is blocked; empty if none is."""
        return self.broker or self._session.door.log_blocked

    def publishes(self) -> None:
        """The client publishes."""
        if not self._publishes:
            self._publishes = True
            self.changed()

    def changed(self) -> None:
        """One of the two connections was blocked or unblocked."""
        reason = self.reason
        if reason and self._session.replies:  # whose answer may not come before the end of the alarm
            self._session.replica.barrier.ease()
        if bool(reason) == self._told or not (self._publishes and self._understands):
            return
        self._told = bool(reason)
        method = commands.Connection.Blocked(reason) if reason else commands.Connection.Unblocked()
        self._session.to_client(encode.method_frame(0, method))
