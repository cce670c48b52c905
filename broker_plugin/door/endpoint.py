"""What a connection of the door becomes when its login is over: a Relay (a client's), a PeerEnd (another node's), or nothing."""

from __future__ import annotations


class Endpoint:
    """What happens to the two sockets; an end overrides what it cares for."""

    def client_data(self, data: bytes) -> None: ...

    def broker_data(self, data: bytes) -> None: ...

    def client_lost(self) -> None: ...

    def broker_lost(self) -> None: ...

    def client_full(self, full: bool) -> None: ...

    def broker_full(self, full: bool) -> None: ...


class Refused(Endpoint):
    """What a refused client still sends is ignored."""
