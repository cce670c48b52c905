"""A sidecar's own connections to its broker: one for each vhost that it needs, opened at first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from lrq_ha.errors import LrqError
from lrq_ha.routing.names import ROUTING_VHOST

from . import frames
from .address import Address
from .connection import Connection
from .errors import AccessRefused, ConnectionClosed, VhostNotFound

log = logging.getLogger("lrq_ha.vhosts")

BACK_OFF_S = 30.0


async def open_vhost(
    broker: Address,
    vhost: str,
    *,
    frame_max_bytes: int = frames.FRAME_MAX_BYTES,
    on_close: Callable[[ConnectionClosed | None], None] | None = None,
) -> Connection:
    """Connects to a vhost of the broker.

    Raises:
        VhostNotFound: The vhost was deleted. RabbitMQ 4 also says so while its store has not come up: the answer
            counts only if the broker knows the routing queues' vhost, asked between two such answers. (For a vhost
            that is only down, both versions say 541.)
        LrqError: Any other error of `Connection.open`.
    """
    for again in (True, False):
        try:
            return await Connection.open(replace(broker, vhost=vhost), frame_max_bytes=frame_max_bytes, on_close=on_close)
        except VhostNotFound:
            if not again:
                raise
        try:
            known = await Connection.open(replace(broker, vhost=ROUTING_VHOST))
        except VhostNotFound as error:
            raise LrqError(f"the broker says that it has no vhost '{vhost}', and no '{ROUTING_VHOST}' either", retriable=True) from error
        await known.close()
    raise AssertionError("not reached")


class VhostConnections:
    """The connections to the vhosts of a broker.

    Args:
        broker: The own broker; its vhost is replaced.
    """

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._connections: dict[str, Connection] = {}
        self._not_before: dict[str, float] = {}  # vhosts that could not be entered

    async def connection(self, vhost: str, *, anew: bool = False) -> Connection:
        """The connection to a vhost. A lost one is opened again if asked for; else its user gets its error.

        Raises:
            LrqError: The connection cannot be opened.
        """
        known = self._connections.get(vhost)
        if known is None or (anew and known.error is not None):
            known = self._connections[vhost] = await open_vhost(self._broker, vhost)
        return known

    def is_closed_to_us(self, vhost: str) -> bool:
        """Whether the vhost could not be entered a while ago."""
        return time.monotonic() < self._not_before.get(vhost, 0.0)

    def keep_out(self, vhost: str, error: VhostNotFound | AccessRefused, what: str) -> None:
        """Leaves a vhost that cannot be entered alone for a while. `what` cannot be done there; that is logged once."""
        if vhost not in self._not_before:
            log.warning("%s in vhost '%s': %s", what, vhost, error)
        self._not_before[vhost] = time.monotonic() + BACK_OFF_S

    async def close(self) -> None:
        """Closes the connections in order."""
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()

    def abort(self) -> None:
        """Aborts the connections at once."""
        for connection in self._connections.values():
            connection.abort()
