"""`lrq-ha version`, `topology` and `uri`: what runs where, who follows whom, and where clients connect."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from lrq_ha import __version__
from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, ask_all
from lrq_ha.overview.nodes import primary_of
from lrq_ha.overview.text import align_table, format_cell, one_line
from lrq_ha.replication.positions import epoch_name
from lrq_ha.sidecar import config as configuration

from .commands import add_group, find_group
from .list_nodes import add_command, find_targets, named

_HEADINGS = ("NODE", "LRQ-HA", "RABBITMQ")
_WILDCARDS = frozenset({"0.0.0.0", "::"})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands."""
    version = add_command(subparsers, "version", "the versions of this command, the sidecars and their brokers", "Asks each node, or NODE.", "")
    version.add_argument("node", metavar="NODE", nargs="?", help="only this node")
    version.set_defaults(run=_version)
    topology = add_command(subparsers, "topology", "who follows whom, as a tree", "Shows each group: its primary, its backups, and its sites.", "")
    topology.set_defaults(run=_topology)
    uri = add_command(
        subparsers,
        "uri",
        "the doors' addresses, as clients take them",
        "Prints the addresses of a group's doors. No password is printed: the sidecars' is none of a client's.",
        "examples:\n  lrq-ha uri --user app\n  lrq-ha uri --for java\n  lrq-ha uri --role primary",
    )
    add_group(uri)
    uri.add_argument("--role", choices=("all", "primary"), default="all", help="all doors, for clients that try one after the other (default), "
                     "or the primary's alone")  # fmt: skip
    uri.add_argument("--user", metavar="USER", default="", help="the user in amqp:// addresses")
    uri.add_argument("--vhost", metavar="VHOST", default="/", help="the virtual host in amqp:// addresses (default: /)")
    uri.add_argument("--for", dest="client", choices=tuple(FORMS), default="uri", help="the form: amqp:// addresses (default), or that of a client")
    uri.set_defaults(run=_uri)


# ---- version ---------------------------------------------------------------------------------------------------------


def _version(args: argparse.Namespace) -> int:
    targets = find_targets(args)
    reports = ask_all([named(args.node, targets)] if args.node else targets)
    rows = [
        (
            report.target.name,
            str(report.status.get("software") or "-") if report.status else "no answer",
            str((report.status.get("broker") or {}).get("version") or "-"),
        )
        for report in reports
    ]
    print("\n".join([f"this command: lrq-ha {__version__}", *align_table(_HEADINGS, rows)]))
    return 1 if all(report.failure for report in reports) else 0


# ---- topology --------------------------------------------------------------------------------------------------------


def _topology(args: argparse.Namespace) -> int:
    reports = ask_all(find_targets(args))
    print("\n".join(draw_topology(reports)))
    return 1 if all(report.failure for report in reports) else 0


def draw_topology(reports: Sequence[Report]) -> list[str]:
    """The lines of a tree for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(report.target.group for report in reports):
        nodes = [report for report in reports if report.target.group == group]
        primary = primary_of(group, reports)
        if primary is None:
            lines.append(f"{group}: no primary")
            lines += [f"  ? {report.target.name}  {_role(report)}" for report in nodes]
            continue
        lines.append(f"{group}: epoch {epoch_name(primary.epoch())}")
        lines.append(f"  {primary.target.name}  {_role(primary)}")
        members, peers = primary.status.get("members") or [], primary.status.get("peers") or {}
        for report in nodes:
            if report is not primary:
                place = "in sync" if report.target.name in members else "not in sync"
                lag = (peers.get(report.target.name) or {}).get("lag_entries")
                lines.append(f"    + {report.target.name}  {_role(report)}, {place}, lacks {format_cell(lag)} entries")
        for site, session in (primary.status.get("sessions") or {}).items():
            lines.append(f"    > site {site}  {'connected' if session.get('connected') else 'not connected'}")
    return [one_line(line) for line in lines]


def _role(report: Report) -> str:
    return str(report.status.get("role", "?")) if report.status else "no answer"


# ---- uri -------------------------------------------------------------------------------------------------------------

Door = tuple[str, str, str, int]  # node, scheme, host, port


def _uris(doors: Sequence[Door], user: str, vhost: str) -> list[str]:
    name = f"{quote(user, safe='')}@" if user else ""
    return [f"{scheme}://{name}{_bracketed(host)}:{port}/{quote(vhost, safe='')}" for _, scheme, host, port in doors]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _haproxy(doors: Sequence[Door], user: str, vhost: str) -> list[str]:
    return [f"server {node} {_bracketed(host)}:{port} check" for node, _, host, port in doors]


def _pika(doors: Sequence[Door], user: str, vhost: str) -> list[str]:
    return ["[", *(f"    pika.URLParameters({json.dumps(uri)})," for uri in _uris(doors, user, vhost)), "]"]


def _java(doors: Sequence[Door], user: str, vhost: str) -> list[str]:
    addresses = ",".join(f"{_bracketed(host)}:{port}" for _, _, host, port in doors)
    return [f'connectionFactory.newConnection(Address.parseAddresses("{addresses}"))']


def _dotnet(doors: Sequence[Door], user: str, vhost: str) -> list[str]:
    endpoints = ", ".join(f'new AmqpTcpEndpoint("{host}", {port})' for _, _, host, port in doors)
    return [f"connectionFactory.CreateConnectionAsync(new List<AmqpTcpEndpoint> {{ {endpoints} }})"]


FORMS: Mapping[str, Callable[[Sequence[Door], str, str], list[str]]] = {
    "uri": _uris, "pika": _pika, "java": _java, "dotnet": _dotnet, "haproxy": _haproxy,
}  # fmt: skip


def _uri(args: argparse.Namespace) -> int:
    targets = find_group(find_targets(args), args.group)
    config = next((target.config for target in targets if target.config), None)
    if config is None:
        raise LrqError("no configuration of a node is known", todo="Name one with --config FILE")
    doors = read_doors(config)
    if args.role == "primary":
        reports = ask_all(targets)
        primary = primary_of(targets[0].group, reports)
        if primary is None:
            raise LrqError(f"group {targets[0].group} has no primary that answers", todo="See why with `lrq-ha list`, or print all doors")
        doors = [door for door in doors if door[0] == primary.target.name]
    print("\n".join(FORMS[args.client](doors, args.user, args.vhost)))
    return 0


def read_doors(config: Path) -> list[Door]:
    """The doors that a configuration names, its own first. One that listens on all addresses has this machine's name. Raises ConfigError."""
    found = configuration.read(config)
    host, _, port = found.door.listen.rpartition(":")
    host = host.strip("[]")
    own: Any = (found.node.name, "amqps" if found.door.tls else "amqp", socket.gethostname() if host in _WILDCARDS else host, int(port))
    others = [(peer.name, parts.scheme, parts.hostname or "", parts.port or 0) for peer in found.peers for parts in [urlsplit(peer.door)]]
    return [own, *others]
