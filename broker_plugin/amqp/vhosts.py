"""A sidecar's own connections to its broker, one for each vhost in which there is something to do, opened when it is first needed."""

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
        VhostNotFound: It was deleted. RabbitMQ 4 also says so while its store has not come up: it is believed only where it knows the routing
            queues' vhost, asked between two such answers. (Of a vhost that is only down, both versions say so: 541.)
        LrqError: Anything else that `Connection.open` raises.
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
    """See above.

    Args:
        broker: The own broker; the vhost in it is replaced.
    """

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._connections: dict[str, Connection] = {}
        self._not_before: dict[str, float] = {}  # vhosts that could not be entered

    async def connection(self, vhost: str, *, anew: bool = False) -> Connection:
        """The connection to a vhost. `anew`: one that is lost is opened again; else whoever uses it hears that it is lost.

        Raises:
            LrqError: It cannot be opened.
        """
        known = self._connections.get(vhost)
        if known is None or (anew and known.error is not None):
            known = self._connections[vhost] = await open_vhost(self._broker, vhost)
        return known

    def is_closed_to_us(self, vhost: str) -> bool:
        """Whether it could not be entered a while ago."""
        return time.monotonic() < self._not_before.get(vhost, 0.0)

    def keep_out(self, vhost: str, error: VhostNotFound | AccessRefused, what: str) -> None:
        """It cannot be entered, and is left alone for a while. `what` cannot be done there; that is said once."""
        if vhost not in self._not_before:
            log.warning("%s in vhost '%s': %s", what, vhost, error)
        self._not_before[vhost] = time.monotonic() + BACK_OFF_S

    async def close(self) -> None:
        """Ends them in order."""
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()

    def abort(self) -> None:
        """Ends them at once."""
        for connection in self._connections.values():
            connection.abort()
