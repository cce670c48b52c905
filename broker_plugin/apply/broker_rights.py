"""Checks in each vhost of the log whether the sidecar's user may do at its own broker all that applying the log
needs.

A check declares a queue, publishes to it in another user's name, gets the message and deletes the queue, so the
broker itself judges. Rights may change at any time, so a vhost is checked when the applier first goes there, when an
incarnation begins, and periodically.

Rules:
- A connection keeps the tags that its user had when it was opened, as the applier's connections do. A connection over
  which something was refused is not used again.
- A broker that does not answer, or is lost, says nothing about rights.
- A vhost that this node has written to, and that was deleted, is no question of rights: the log's entries for it are
  passed over (`Applier`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from shlex import quote

from lrq_ha.errors import LrqError

from ..amqp import content_header
from ..amqp.address import Address
from ..amqp.connection import Connection
from ..amqp.errors import AccessRefused, ChannelClosed, ConnectionLimit, VhostNotFound, grant, impersonate
from ..amqp.reply_codes import ACCESS_REFUSED, PRECONDITION_FAILED
from ..amqp.vhosts import open_vhost
from ..log.replica import Replica

log = logging.getLogger("lrq_ha.applier")

AGAIN_S = 30.0
REFUSED_AGAIN_S = 2.0
BETWEEN_S = 0.1  # a log may have a thousand vhosts
TRY_TIMEOUT_S = 10.0
SOMEBODY_ELSE = b"lrq-somebody-else"
QUEUE_PREFIX = "lrq-rights."


class BrokerRights:
    """Checks the user's rights, again and again.

    Args:
        replica: Its log names the vhosts; missing rights are noted in its `shortfall`.
        broker: The own broker; its vhost is replaced.
        on_change: Called when a right is missing, or no longer.

    Attributes:
        provide: Asked to make a vhost that this broker never had; tells whether it has.
    """

    def __init__(self, replica: Replica, broker: Address, on_change: Callable[[], None] = lambda: None) -> None:
        self._replica = replica
        self._broker = broker
        self.provide: Callable[[str], Awaitable[bool]] = _provide_nothing
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._connections: dict[str, Connection] = {}
        self._since: dict[str, str] = {}  # refused vhosts, and the time of day when that was found

    async def run(self) -> None:
        """Checks every vhost of the log, again and again, until cancelled."""
        try:
            while True:
                for vhost in self._vhosts():
                    await self.look(vhost)
                    await asyncio.sleep(BETWEEN_S)
                await asyncio.sleep(REFUSED_AGAIN_S if self._since else AGAIN_S)
        finally:
            for connection in self._connections.values():
                connection.abort()

    def _vhosts(self) -> list[str]:
        declared = {vhost for vhost, _ in self._replica.declared.definitions.queues()}
        return sorted(declared | self._since.keys())

    async def look(self, vhost: str) -> bool:
        """Whether the sidecar's user may do in the vhost all that applying needs. Notes missing rights. True also while unknown."""
        try:
            async with self._lock, asyncio.timeout(TRY_TIMEOUT_S):
                missing = await self._try_out(vhost)
        except (TimeoutError, LrqError) as error:
            log.debug("what the sidecar's user may do in vhost '%s' is not known now: %s", vhost, error)
            return vhost not in self._since
        self._note(vhost, missing)
        return not missing

    def _note(self, vhost: str, missing: str) -> None:
        text = ""
        if missing:
            since = self._since.setdefault(vhost, time.strftime("%H:%M:%S"))
            text = f"cannot write its queues since {since}: {missing}"
        elif self._since.pop(vhost, None) is not None:
            log.info("the sidecar's user may write to the queues in vhost '%s' again", vhost)
        if self._replica.shortfall.hold(("rights", vhost), text):
            if text:
                log.error("%s", text)
            self._on_change()

    async def _try_out(self, vhost: str) -> str:
        """The missing right and the command that mends it; empty if none is missing. Raises LrqError if that cannot be found out."""
        found, connection = await try_rights(self._broker, vhost, self._connections.pop(vhost, None))
        if connection is not None:
            self._connections[vhost] = connection
        if found is None or (found.no_vhost and vhost in self._replica.entered):
            return ""
        if found.no_vhost and await self.provide(vhost):
            return await self._try_out(vhost)
        return f"{found.what}: {found.command}"


@dataclass(frozen=True)
class MissingRight:
    """A right that the sidecar's user lacks at a broker.

    Attributes:
        what: The right, one sentence.
        command: The command that gives it.
        no_vhost: The vhost itself does not exist.
    """

    what: str
    command: str
    no_vhost: bool = False


def lack_vhost(vhost: str, user: str) -> MissingRight:
    """A vhost does not exist."""
    return MissingRight(f"its broker has no vhost '{vhost}'", f"rabbitmqctl add_vhost {quote(vhost)} && {grant(vhost, user)}", no_vhost=True)


async def try_rights(broker: Address, vhost: str, connection: Connection | None = None) -> tuple[MissingRight | None, Connection | None]:
    """Tries out whether a user may do in a vhost all that applying the log needs.

    Args:
        broker: The broker and the user; its vhost is replaced.
        vhost: The vhost.
        connection: One of an earlier try, which is used again, or ended.

    Returns:
        The first right that is missing, None if none is; and a connection for the next try, if nothing was refused over it.

    Raises:
        LrqError: It cannot be found out.
    """
    user, name = broker.user, f"{QUEUE_PREFIX}{uuid.uuid4().hex[:12]}"
    todo = grant(vhost, user)
    try:
        if connection is None or connection.error is not None:
            connection = await open_vhost(broker, vhost)
    except VhostNotFound:
        return lack_vhost(vhost, user), None
    except ConnectionLimit:
        raise
    except AccessRefused:
        return MissingRight(f"user '{user}' has no permissions in vhost '{vhost}' of its broker", todo), None
    try:
        await _use_a_queue(connection, name)
    except ChannelClosed as error:
        connection.abort()
        if error.code == ACCESS_REFUSED:
            return MissingRight(f"user '{user}' lacks permissions in vhost '{vhost}' of its broker", todo), None
        if error.code == PRECONDITION_FAILED and "user_id" in error.text:
            return MissingRight(f"user '{user}' of its broker may not publish for other users", impersonate(user)), None
        raise
    except BaseException:
        connection.abort()
        raise
    return None, connection


async def _provide_nothing(_vhost: str) -> bool:
    return False


async def _use_a_queue(connection: Connection, name: str) -> None:
    """Declares a queue that ends with the connection, publishes to it in another user's name, and gets from it."""
    channel = await connection.channel()
    await channel.confirm_select()
    await channel.queue_declare(name, durable=False, exclusive=True)
    properties = content_header.properties(b"", persistent=False, user_id=SOMEBODY_ELSE)
    channel.publish_content("", name, content_header.header_payload(0, properties), b"")
    await channel.confirmed()
    await channel.consume(name, lambda *_: None, no_ack=True)
    await channel.queue_delete(name)
    await channel.close()
