"""The facts that the checks judge. The readers of this package make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker_plugin.apply.broker_rights import MissingRight
from lrq_ha.sidecar.config import Config


@dataclass(frozen=True)
class Unread:
    """Facts that could not be read. `why`: the reason; `command`: mends it."""

    why: str
    command: str = ""


@dataclass(frozen=True)
class Certificate:
    """A certificate that a sidecar shows.

    Attributes:
        table: The table of the configuration that names it.
        file: Its file.
        expires: Unix time; 0: it has expired.
        untrusted: Why `tls.ca` does not vouch for it; empty: it does.
    """

    table: str
    file: str
    expires: float
    untrusted: str = ""


@dataclass(frozen=True)
class Host:
    """This machine.

    Attributes:
        now: Unix time.
        exposed: Files with secrets that others may use, and the command against it.
        busy: The keys with addresses that cannot be listened on, and why.
        files_max: Open files that this process may have.
        swap: There is swap.
        swappiness: vm.swappiness; -1: not known.
        overcommit: vm.overcommit_memory; -1: not known.
        certificates: What this node shows to others.
    """

    now: float
    exposed: Sequence[tuple[str, str]] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    files_max: int = 1 << 20
    swap: bool = False
    swappiness: int = -1
    overcommit: int = 0
    certificates: Sequence[Certificate] = ()


@dataclass(frozen=True)
class Broker:
    """The own broker, as the sidecar's user sees it over AMQP.

    Attributes:
        version: Its version; empty: no vhost lets the user in.
        missing: Of each vhost that was tried: the right that is missing; None: none is.
        stream: Why it makes no stream; empty: it does; None: it was not tried.
        refused_bytes: The size of a message that the door takes and the broker does not; 0: none was found.
    """

    version: str
    missing: Mapping[str, MissingRight | None] = field(default_factory=dict)
    stream: str | None = ""
    refused_bytes: int = 0


@dataclass(frozen=True)
class BrokerApi:
    """What the own broker's management API says (its own names)."""

    overview: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    queues: Sequence[Mapping[str, Any]] = ()
    connections: Sequence[Mapping[str, Any]] = ()
    policies: Sequence[Mapping[str, Any]] = ()
    users: Sequence[str] = ()
    vhosts: Sequence[str] = ()

    @property
    def plugins(self) -> list[str]:
        return sorted(self.node.get("enabled_plugins", []))


@dataclass(frozen=True)
class Node:
    """A node of the group, as its sidecar's HTTP says.

    Attributes:
        name, http: As the configuration has them.
        status: The answer to GET /status; empty: there was none.
        failure: Why there was none.
        ahead_s: How far its clock is ahead of this machine's; None: it does not say.
        uncertain_s: How wrong `ahead_s` may be.
        door: Why its door is not reached from here; empty: it is.
        logins: The answer to GET /definitions, or why there is none.
    """

    name: str
    http: str
    status: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    ahead_s: float | None = None
    uncertain_s: float = 0.0
    door: str = ""
    logins: Mapping[str, Any] | Unread = Unread("it was not asked")

    @property
    def version(self) -> str:
        """Its broker's version; empty: not known."""
        return str((self.status.get("broker") or {}).get("version") or "")


@dataclass(frozen=True)
class EtcdMember:
    """A member of etcd. `failure`: why it gives no linearizable answer; `log`: the log that the group's record names; empty: none."""

    endpoint: str
    version: str = ""
    failure: str = ""
    log: str = ""


@dataclass(frozen=True)
class Facts:
    """All that is known.

    Attributes:
        path: The configuration's file.
        config: The configuration.
        host: This machine.
        own: This node's sidecar.
        others: The other nodes of the group.
        levels: The queues that the log knows, or why they are not known.
        broker: The own broker, over AMQP.
        api: Its management API.
        etcd: The members, or why there are none.
    """

    path: Path
    config: Config
    host: Host
    own: Node
    others: Sequence[Node]
    levels: Sequence[Mapping[str, str]] | Unread
    broker: Broker | Unread
    api: BrokerApi | Unread
    etcd: Sequence[EtcdMember] | Unread
