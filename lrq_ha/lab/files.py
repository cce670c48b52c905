"""The files of a lab's node: its folder, the broker's configuration and definitions, the sidecar's TOML, and the commands that start both.

Rules:

- Everything listens on 127.0.0.1, unless a node has a network of its own.
- No file of another RabbitMQ on the machine (configuration, plugins, cookie, epmd, data) is read or written.
- Vhosts, users and permissions come from a definitions file that the broker loads while it boots, before it listens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lrq_ha
from lrq_ha.lab.brokers import Installation

#: The vhost that holds all routing queues.
LRQ_VHOST = "lrq"
#: The user of applications, and the sidecars' own.
APP_USER, SIDECAR_USER = "app", "lrq"


#: rabbitmqctl of RabbitMQ 4 is a script for `escript`, a mode of `erl` that an unpacked Erlang has no program for. It takes options from line 3.
_ESCRIPT = """\
#!/bin/sh
options=$(head -n 3 "$1" | sed -n 's/^%%!//p')
exec erl +B -boot no_dot_erlang -noinput $options -run escript start -extra "$@"
"""


@dataclass(frozen=True)
class NodePlan:
    """The data of a node that is known before it starts.

    Attributes:
        name: Name in the lab, as "e1".
        number: The node's id, 1..n within its group.
        directory: The node's own folder, absolute.
        broker_port, dist_port, door_port, http_port: Its ports on 127.0.0.1.
        epmd_port: Port of the lab's epmd.
        tls_port: The broker's port for TLS; 0 if the lab has none. The broker's port without TLS stays open.
        management_port: The port of its management API; 0 if the lab has none.
        proxied: The broker's ports expect the PROXY protocol.
        ca, certificate, key: PEM files of a lab with TLS.
        listens_on: Address that the broker, the door and HTTP listen on.
        host: Address at which the other nodes reach the door and HTTP. Users of the lab reach everything on 127.0.0.1.
    """

    name: str
    number: int
    group: str
    directory: Path
    broker_port: int
    dist_port: int
    door_port: int
    http_port: int
    epmd_port: int
    tls_port: int = 0
    management_port: int = 0
    proxied: bool = False
    ca: Path = Path()
    certificate: Path = Path()
    key: Path = Path()
    listens_on: str = "127.0.0.1"
    host: str = "127.0.0.1"

    @property
    def config(self) -> Path:
        """The sidecar's configuration."""
        return self.directory / "sidecar.toml"

    @property
    def sidecar_log(self) -> Path:
        """Output of the sidecar."""
        return self.directory / "sidecar.log"

    @property
    def broker_log(self) -> Path:
        """Output of the broker."""
        return self.directory / "broker.log"

    def url(self, port: int, user: str, passwords: Mapping[str, str], host: str = "127.0.0.1") -> str:
        """AMQP URL of one of this node's ports for a user."""
        secure = self.tls_port and port != self.broker_port
        return f"amqp{'s' if secure else ''}://{user}:{passwords[user]}@{host}:{port}"


def write_broker(node: NodePlan, installation: Installation, passwords: Mapping[str, str], vhosts: Sequence[str], plugins: Sequence[str], cookie: str,
                 settings: Mapping[str, str]) -> None:
    """Writes the broker's files: configuration with more `settings` or other ones, definitions, enabled plugins and their dependencies, cookie."""
    for folder in ("data", "home", "conf.d", "bin", "plugins"):
        (node.directory / folder).mkdir(parents=True, exist_ok=True)
    link_plugins(node.directory, installation, plugins)
    escript = node.directory / "bin" / "escript"
    escript.write_text(_ESCRIPT)
    escript.chmod(0o700)
    written = {
        "listeners.tcp.1": f"{node.listens_on}:{node.broker_port}",
        "loopback_users": "none",
        "load_definitions": str(node.directory / "definitions.json"),
        "vm_memory_high_watermark.relative": "0.6",
        "disk_free_limit.absolute": "10MB",
        "log.console.level": "info",
    }
    if node.tls_port:
        written |= {"listeners.ssl.1": f"127.0.0.1:{node.tls_port}", "ssl_options.cacertfile": str(node.ca),
                    "ssl_options.certfile": str(node.certificate), "ssl_options.keyfile": str(node.key),
                    "ssl_options.verify": "verify_peer", "ssl_options.fail_if_no_peer_cert": "true"}
    if node.management_port:
        written |= {"management.tcp.ip": "127.0.0.1", "management.tcp.port": str(node.management_port)}
    if node.proxied:
        written["proxy_protocol"] = "true"
    text = "".join(f"{key} = {value}\n" for key, value in (written | dict(settings)).items() if value)
    (node.directory / "rabbitmq.conf").write_text(text)
    (node.directory / "definitions.json").write_text(json.dumps(_definitions(passwords, vhosts), indent=1))
    (node.directory / "definitions.json").chmod(0o600)
    (node.directory / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
    (node.directory / "advanced.config").write_text("[].\n")
    cookie_file = node.directory / "home" / ".erlang.cookie"
    cookie_file.write_text(cookie)
    cookie_file.chmod(0o400)


def link_plugins(directory: Path, installation: Installation, plugins: Sequence[str]) -> None:
    """Gives the broker of a node in `directory` these plugins and their dependencies, of this installation alone."""
    for link in (directory / "plugins").iterdir():
        link.unlink()
    for application in installation.applications(plugins):
        (directory / "plugins" / application.name).symlink_to(application)


def replace_installation(directory: Path, environment: Mapping[str, str], installation: Installation) -> dict[str, str]:
    """Empties the broker of a node in `directory`, and has it run on another installation, with the plugins it had.

    Returns:
        The broker's environment; `environment` is the former one.
    """
    shutil.rmtree(directory / "data")
    (directory / "data").mkdir()
    link_plugins(directory, installation, re.findall(r"\w+", (directory / "enabled_plugins").read_text()))
    return {**environment, "PATH": f"{installation.erlang_bin}:{environment['PATH'].partition(':')[2]}"}


def _definitions(passwords: Mapping[str, str], vhosts: Sequence[str]) -> dict[str, Any]:
    tags: dict[str, list[str]] = {APP_USER: [], SIDECAR_USER: ["administrator", "impersonator"]}
    rights = [(user, vhost, ".*") for user in tags for vhost in ("/", *vhosts)]
    rights += [(APP_USER, LRQ_VHOST, r"^(LRQ_.*|amq\.default)$"), (SIDECAR_USER, LRQ_VHOST, ".*")]
    return {
        "vhosts": [{"name": name} for name in ("/", LRQ_VHOST, *vhosts)],
        "users": [{"name": user, "password": passwords[user], "tags": tags[user]} for user in tags],
        "permissions": [{"user": user, "vhost": vhost, "configure": what, "write": what, "read": what} for user, vhost, what in rights],
    }


def broker_environment(node: NodePlan, installation: Installation) -> dict[str, str]:
    """Environment of the broker and of its command line tools."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
    return inherited | {
        "PATH": f"{installation.erlang_bin}:{node.directory / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(node.directory / "home"),
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_PORT": str(node.epmd_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_CRASH_DUMP_SECONDS": "0",
        # Erlang takes no dots in it, and no name in the lab has an underscore.
        "RABBITMQ_NODENAME": f"{node.name.replace('.', '_')}@localhost",
        "RABBITMQ_DIST_PORT": str(node.dist_port),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONFIG_FILE": str(node.directory / "rabbitmq"),
        "RABBITMQ_CONFIG_FILES": str(node.directory / "conf.d"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(node.directory / "advanced"),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(node.directory / "enabled_plugins"),
        "RABBITMQ_PLUGINS_DIR": str(node.directory / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(node.directory / "data"),
        "RABBITMQ_LOG_BASE": str(node.directory),
        "RABBITMQ_LOGS": "-",
        # With it the server script becomes the Erlang VM instead of waiting for it: the started process is the one to signal.
        "RABBITMQ_ALLOW_INPUT": "true",
    }


def broker_command(installation: Installation) -> list[str]:
    """Command line of the broker."""
    return [str(installation.sbin / "rabbitmq-server"), "-noinput"]


def epmd_command(installation: Installation, port: int) -> list[str]:
    """Command line of the lab's epmd, in the foreground."""
    return [str(installation.erlang_bin / "epmd"), "-address", "127.0.0.1", "-port", str(port)]


def write_sidecar(node: NodePlan, peers: Sequence[NodePlan], sites: Mapping[str, Sequence[NodePlan]], passwords: Mapping[str, str],
                  door_keys: Mapping[str, Any], definitions: Sequence[str] = (), coordination: Mapping[str, Any] | None = None) -> None:
    """Writes the sidecar's configuration.

    Args:
        node: The node it is for.
        peers: The other nodes of its group.
        sites: Destination groups and their nodes.
        passwords: Password of each user.
        door_keys: More keys of [door].
        definitions: What operators set at a broker that is replicated.
        coordination: Keys of [coordination]; None: static coordination.
    """
    def door(other: NodePlan) -> str:
        return other.url(other.door_port, SIDECAR_USER, passwords, other.host)

    secure = bool(node.tls_port)
    files = {"certificate": str(node.certificate), "key": str(node.key), "ca": str(node.ca)}
    tables: list[tuple[str, dict[str, Any]]] = [
        ("[node]", {"name": node.name, "id": node.number, "group": node.group}),
        ("[broker]", {"url": node.url(node.tls_port or node.broker_port, SIDECAR_USER, passwords), "proxy_protocol": node.proxied}),
        ("[door]", {"listen": f"{node.listens_on}:{node.door_port}", **door_keys}),
        *([("[door.tls]", files | {"verify": "optional"}), ("[tls]", files)] if secure else []),
        ("[http]", {"listen": f"{node.listens_on}:{node.http_port}"}),
        *(("[[peers]]", {"name": peer.name, "id": peer.number, "door": door(peer), "http": f"http://{peer.host}:{peer.http_port}"})
          for peer in peers),
        *(("[[sites]]", {"remote_id": site, "doors": [door(other) for other in nodes]}) for site, nodes in sites.items()),
        *([("[definitions]", {"replicate": list(definitions), "management": f"http://127.0.0.1:{node.management_port}", "interval_s": 1.0})]
          if node.management_port else []),
        ("[replication]", {"coordination": "static" if coordination is None else "etcd", "mode": "available"}),
        *([("[coordination]", dict(coordination))] if coordination is not None else []),
    ]
    # JSON's strings, numbers and lists are TOML's too.
    text = "\n".join("\n".join((head, *(f"{key} = {json.dumps(value)}" for key, value in table.items()), "")) for head, table in tables)
    node.config.write_text(text)
    node.config.chmod(0o600)


def python_environment() -> dict[str, str]:
    """Environment in which `python -m lrq_ha…` finds this package, installed or not."""
    here = str(Path(lrq_ha.__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{here}:{before}" if before else here, "PYTHONUNBUFFERED": "1"}


def sidecar_command(node: NodePlan) -> list[str]:
    """Command line of the sidecar."""
    return [sys.executable, "-m", "lrq_ha.cli.main", "sidecar", "--config", str(node.config)]
