"""The configuration of one node: a TOML file, validated as a whole before anything starts.

Rules: an unknown key is an error; an error names the key, the value and what is allowed; every key has its default and its
meaning here, and the sample in docs/ is generated from this model.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.node import NodeSettings


class ConfigError(LrqError):
    """A configuration file that cannot be used."""


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError('must be "HOST:PORT", for example "127.0.0.1:5672"')
    return value


def _port(url: SplitResult) -> int:
    try:
        return url.port or 0
    except ValueError:
        return 0


def _amqp(value: str) -> str:
    url = urlsplit(value)
    if url.scheme != "amqp" or not url.hostname or not _port(url) or not url.username:
        raise ValueError('must be "amqp://USER:PASSWORD@HOST:PORT"')
    return value


def _http(value: str) -> str:
    url = urlsplit(value)
    if url.scheme != "http" or not url.hostname or not _port(url):
        raise ValueError('must be "http://HOST:PORT"')
    return value


Listen = Annotated[str, AfterValidator(_listen)]
AmqpUrl = Annotated[str, AfterValidator(_amqp)]
HttpUrl = Annotated[str, AfterValidator(_http)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,64}$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NodeTable(_Table):
    name: Name = Field(description="name of this node")
    id: int = Field(ge=1, le=255, description="number of this node, unique in its group; never changes and is never given to another node")
    group: Name = Field(description="name of the group, the same on all of its nodes; other sites know the group by it")


class BrokerTable(_Table):
    url: AmqpUrl = Field(description="the broker beside this sidecar, with the sidecar's own user")


class DoorTable(_Table):
    listen: Listen = Field(description="where clients, other nodes and other sites connect")
    buffered_bytes_max: int = Field(
        64 << 20, ge=1 << 20, description="bytes taken from publishers that are not safe yet; past it the door stops reading from them"
    )
    connection_buffer_bytes_max: int = Field(4 << 20, ge=1 << 16, description="bytes on their way to one client or to the broker for one client")
    handshake_timeout_s: float = Field(10.0, gt=0, description="a client that has not opened its connection by then is closed")
    drain_timeout_s: float = Field(30.0, gt=0, description="how long what a vanished client published is still sent to the broker")


class HttpTable(_Table):
    listen: Listen = Field(description="status and operators' commands")


class PeerTable(_Table):
    name: Name
    id: int = Field(ge=1, le=255)
    door: AmqpUrl = Field(description="its door, with the user that the sidecars use")
    http: HttpUrl


class SiteTable(_Table):
    remote_id: Name = Field(description="group name of the other site")
    doors: list[AmqpUrl] = Field(min_length=1, description="the doors of its nodes")


class ReplicationTable(_Table):
    coordination: Literal["static"] = Field("static", description="who gives the right to an epoch")
    mode: Literal["available", "strict"] = Field(
        "available", description='"available": a silent backup is taken out of the set after backup_timeout_s; "strict": only an operator removes it'
    )
    restart_alone: bool = Field(False, description="a restarted primary goes on although its backups are silent")
    backup_timeout_s: float = Field(5.0, gt=0, description="how long a backup may make no progress before it is taken out of the set")
    heartbeat_s: float = Field(0.25, gt=0)
    replicate: list[str] = Field(default=["^.*$"], description="patterns of the names of queues and exchanges that are replicated")
    apply_delay_s: float = Field(1.0, ge=0, description="how late a backup may write to its queues; what is consumed meanwhile is never written")
    apply_delay_entries_max: int = Field(2_000, ge=0)
    apply_lag_bytes_max: int = Field(
        256 << 20, ge=1 << 20, description="bytes a backup holds that are safe and not in its queues yet; past it, it takes no more"
    )
    log_bytes_max: int = Field(8 << 30, ge=64 << 20, description="size of the replicated log in the broker; older segments are dropped beyond it")
    push_bytes_max: int = Field(16 << 20, ge=1 << 20, description="bytes on their way to one backup")
    memory_bytes_max: int = Field(64 << 20, ge=1 << 20, description="bytes of the log kept in memory for backups that keep up")


class Config(_Table):
    """One node's configuration."""

    node: NodeTable
    broker: BrokerTable
    door: DoorTable
    http: HttpTable
    peers: list[PeerTable] = Field(default=[], description="the other nodes of the group")
    sites: list[SiteTable] = Field(default=[], description="the groups that this one sends log entries to")
    replication: ReplicationTable = Field(default_factory=lambda: ReplicationTable.model_validate({}))

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        ids = [self.node.id, *(peer.id for peer in self.peers)]
        names = [self.node.name, *(peer.name for peer in self.peers)]
        if len(set(ids)) < len(ids) or len(set(names)) < len(names):
            raise ValueError(f"every node of a group needs its own name and its own id; there are {', '.join(names)} with the ids {ids}")
        if self.node.group in [site.remote_id for site in self.sites]:
            raise ValueError(f"the group {self.node.group} cannot be a site of its own")
        return self

    @property
    def names(self) -> dict[int, str]:
        """Name of every node of the group by id."""
        return {self.node.id: self.node.name, **{peer.id: peer.name for peer in self.peers}}

    def settings(self) -> NodeSettings:
        """What the pure core needs of it."""
        r = self.replication
        return NodeSettings(
            self.node.id,
            self.names,
            strict=r.mode == "strict",
            restart_alone=r.restart_alone,
            backup_timeout_s=r.backup_timeout_s,
            heartbeat_s=r.heartbeat_s,
        )


def _explain(error: ValidationError, path: Path) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"]) or "the file as a whole"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {problem['input']!r}); allowed here: {', '.join(_allowed(problem['loc']))}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            shown = "" if isinstance(problem["input"], dict) else f" (value {problem['input']!r})"
            lines.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    return f"{path}: " + "; ".join(lines)


def _allowed(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation: Any = model.model_fields[part].annotation
        model = next((a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)), annotation)
    return sorted(model.model_fields)


def load(path: Path) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: It cannot be read, is not TOML, or has unknown, missing or wrong keys (all of them are named).
    """
    try:
        return Config.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", todo="name a file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(_explain(error, path), todo="docs/configuration.md has a sample with every key") from error


def sample() -> str:
    """A TOML sample with every key, its meaning and its default, for docs/configuration.md."""
    required = {
        "node.name": '"e1"',
        "node.id": "1",
        "node.group": '"east"',
        "broker.url": '"amqp://lrq:SECRET@127.0.0.1:5672"',
        "door.listen": '"127.0.0.1:5673"',
        "http.listen": '"127.0.0.1:8080"',
        "peers.name": '"e2"',
        "peers.id": "2",
        "peers.door": '"amqp://lrq:SECRET@192.0.2.2:5673"',
        "peers.http": '"http://192.0.2.2:8080"',
        "sites.remote_id": '"west"',
        "sites.doors": '["amqp://lrq:SECRET@198.51.100.1:5673"]',
    }
    tables: list[tuple[str, str, type[BaseModel]]] = [
        ("node", "[node]", NodeTable),
        ("broker", "[broker]", BrokerTable),
        ("door", "[door]", DoorTable),
        ("http", "[http]", HttpTable),
        ("peers", "[[peers]]", PeerTable),
        ("sites", "[[sites]]", SiteTable),
        ("replication", "[replication]", ReplicationTable),
    ]
    lines: list[str] = []
    for prefix, heading, model in tables:
        lines += [heading]
        for name, info in model.model_fields.items():
            if info.description:
                lines.append(f"# {info.description}")
            lines.append(f"{name} = {required.get(f'{prefix}.{name}') or _toml(info.default)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return "'" + value + "'" if "\\" in value or "^" in value else f'"{value}"'
    return str(value)
