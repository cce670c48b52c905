"""The outcome of a login: a ClientConnection, a PeerConnection (another node's), or a refused connection."""

from __future__ import annotations


class Endpoint:
    """The handlers of the two sockets' events; a subclass overrides those that it needs."""

    def client_data(self, data: bytes) -> None: ...

    def broker_data(self, data: bytes) -> None: ...

    def client_lost(self) -> None: ...

    def broker_lost(self) -> None: ...

    def client_full(self, full: bool) -> None: ...

    def broker_full(self, full: bool) -> None: ...


class Refused(Endpoint):
    """A refused client, whose later frames are ignored."""
