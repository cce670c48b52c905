"""The configuration of one node: a TOML file, validated as a whole before anything starts.

Rules:

- An unknown key is an error. An error names the key, the value and the allowed values, but never the value of a key that is unknown or may hold
  a secret.
- Files that are named are read, too.
- Every key has its default and its meaning here, and the sample in docs/ is generated from this model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from broker_plugin.amqp import content_assembly, content_header, frames
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.sasl import Credentials
from broker_plugin.amqp.tls import TlsError, TlsFiles, Verify, Version, client_files, server_files
from broker_plugin.session.settings import DoorSettings
from lrq_ha import __version__, urls
from lrq_ha.errors import LrqError
from lrq_ha.interceptors import plugins
from lrq_ha.replication.levels import ALLOWED, BadLevel, Level, Levels
from lrq_ha.replication.settings import NodeSettings
from lrq_ha.routing.names import NAME_RULE, is_name


class ConfigError(LrqError):
    """A configuration file that cannot be used."""


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError('must be "HOST:PORT", for example "127.0.0.1:5672"')
    return value


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
    if url.scheme != "http" or url.username is not None or url.path.strip("/") or url.query or url.fragment:
        raise ValueError('must be "http://HOST:PORT", without a user or a path')
    return value


def _levels(value: dict[str, str]) -> dict[str, str]:
    try:
        Levels(value)
    except BadLevel as error:
        raise ValueError(str(error)) from error
    return value


Listen = Annotated[str, AfterValidator(_listen)]
AmqpUrl = Annotated[str, AfterValidator(_amqp)]
HttpUrl = Annotated[str, AfterValidator(_http)]
File = Annotated[str, AfterValidator(_file)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Name = Annotated[str, AfterValidator(_name)]
#: A log has room for this many of the largest messages or transactions, at least: a checkpoint stands in each quarter of it.
LARGEST_PER_LOG = 8
#: Keys of [replication] that must be equal on all nodes of a group: each leader uses its own.
SHARED_KEYS = (
    "mode", "completion", "replicate", "backup_timeout_s", "expected_backups", "expected_backups_timeout_s", "restart_alone", "coordination",
)  # fmt: skip
#: Keys whose values are never shown.
SECRET = frozenset({"url", "door", "doors", "password", "options"})


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NodeTable(_Table):
    name: Name = Field(description="name of this node")
    id: int = Field(ge=1, le=255, description="number of this node, unique in its group; never changes and is never given to another node")
    group: Name = Field(description="name of the group, equal on all of its nodes; other sites know the group by it")


class BrokerTable(_Table):
    url: AmqpUrl = Field(description="the broker beside this sidecar, with the sidecar's own user; amqps:// for TLS")
    server_name: str = Field("", description="the name in the broker's certificate, if it is not the host in url")
    proxy_protocol: bool = Field(
        False, description="the broker's listener has proxy_protocol = true, and is told where each client really is"
    )


class TlsTable(_Table):
    ca: File = Field("", description="who may sign the certificates of other sides (PEM); empty: those that the system trusts")
    certificate: File = Field("", description="this sidecar's certificate with its chain (PEM), if another side asks for one")
    key: File = Field("", description="its key (PEM, not encrypted)")
    minimum_version: Version = "1.2"

    @model_validator(mode="after")
    def _whole(self) -> TlsTable:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key are given together or not at all")
        return self


class CertificateUser(_Table):
    common_name: str = Field(min_length=1, description="the one common name in the subject of a client's certificate")
    user: str = Field(min_length=1, description="whom it is logged in as at the broker")
    password: str = Field(description="this user's password")


class DoorTlsTable(_Table):
    certificate: File = Field(min_length=1, description="the door's certificate with its chain (PEM); read again when the file changes")
    key: File = Field(min_length=1, description="its key (PEM, not encrypted)")
    ca: File = Field("", description="who may sign clients' certificates (PEM)")
    verify: Verify = Field("none", description='whether clients need a certificate: "none", "optional" or "required"')
    minimum_version: Version = "1.2"
    users: list[CertificateUser] = Field(default=[], description="logins by certificate (mechanism EXTERNAL)")

    @model_validator(mode="after")
    def _whole(self) -> DoorTlsTable:
        if (self.verify != "none") != bool(self.ca):
            raise ValueError('verify "optional" and "required" need ca, and "none" has no use for it')
        if self.users and self.verify == "none":
            raise ValueError('users need verify "optional" or "required"')
        names = [entry.common_name for entry in self.users]
        if len(set(names)) < len(names):
            raise ValueError(f"each common_name of users stands once; there are {', '.join(names)}")
        return self


class DoorTable(_Table):
    listen: Listen = Field(description="where clients, other nodes and other sites connect")
    loopback_users: list[str] = Field(
        default=["guest"], description="users that come in from this machine only, as RabbitMQ's key of this name, which cannot see it behind a door"
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
        description="memory for what publishers sent and is not safe yet; past it, or a quarter of log_bytes_max, the door stops reading from them",
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


class HttpTable(_Table):
    listen: Listen = Field(description="status and operators' commands")


class PeerTable(_Table):
    name: Name
    id: int = Field(ge=1, le=255)
    door: AmqpUrl = Field(description="its door, with the user that the sidecar there uses at its broker; amqps:// for TLS")
    http: HttpUrl


class SiteTable(_Table):
    remote_id: Name = Field(description="group name of the other site")
    doors: list[AmqpUrl] = Field(min_length=1, description="the doors of its nodes")
    snapshot_timeout_s: float = Field(
        60.0, gt=0, description="a full sync of which so long nothing came is cancelled and asked for again: more than a provider needs for a row"
    )


class ReplicationTable(_Table):
    coordination: Literal["static"] = Field("static", description="who gives the right to an epoch")
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


class Config(_Table):
    """One node's configuration."""

    node: NodeTable
    broker: BrokerTable
    door: DoorTable
    http: HttpTable
    peers: list[PeerTable] = Field(default=[], description="the other nodes of the group")
    sites: list[SiteTable] = Field(default=[], description="the groups that this one sends log entries to")
    replication: ReplicationTable = Field(default_factory=lambda: ReplicationTable.model_validate({}))
    tls: TlsTable = Field(default_factory=lambda: TlsTable.model_validate({}), description="for connections made to amqps:// addresses")
    interceptors: dict[Name, plugins.Settings] = Field(default={}, description="what else is told of clients' messages, by name")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        ids = [self.node.id, *(peer.id for peer in self.peers)]
        names = [self.node.name, *(peer.name for peer in self.peers)]
        if len(set(ids)) < len(ids) or len(set(names)) < len(names):
            raise ValueError(f"every node of a group needs its own name and its own id; there are {', '.join(names)} with the ids {ids}")
        sites = [site.remote_id for site in self.sites]
        if len(set(sites)) < len(sites):
            raise ValueError(f"each remote_id of sites stands once, with the doors of all its nodes; there are {', '.join(sites)}")
        if self.node.group in sites:
            raise ValueError(f"the group {self.node.group} cannot be a site of its own")
        if self.replication.expected_backups > len(self.peers):
            raise ValueError(f"replication.expected_backups is {self.replication.expected_backups}, and there are {len(self.peers)} peers")
        for key in ("message_bytes_max", "transaction_bytes_max"):
            largest, log_bytes_max = getattr(self.door, key), self.replication.log_bytes_max
            if log_bytes_max < LARGEST_PER_LOG * largest:
                raise ValueError(
                    f"replication.log_bytes_max is {log_bytes_max}, and has to be {LARGEST_PER_LOG} times door.{key} at least, which is {largest}"
                )
        for entry in self.door.tls.users if self.door.tls else ():
            if entry.user == self.credentials.name:
                raise ValueError(f"door.tls.users logs '{entry.common_name}' in as {entry.user}, which is the sidecar's own user and no client's")
        return self

    @cached_property
    def credentials(self) -> Credentials:
        """The sidecar's own user."""
        url = urlsplit(self.broker.url)
        return Credentials(unquote(url.username or "").encode(), unquote(url.password or "").encode())

    @property
    def _urls(self) -> list[str]:
        """The AMQP URLs that the node connects to."""
        return [self.broker.url, *(peer.door for peer in self.peers), *(door for site in self.sites for door in site.doors)]

    @cached_property
    def client_tls(self) -> TlsFiles | None:
        """TLS for outgoing connections; None if none uses TLS. Raises TlsError."""
        if not any(url.startswith("amqps") for url in self._urls):
            return None
        return client_files(self.tls.ca, self.tls.certificate, self.tls.key, self.tls.minimum_version)

    @cached_property
    def server_tls(self) -> TlsFiles | None:
        """TLS of the door; None if it has none. Raises TlsError."""
        table = self.door.tls
        return server_files(table.certificate, table.key, table.ca, table.verify, table.minimum_version) if table else None

    @property
    def door_settings(self) -> DoorSettings:
        """The door's part of the configuration. Raises TlsError."""
        users = self.door.tls.users if self.door.tls else []
        return DoorSettings(
            limits=self.door,
            group=self.node.group,
            sites=frozenset(site.remote_id for site in self.sites),
            neighbours=len(self.peers) + len(self.sites),
            own=self.credentials,
            users={entry.common_name: Credentials(entry.user.encode(), entry.password.encode()) for entry in users},
            broker=self.broker_address("/"),
            log_quarter_bytes=self.replication.log_quarter_bytes,
            completes_locally=self.completes_locally,
            server_tls=self.server_tls,
            client_tls=self.client_tls,
            interceptors=self.interceptors,
        )

    def broker_address(self, vhost: str) -> Address:
        """The own broker, as the sidecar's own user."""
        broker = self.broker
        return Address.parse(broker.url, vhost, tls=self.client_tls, server_name=broker.server_name, proxied=broker.proxy_protocol)

    def door_address(self, url: str, vhost: str) -> Address:
        """Another node's or site's door."""
        return Address.parse(url, vhost, tls=self.client_tls)

    @property
    def names(self) -> dict[int, str]:
        """Name of every node of the group by id."""
        return {self.node.id: self.node.name, **{peer.id: peer.name for peer in self.peers}}

    def completes_locally(self, queue: str) -> bool:
        """Whether publishes to a queue, by its name, are confirmed when only this node has them."""
        return next((completion == "local" for pattern, completion in self.replication.completion.items() if re.search(pattern, queue)), False)

    def settings(self) -> NodeSettings:
        """The core's part of the configuration."""
        r = self.replication
        return NodeSettings(
            self.node.id,
            self.names,
            strict=r.mode == "strict",
            restart_alone=r.restart_alone,
            backup_timeout_s=r.backup_timeout_s,
            heartbeat_s=r.heartbeat_s,
            expected_backups=r.expected_backups,
            expected_backups_timeout_s=r.expected_backups_timeout_s,
            local_completion="local" in r.completion.values(),
            software=__version__,
            shared=tuple((key, _shown(getattr(r, key))) for key in SHARED_KEYS),
        )


def _shown(value: object) -> str:
    """A value of a key as an operator writes it."""
    return json.dumps(value)


def _explain(error: ValidationError, path: Path) -> str:
    lines = []
    for problem in error.errors():
        location = problem["loc"]
        key = ".".join(str(part) for part in location) or "the file as a whole"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; allowed here: {', '.join(sorted(_table(location).model_fields))}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            shown = f" (value {problem['input']!r})" if _may_show(location, problem["input"]) else ""
            lines.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    return f"{path}: " + "; ".join(lines)


def _may_show(location: tuple[int | str, ...], value: object) -> bool:
    """Whether a value is a key's own, and the key holds no secret: not a table's (a URL may stand in its place). The table [door] is no key."""
    names = [part for part in location if isinstance(part, str)]
    if not names or SECRET & set(names[1:]) or not isinstance(value, str | int | float | bool):
        return False
    field = _table(location).model_fields.get(names[-1])
    return field is not None and not _models(field.annotation)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a key holds."""
    parts = (annotation, *getattr(annotation, "__args__", ()))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _table(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The table in which the key stands."""
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:  # else it is the name of an interceptor
            model = next(iter(_models(model.model_fields[part].annotation)), model)
    return model


def read(path: Path) -> Config:
    """Reads and checks a configuration file, but not the files that it names: so an operator's commands find the nodes even if those are gone.

    Raises:
        ConfigError: It cannot be read, is not TOML, or has unknown, missing or wrong keys (all of them are named).
    """
    try:
        return Config.model_validate(tomllib.loads(path.read_text("utf-8")), context={"folder": path.parent})
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", todo="Name a node's configuration with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(_explain(error, path), todo="docs/configuration.md has a sample with every key") from error


def load(path: Path) -> Config:
    """Reads and checks a configuration file, and the files that it names.

    Raises:
        ConfigError: As `read`; or it names files or interceptors that cannot be used.
    """
    config = read(path)
    for table, attribute in (("tls", "client_tls"), ("door.tls", "server_tls")):
        try:
            getattr(config, attribute)
        except TlsError as error:
            raise ConfigError(f"{path}: {table}: {error.what}", todo=error.todo) from error
    try:
        plugins.Interceptors(config.interceptors)
    except LrqError as error:
        raise ConfigError(f"{path}: {error.what}", todo=error.todo) from error
    return config


def exposed(path: Path) -> str:
    """Text: other users may read, or write, a file with passwords, with the command to forbid it; empty if they may not.

    A group's permissions do not count if the sidecar may need them: its user is not the owner, or root looks at the file of a service's group.
    """
    found, me = path.stat(), os.geteuid()
    mode, file = stat.S_IMODE(found.st_mode), shlex.quote(str(path))
    if found.st_uid == me and (me or not found.st_gid):
        others, command = 0o077, f"chmod go-rwx {file}"
    elif me == 0 or (mode & stat.S_IRGRP and found.st_gid in {os.getegid(), *os.getgroups()}):
        others, command = 0o007, f"chmod o-rwx {file}"
    else:  # this user is one of the others
        others, command = 0o077, f"chown {me} {file} && chmod go-rwx {file}"
    if not mode & others:
        return ""
    return f"{path} holds passwords, and other users may use it (its mode is {mode:04o}): run: {command}"


#: Values of the sample for keys without a default, or with an uninformative one.
_REQUIRED = {
    "node.name": '"e1"',
    "node.id": "1",
    "node.group": '"east"',
    "broker.url": '"amqp://lrq:SECRET@127.0.0.1:5672"',
    "door.listen": '"127.0.0.1:5673"',
    "door.tls.certificate": '"door.pem"',
    "door.tls.key": '"door.key"',
    "door.tls.users.common_name": '"orders"',
    "door.tls.users.user": '"app"',
    "door.tls.users.password": '"SECRET"',
    "http.listen": '"127.0.0.1:8080"',
    "peers.name": '"e2"',
    "peers.id": "2",
    "peers.door": '"amqp://lrq:SECRET@192.0.2.2:5673"',
    "peers.http": '"http://192.0.2.2:8080"',
    "sites.remote_id": '"west"',
    "interceptors.audit.priority": "100",
    "interceptors.audit.options": '{ path = "/var/log/lrq-ha/audit.jsonl" }',
    "sites.doors": '["amqp://lrq:SECRET@198.51.100.1:5673"]',
}
#: Every table; one whose heading begins with # is left out unless requested.
_TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("[node]", NodeTable),
    ("[broker]", BrokerTable),
    ("[door]", DoorTable),
    ("# [door.tls]", DoorTlsTable),
    ("# [[door.tls.users]]", CertificateUser),
    ("[http]", HttpTable),
    ("[[peers]]", PeerTable),
    ("[[sites]]", SiteTable),
    ("[replication]", ReplicationTable),
    ("[tls]", TlsTable),
    ("# [interceptors.audit]", plugins.Settings),
)


def sample() -> str:
    """A TOML sample with every key, its meaning and its default, for docs/configuration.md."""
    lines: list[str] = []
    for heading, model in _TABLES:
        off = "# " if heading.startswith("#") else ""
        prefix = heading.strip("#[] ")
        lines.append(heading)
        for name, info in model.model_fields.items():
            if _models(info.annotation):
                continue  # a table of its own
            if info.description:
                lines.append(f"{off}# {info.description}")
            lines.append(f"{off}{name} = {_REQUIRED.get(f'{prefix}.{name}') or _toml(info.default)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return "'" + value + "'" if "\\" in value or "^" in value else f'"{value}"'
    return str(value)
