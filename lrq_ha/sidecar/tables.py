"""The tables of the configuration file: each key with its type, default, limits and description."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from broker_plugin.amqp import content_assembly, content_header, frames
from broker_plugin.amqp.tls import Verify, Version
from broker_plugin.definitions.objects import REPLICATED
from lrq_ha import urls
from lrq_ha.replication.levels import ALLOWED, BadLevel, Level, Levels
from lrq_ha.routing.names import NAME_RULE, is_name


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError('must be "HOST:PORT", for example "127.0.0.1:5672"')
    return value


def _listen_if_any(value: str) -> str:
    return _listen(value) if value else ""


def _split(value: str) -> SplitResult:
    """The parts of a URL with a host and a port; else none: the fault is not told, as it may hold a part of a password."""
    try:
        url = urls.split(value)
        return url if url.hostname and url.port else urlsplit("")
    except ValueError:
        return urlsplit("")


def _amqp(value: str) -> str:
    url = _split(value)
    if url.scheme not in ("amqp", "amqps") or not url.username or urls.unused(url):
        form = 'must be "amqp://USER:PASSWORD@HOST:PORT", or amqps:// for TLS, without a virtual host or options'
        raise ValueError(f"{form}; {urls.PASSWORD_RULE}")
    return value


def _file(value: str, info: ValidationInfo) -> str:
    return str((info.context or {}).get("folder", Path()) / value) if value else ""


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"must be {NAME_RULE}")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    return value


def _http(value: str) -> str:
    url = _split(value)
    if url.scheme not in ("http", "https") or url.username is not None or url.path.strip("/") or url.query or url.fragment:
        raise ValueError('must be "http://HOST:PORT", or https:// for TLS, without a user or a path')
    return value


def _etcd(value: str) -> str:
    url = _split(value)
    if url.scheme not in ("http", "https") or url.username is not None or url.path.strip("/") or url.query or url.fragment:
        raise ValueError('must be "http://HOST:PORT", or https:// for TLS, without a user or a path')
    return value


def _namespace(value: str) -> str:
    if not value.startswith("/") or value != value.rstrip("/"):
        raise ValueError('must begin with "/", and not end with it')
    return value


def _levels(value: dict[str, str]) -> dict[str, str]:
    try:
        Levels(value)
    except BadLevel as error:
        raise ValueError(str(error)) from error
    return value


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        raise ValueError('must be an IP address or network, for example "10.0.0.5" or "10.0.0.0/24"') from None
    return value


def _kind(value: str) -> str:
    if value not in REPLICATED:
        raise ValueError(f"must be one of {', '.join(REPLICATED)}")
    return value


Listen = Annotated[str, AfterValidator(_listen)]
ListenIfAny = Annotated[str, AfterValidator(_listen_if_any)]
AmqpUrl = Annotated[str, AfterValidator(_amqp)]
HttpUrl = Annotated[str, AfterValidator(_http)]
EtcdUrl = Annotated[str, AfterValidator(_etcd)]
Namespace = Annotated[str, AfterValidator(_namespace)]
File = Annotated[str, AfterValidator(_file)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Name = Annotated[str, AfterValidator(_name)]
Kind = Annotated[str, AfterValidator(_kind)]
Network = Annotated[str, AfterValidator(_network)]
#: A log has room for this many of the largest messages or transactions, at least: a checkpoint stands in each quarter of it.
LARGEST_PER_LOG = 8
RECEIVE_BYTES_MIN = 1 << 20
#: Keys whose values are never shown.
SECRET = frozenset({"url", "door", "doors", "endpoints", "password", "options"})


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NodeTable(Table):
    name: Name = Field(description="name of this node")
    id: int = Field(ge=1, le=255, description="number of this node, unique in its group; never changes and is never given to another node")
    group: Name = Field(description="name of the group, equal on all of its nodes; other sites know the group by it")


class BrokerTable(Table):
    url: AmqpUrl = Field(description="the broker beside this sidecar, with the sidecar's own user; amqps:// for TLS")
    server_name: str = Field("", description="the name in the broker's certificate, if it is not the host in url")
    proxy_protocol: bool = Field(
        False, description="the broker's listener has proxy_protocol = true, and is told where each client really is"
    )


class TlsTable(Table):
    ca: File = Field("", description="who may sign the certificates of other sides (PEM); empty: those that the system trusts")
    certificate: File = Field("", description="this sidecar's certificate with its chain (PEM), if another side asks for one")
    key: File = Field("", description="its key (PEM, not encrypted)")
    minimum_version: Version = "1.2"

    @model_validator(mode="after")
    def _whole(self) -> TlsTable:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key are given together or not at all")
        return self


class CertificateUser(Table):
    common_name: str = Field(min_length=1, description="the one common name in the subject of a client's certificate")
    user: str = Field(min_length=1, description="whom it is logged in as at the broker")
    password: str = Field(description="this user's password")


class ServerTlsTable(Table):
    certificate: File = Field(min_length=1, description="the certificate with its chain (PEM); read again when the file changes")
    key: File = Field(min_length=1, description="its key (PEM, not encrypted)")
    ca: File = Field("", description="who may sign clients' certificates (PEM)")
    verify: Verify = Field("none", description='whether clients need a certificate: "none", "optional" or "required"')
    minimum_version: Version = "1.2"

    @model_validator(mode="after")
    def _ca_if_verified(self) -> Self:
        if (self.verify != "none") != bool(self.ca):
            raise ValueError('verify "optional" and "required" need ca, and "none" has no use for it')
        return self


class DoorTlsTable(ServerTlsTable):
    users: list[CertificateUser] = Field(default=[], description="logins by certificate (mechanism EXTERNAL)")

    @model_validator(mode="after")
    def _whole(self) -> DoorTlsTable:
        if self.users and self.verify == "none":
            raise ValueError('users need verify "optional" or "required"')
        names = [entry.common_name for entry in self.users]
        if len(set(names)) < len(names):
            raise ValueError(f"each common_name of users stands once; there are {', '.join(names)}")
        return self


class DoorTable(Table):
    listen: Listen = Field(description="where clients, other nodes and other sites connect")
    loopback_users: list[str] = Field(
        default=["guest"], description="users that come in from this machine only, as RabbitMQ's key of this name, which cannot see it behind a door"
    )
    when_backup: Literal["refuse", "forward"] = Field(
        "refuse", description='a client of a backup: "refuse": is told the primary\'s name; "forward": is relayed to the primary\'s door of [[peers]]'
    )
    proxy_protocol: list[Network] = Field(
        default=[], description="load balancers, by address or network, whose PROXY protocol header (version 1 or 2) says where a client is; of any "
        "other address it is refused. List only those that send it, or their clients claim any address"
    )
    connections_max: int = Field(10_000, ge=1, description="connections at a time; more are closed at once. A twentieth, and 4 for each "
        "other node and site, is not for clients: for those, and for logins that are not finished")
    channels_max: int = Field(2_047, ge=1, le=65_535, description="channels of one connection that clients are offered; the broker may offer fewer")
    login_bytes_max: int = Field(1 << 16, ge=1 << 12, description="what a client may have sent that is no finished login yet")
    frame_max_bytes: int = Field(
        frames.FRAME_MAX_BYTES, ge=frames.FRAME_MIN_BYTES, le=1 << 24, description="largest frame that clients are offered; the broker may offer less"
    )
    header_bytes_max: int = Field(
        frames.FRAME_MAX_BYTES, ge=512, description="properties and headers of one message; they are one frame, so the limit on frames holds, too"
    )
    header_depth_max: int = Field(
        content_header.TABLE_DEPTH_MAX,
        ge=1,
        le=content_header.TABLE_DEPTH_MAX,
        description="tables and arrays within each other in a message's headers, or in a declaration's arguments",
    )
    message_bytes_max: int = Field(
        content_assembly.BODY_BYTES_MAX,
        ge=1,
        le=content_assembly.BODY_BYTES_ANY_MAX // 2,  # a batch of the log with one, and more
        description="body of one message; the broker has a limit, too",
    )
    unfinished_bytes_max: int = Field(
        512 << 20, ge=1 << 20, description="frames and messages of which a part has arrived, and open transactions, of all connections; past it, of "
        "the user that holds most, the connection that does is closed"
    )
    transaction_bytes_max: int = Field(64 << 20, ge=1 << 12, description="one transaction of a channel; what would exceed it closes the channel")
    transaction_methods_max: int = Field(
        50_000, ge=100, description="publishes, acks and rejections in one transaction of a channel; more close it. A commit is done in one go, "
        "for which all other clients wait: some 10 to 20 µs for each"
    )
    questions_max: int = Field(
        10_000, ge=100, description="gets, consumes, declarations and commits of one connection without an answer; more close it. "
        "With more repeats, and commits of repeats, that wait for their answers, nothing is read from it"
    )
    producers_max: int = Field(
        100_000, ge=1, description="names of producers (lrq_producer) of which the log remembers IDs; a new one beyond it is refused"
    )
    id_bytes_max: int = Field(
        8 << 20, ge=1 << 20, le=32 << 20, description="what the numbers in their IDs take in a checkpoint, of all producers; of one a quarter. "
        "Consecutive ones take nothing, dense ones a bit each. Past it, a publish that would leave one more gap is refused"
    )
    buffered_bytes_max: int = Field(
        64 << 20,
        ge=1 << 20,
        description="memory for what publishers sent and is not safe yet, or not in the routing queues; past it, or a quarter of log_bytes_max, "
        "the door stops reading from them",
    )
    connection_buffer_bytes_max: int = Field(4 << 20, ge=1 << 16, description="bytes on their way to the broker for one client")
    client_buffer_bytes_max: int = Field(
        1 << 20, ge=1 << 12, description="bytes on their way to one client; past it nothing more is read for it, past 16 times as much "
        "not even for an answer that it or others wait for"
    )
    client_buffers_bytes_max: int = Field(
        512 << 20, ge=1 << 20, description="bytes on their way to all clients that do not keep up; past it the one that is behind longest is closed"
    )
    handshake_timeout_s: float = Field(10.0, gt=0, description="a client that has not opened its connection by then is closed")
    hold_up_timeout_s: float = Field(
        30.0, gt=0, description="a client that has not read for so long is closed where an answer of the broker stands behind 16 times "
        "client_buffer_bytes_max for it, and others wait for that answer, or a quarter of the log follows on it, or the client itself waits for it "
        "(at once, if that is the answer to a declaration)"
    )
    drain_timeout_s: float = Field(30.0, gt=0, description="how long what a vanished client published is still sent to the broker")
    stop_timeout_s: float = Field(10.0, ge=0, description="how long a stop waits for confirms that are under way and for clients to say goodbye")
    tls: DoorTlsTable | None = Field(None, description="clients, nodes and sites connect with TLS (amqps://) only")


class HttpTable(Table):
    listen: Listen = Field(description="status and operators' commands")
    token_file: File = Field(
        "", description="has the token that commands, GET /tail and GET /definitions need, and that `lrq-ha --config` sends to all nodes; a second "
        "line: the old "
        "token, which is accepted, too; empty: whoever reaches listen may give commands"
    )
    probes: ListenIfAny = Field("", description="a second address, for load balancers and Prometheus: probes and /metrics only, without TLS")
    tls: ServerTlsTable | None = Field(None, description="listen takes https:// only")

    @model_validator(mode="after")
    def _two_addresses(self) -> HttpTable:
        if self.probes == self.listen:
            raise ValueError("probes and listen need addresses of their own")
        return self


class PeerTable(Table):
    name: Name
    id: int = Field(ge=1, le=255)
    door: AmqpUrl = Field(description="its door, with the user that the sidecar there uses at its broker; amqps:// for TLS")
    http: HttpUrl = Field(description="its http.listen, for `lrq-ha --config` and the page of this node; https:// if it has [http.tls]")


class SiteTable(Table):
    remote_id: Name = Field(description="group name of the other site")
    doors: list[AmqpUrl] = Field(min_length=1, description="the doors of its nodes")
    snapshot_timeout_s: float = Field(
        60.0, gt=0, description="a full sync of which so long nothing came is cancelled and asked for again: more than a provider needs for a row"
    )


class CoordinationTable(Table):
    endpoints: list[EtcdUrl] = Field(min_length=1, description="the members of etcd, 3.4 or newer; https:// with [tls]")
    namespace: Namespace = Field("/lrq-ha", description="the keys in etcd are NAMESPACE/GROUP/...")
    user: str = Field("", description="of etcd's own authentication; empty: none")
    password_file: File = Field("", description="a file with the user's password; read at the start")
    lease_ttl_s: float = Field(
        10.0, ge=3, le=600, description="a primary that is silent for so long is replaced; whole seconds; each primary uses its own"
    )
    priority: int = Field(100, ge=0, le=1_000_000, description="of this node: the highest takes over first; 0: it takes no epoch by itself")
    broker_grace_s: float = Field(2.0, ge=0, description="a primary whose broker is lost gives its lease back after so long")

    @model_validator(mode="after")
    def _whole(self) -> CoordinationTable:
        if self.lease_ttl_s != int(self.lease_ttl_s):
            raise ValueError(f"lease_ttl_s must be whole seconds (value {self.lease_ttl_s:g})")
        if bool(self.user) != bool(self.password_file):
            raise ValueError("user and password_file are given together or not at all")
        return self


class ReceiveTable(Table):
    bytes_max: int = Field(
        0,
        ge=0,
        description="size of a receive queue, which the broker drops the oldest segments of beyond it; 0: as replication.log_bytes_max. A queue that "
        "exists keeps the size that it was made with; see operations/capacity.md",
    )
    on_backlog: Literal["trim", "hold"] = Field(
        "trim",
        description="what happens where a receiver lacks more than half of its queue. trim: the broker drops the oldest entries nevertheless, and "
        "the receiver begins again with a snapshot; hold: the queue takes nothing more until it has caught up: entries wait in the source's log",
    )
    keep_snapshot: bool = Field(
        True, description="this group demands a full sync from a source before a receive queue drops the last whole snapshot, or where it lacks one"
    )

    @field_validator("bytes_max")
    @classmethod
    def _large_enough(cls, value: int) -> int:
        if 0 < value < RECEIVE_BYTES_MIN:
            raise ValueError(f"a receive queue has {RECEIVE_BYTES_MIN} bytes at least, or 0: as replication.log_bytes_max")
        return value


class ReplicationTable(Table):
    coordination: Literal["static", "etcd"] = Field(
        "static",
        description='who gives the right to an epoch: "static": all nodes, or an operator; "etcd": a lease in etcd, a backup takes over by itself',
    )
    mode: Literal["available", "strict"] = Field(
        "available",
        description='"available": a silent backup is taken out of the set after backup_timeout_s; "strict": confirms wait, or an operator removes it',
    )
    restart_alone: bool = Field(False, description="a restarted primary goes on although its backups are silent, unless its broker was down, too")
    backup_timeout_s: float = Field(5.0, gt=0, description="how long a backup may make no progress before it is taken out of the set")
    completion: dict[Pattern, Literal["all", "local"]] = Field(
        default={"^.*$": "all"},
        description='when a publish to a queue by its name is confirmed: when every in-sync node has it ("all"), or this one ("local"; see '
        "guarantees.md), by patterns of names; the first that fits counts",
    )
    expected_backups: int = Field(0, ge=0, description="so many backups must be in sync before a new primary, which takes clients, confirms anything")
    expected_backups_timeout_s: float = Field(10.0, gt=0, description="after so long it confirms without them")
    heartbeat_s: float = Field(0.25, gt=0, description="how often a node says at least that it lives; less than backup_timeout_s")
    replicate: Annotated[dict[str, str], AfterValidator(_levels)] = Field(
        default={"^.*$": Level.ALL.value},
        description=f"what the other nodes get of a queue ({ALLOWED}), by patterns of names; the first that fits a new queue counts",
    )
    apply_delay_s: float = Field(1.0, ge=0, description="how late a backup may write to its queues; what is consumed meanwhile is never written")
    apply_delay_entries_max: int = Field(2_000, ge=0, description="how many entries may wait for that")
    apply_delay_bytes_max: int = Field(16 << 20, ge=0, description="and how many bytes")
    apply_lag_s_max: float = Field(
        0.25,
        gt=0,
        description="how long a promotion may have to write what a backup should have written before: one whose broker does not keep up takes the "
        "log no faster, which slows publishers",
    )
    apply_lag_bytes_max: int = Field(
        256 << 20,
        ge=1 << 20,
        description="bytes a backup holds that are safe and not in its queues yet; past it, or a quarter of log_bytes_max, it takes no more "
        "(four times that while full queues refuse some of it)",
    )
    log_bytes_max: int = Field(
        8 << 30,
        ge=1 << 20,
        description="size of the replicated log in the broker, which drops older segments beyond it, whoever still needs them: a hard limit. "
        "Eight times door.message_bytes_max and door.transaction_bytes_max at least, and the largest checkpoint. A stream that exists keeps the size "
        "that it was made with; see operations/capacity.md",
    )
    checkpoint_entries: int = Field(
        50_000, ge=1, description="a checkpoint is written every so many entries: a restart reads the log from the last one that is applied"
    )
    checkpoint_bytes: int = Field(
        64 << 20,
        ge=1 << 10,
        description="or every so many bytes of the log, whichever is first, a quarter of log_bytes_max at most; later, up to that, where checkpoints "
        "are so large that the log would consist of them",
    )
    push_bytes_max: int = Field(16 << 20, ge=1 << 20, description="bytes on their way to one backup")
    memory_bytes_max: int = Field(64 << 20, ge=1 << 20, description="what batches of the log may take in memory, for backups that keep up")

    @model_validator(mode="after")
    def _whole(self) -> ReplicationTable:
        if self.heartbeat_s >= self.backup_timeout_s:
            raise ValueError(f"heartbeat_s has to be less than backup_timeout_s; they are {self.heartbeat_s:g} and {self.backup_timeout_s:g}")
        return self

    @property
    def log_quarter_bytes(self) -> int:
        """The limit of each of: bytes between two checkpoints, bytes that wait to be safe, and bytes that wait to be applied.

        So a log that has lost its beginning still holds a checkpoint from which on it is complete.
        """
        return self.log_bytes_max // 4


class DefinitionsTable(Table):
    replicate: list[Kind] = Field(
        default=[],
        description="what operators set at the primary's broker and the backups' brokers get, equal on all nodes: "
        f"{', '.join(REPLICATED)}; empty: each broker has its own",
    )
    management: HttpUrl = Field(
        "http://127.0.0.1:15672", description="the management API of the broker beside this sidecar, whose user needs the tag administrator"
    )
    interval_s: float = Field(5.0, gt=0, description="how often the primary looks for changes, and a backup whether its broker is as it should be")
