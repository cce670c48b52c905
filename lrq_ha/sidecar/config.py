"""The configuration of one node: a TOML file, validated as a whole before anything starts.

Rules:

- An unknown key is an error. An error names the key, the value and the allowed values, but never the value of a key that is unknown or may hold
  a secret.
- Files that are named are read, too.
- `tables` has every key with its default and its meaning. The sample in docs/ is generated from it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import stat
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field, ValidationError, model_validator

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.sasl import Credentials
from broker_plugin.amqp.tls import TlsFiles, client_files, server_files
from broker_plugin.session.settings import DoorSettings
from lrq_ha import __version__
from lrq_ha.errors import LrqError
from lrq_ha.interceptors import plugins
from lrq_ha.replication.settings import NodeSettings

from . import secrets
from .http.tokens import TokenFile
from .tables import (
    LARGEST_PER_LOG,
    SECRET,
    BrokerTable,
    CertificateUser,
    CoordinationTable,
    DefinitionsTable,
    DoorTable,
    DoorTlsTable,
    HttpTable,
    Name,
    NodeTable,
    PeerTable,
    ReceiveTable,
    ReplicationTable,
    ServerTlsTable,
    SiteTable,
    Table,
    TlsTable,
)


class ConfigError(LrqError):
    """A configuration file that cannot be used."""


#: Keys of [replication] that must be equal on all nodes of a group: each leader uses its own.
SHARED_KEYS = (
    "mode", "completion", "replicate", "backup_timeout_s", "expected_backups", "expected_backups_timeout_s", "restart_alone", "coordination",
)  # fmt: skip


class Config(Table):
    """One node's configuration."""

    node: NodeTable
    broker: BrokerTable
    door: DoorTable
    http: HttpTable
    peers: list[PeerTable] = Field(default=[], description="the other nodes of the group")
    sites: list[SiteTable] = Field(default=[], description="the groups that this one sends log entries to")
    replication: ReplicationTable = Field(default_factory=lambda: ReplicationTable.model_validate({}))
    receive: ReceiveTable = Field(default_factory=lambda: ReceiveTable.model_validate({}), description="the queues for the application's receivers")
    definitions: DefinitionsTable = Field(
        default_factory=lambda: DefinitionsTable.model_validate({}), description="users, permissions, policies and so on, from the primary's broker"
    )
    coordination: CoordinationTable | None = Field(None, description="etcd; with replication.coordination = \"etcd\"")
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
        if (self.replication.coordination == "etcd") != (self.coordination is not None):
            raise ValueError('replication.coordination = "etcd" needs the table [coordination], and "static" has no use for it')
        if self.coordination is not None and self.replication.restart_alone:
            raise ValueError('replication.restart_alone has no use with replication.coordination = "etcd": a restarted primary asks etcd')
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
        etcd = self.coordination.endpoints if self.coordination else []
        if not any(url.startswith(("amqps", "https")) for url in (*self._urls, *etcd, *(peer.http for peer in self.peers))):
            return None
        return client_files(self.tls.ca, self.tls.certificate, self.tls.key, self.tls.minimum_version)

    @cached_property
    def server_tls(self) -> TlsFiles | None:
        """TLS of the door; None if it has none. Raises TlsError."""
        table = self.door.tls
        return server_files(table.certificate, table.key, table.ca, table.verify, table.minimum_version) if table else None

    @cached_property
    def http_tls(self) -> TlsFiles | None:
        """TLS of `http.listen`; None if it has none. Raises TlsError."""
        table = self.http.tls
        return server_files(table.certificate, table.key, table.ca, table.verify, table.minimum_version) if table else None

    @property
    def own_certificates(self) -> dict[str, tuple[TlsFiles, str]]:
        """Of each listener with TLS: its context, and the file of its certificate. Raises TlsError."""
        listeners = (("door", self.server_tls, self.door.tls), ("http", self.http_tls, self.http.tls))
        return {name: (files, table.certificate) for name, files, table in listeners if files and table}

    @cached_property
    def tokens(self) -> TokenFile | None:
        """The tokens that commands over HTTP need; None if they need none. Raises LrqError."""
        return TokenFile(Path(self.http.token_file)) if self.http.token_file else None

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
            lease_ttl_s=self.coordination.lease_ttl_s if self.coordination else 0.0,
            priority=self.coordination.priority if self.coordination else 0,
        )

    def etcd_password(self) -> str:
        """Password of the user in etcd; empty if there is none. Raises ConfigError."""
        file = self.coordination.password_file if self.coordination else ""
        try:
            return Path(file).read_text("utf-8").strip() if file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"coordination.password_file: {file} cannot be read: {error}") from error


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
    return field is not None and not models_in(field.annotation)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a key holds."""
    parts = (annotation, *getattr(annotation, "__args__", ()))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _table(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The table in which the key stands."""
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:  # else it is the name of an interceptor
            model = next(iter(models_in(model.model_fields[part].annotation)), model)
    return model


def read(path: Path, *, strict: bool = False) -> Config:
    """Reads and checks a configuration file, but not the files that it names: so an operator's commands find the nodes even if those are gone.

    Args:
        path: The file.
        strict: Every reference to a secret must lead to one (`secrets`).

    Raises:
        ConfigError: It cannot be read, is not TOML, or has unknown, missing or wrong keys (all of them are named).
    """
    try:
        return parse(path.read_text("utf-8"), path, strict=strict)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", todo="Name a node's configuration with --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def parse(text: str, path: Path, *, strict: bool = False) -> Config:
    """As `read`, for a text that is not in the file yet.

    Args:
        text: The file's text.
        path: The file. Paths in the text begin at its folder.
        strict: As for `read`.

    Raises:
        ConfigError: As `read`.
    """
    try:
        tables = secrets.resolve(tomllib.loads(text), path.parent, strict=strict)
        return Config.model_validate(tables, context={"folder": path.parent})
    except secrets.MissingSecret as error:
        raise ConfigError(f"{path}: {error.what}", todo=error.todo) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(_explain(error, path), todo="docs/configuration.md has a sample with every key") from error


def load(path: Path) -> Config:
    """Reads and checks a configuration file, and the files that it names.

    Raises:
        ConfigError: As `read`; or it names files or interceptors that cannot be used.
    """
    config = read(path, strict=True)
    named = (("tls", "client_tls"), ("door.tls", "server_tls"), ("http.tls", "http_tls"), ("http.token_file", "tokens"))
    for table, attribute in named:
        try:
            getattr(config, attribute)
        except LrqError as error:
            raise ConfigError(f"{path}: {table}: {error.what}", todo=error.todo) from error
    try:
        config.etcd_password()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.what}", todo="docs/configuration.md says what stands in it") from error
    try:
        plugins.Interceptors(config.interceptors)
    except LrqError as error:
        raise ConfigError(f"{path}: {error.what}", todo=error.todo) from error
    return config


def exposed(path: Path) -> str:
    """Text: other users may read, or write, a file with passwords, with the command to forbid it; empty if they may not."""
    what, command = find_exposure(path)
    return f"{what}: run: {command}" if what else ""


def find_exposure(path: Path) -> tuple[str, str]:
    """Text that other users may read, or write, a file with passwords, and the command to forbid it; both empty if they may not.

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
        return "", ""
    return f"{path} holds secrets, and other users may use it (its mode is {mode:04o})", command


def secret_files(path: Path, config: Config) -> list[Path]:
    """The files with passwords, tokens and keys of a node: its configuration, which is readable, and those that it names."""
    named = [
        config.http.token_file,
        config.coordination.password_file if config.coordination else "",
        *(table.key for table in (config.door.tls, config.http.tls, config.tls) if table),
    ]
    referred = secrets.find_files(tomllib.loads(path.read_text("utf-8")), path.parent)
    return list(dict.fromkeys([path, *referred, *(Path(file) for file in named if file)]))


def unprotected(config: Config) -> str:
    """Text: other machines may give commands, as `http.listen` takes them without a token; empty if they may not."""
    if config.http.token_file or is_loopback(config.http.listen.rpartition(":")[0]):
        return ""
    return (
        f"whoever reaches {config.http.listen} (http.listen) may give commands and read messages: set http.token_file, or listen on 127.0.0.1 only, "
        "and open http.probes to load balancers and monitoring"
    )


def is_loopback(host: str) -> bool:
    """Whether a host, as in "HOST:PORT", is this machine's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


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
    "http.tls.certificate": '"http.pem"',
    "http.tls.key": '"http.key"',
    "coordination.endpoints": '["http://192.0.2.1:2379", "http://192.0.2.2:2379", "http://192.0.2.9:2379"]',
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
    ("# [http.tls]", ServerTlsTable),
    ("[[peers]]", PeerTable),
    ("[[sites]]", SiteTable),
    ("[replication]", ReplicationTable),
    ("# [coordination]", CoordinationTable),
    ("[receive]", ReceiveTable),
    ("[definitions]", DefinitionsTable),
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
            if models_in(info.annotation):
                continue  # a table of its own
            if info.description:
                lines.append(f"{off}# {info.description}")
            lines.append(f"{off}{name} = {_REQUIRED.get(f'{prefix}.{name}') or toml_value(info.default)}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_value(key)} = {toml_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, str):
        return "'" + value + "'" if "\\" in value or "^" in value else f'"{value}"'
    return str(value)
