"""The part of the node's configuration that the door gets (`lrq_ha.sidecar.config` makes it)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lrq_ha.interceptors import plugins

from ..amqp.address import Address
from ..amqp.sasl import Credentials
from ..amqp.tls import TlsFiles


class DoorLimits(Protocol):
    """The table `[door]` of the configuration, where each key is described."""

    @property
    def listen(self) -> str: ...
    @property
    def loopback_users(self) -> list[str]: ...
    @property
    def when_backup(self) -> str: ...
    @property
    def proxy_protocol(self) -> list[str]: ...
    @property
    def connections_max(self) -> int: ...
    @property
    def channels_max(self) -> int: ...
    @property
    def login_bytes_max(self) -> int: ...
    @property
    def frame_max_bytes(self) -> int: ...
    @property
    def header_bytes_max(self) -> int: ...
    @property
    def header_depth_max(self) -> int: ...
    @property
    def message_bytes_max(self) -> int: ...
    @property
    def unfinished_bytes_max(self) -> int: ...
    @property
    def transaction_bytes_max(self) -> int: ...
    @property
    def transaction_methods_max(self) -> int: ...
    @property
    def questions_max(self) -> int: ...
    @property
    def producers_max(self) -> int: ...
    @property
    def id_bytes_max(self) -> int: ...
    @property
    def buffered_bytes_max(self) -> int: ...
    @property
    def connection_buffer_bytes_max(self) -> int: ...
    @property
    def client_buffer_bytes_max(self) -> int: ...
    @property
    def client_buffers_bytes_max(self) -> int: ...
    @property
    def handshake_timeout_s(self) -> float: ...
    @property
    def hold_up_timeout_s(self) -> float: ...
    @property
    def drain_timeout_s(self) -> float: ...
    @property
    def stop_timeout_s(self) -> float: ...


@dataclass(frozen=True)
class DoorSettings:
    """The door's part of the configuration.

    Attributes:
        limits: The table `[door]`.
        group: This node's group.
        sites: Groups that this one sends log entries to.
        neighbours: Number of other nodes and sites that connect.
        own: The sidecar's credentials, which other nodes and sites present.
        users: Users by the common name of a client's certificate.
        broker: The own broker.
        log_quarter_bytes: A quarter of the log.
        completes_locally: Whether publishes to a queue, by its name, are confirmed when the own stream has them.
        server_tls: TLS of the door; None for plain connections.
        client_tls: TLS of connections that the sidecar makes; None if there are none.
        interceptors: Interceptors by name.
    """

    limits: DoorLimits
    group: str
    sites: frozenset[str]
    neighbours: int
    own: Credentials
    users: Mapping[str, Credentials]
    broker: Address
    log_quarter_bytes: int
    completes_locally: Callable[[str], bool]
    server_tls: TlsFiles | None
    client_tls: TlsFiles | None
    interceptors: Mapping[str, plugins.Settings]
