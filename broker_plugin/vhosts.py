"""A sidecar's own connections to its broker, one for each vhost in which there is something to do, opened when it is first needed."""

from __future__ import annotations

from dataclasses import replace

from .client import Connection
from .client_errors import Address


class Vhosts:
    """See above.

    Args:
        broker: The own broker; the vhost in it is replaced.
    """

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._connections: dict[str, Connection] = {}

    async def connection(self, vhost: str, *, anew: bool = False) -> Connection:
        """The connection to a vhost. `anew`: one that is lost is opened again; else whoever uses it hears that it is lost.

        Raises:
            LrqError: It cannot be opened.
        """
        known = self._connections.get(vhost)
        if known is None or (anew and known.error is not None):
            known = self._connections[vhost] = await Connection.open(replace(self._broker, vhost=vhost))
        return known

    async def close(self) -> None:
        """Ends them in order."""
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()

    def abort(self) -> None:
        """Ends them at once."""
        for connection in self._connections.values():
            connection.abort()
