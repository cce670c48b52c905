"""The checks of the group, as data. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lrq_ha.overview.text import name_some
from lrq_ha.replication.roles import Role

from ..definitions import compare_names
from .check import Check, Finding, Level, fail, warn
from .facts import BrokerApi, EtcdMember, Facts, Node, Unread
from .version_changes import changes_between, parse_version

CLOCKS_DIFFER_S = 1.0
ETCD_OLDEST = (3, 4)


def _answering(facts: Facts) -> Sequence[Node] | Unread:
    """The other nodes that answer."""
    found = [node for node in facts.others if node.status]
    if facts.others and not found:
        return Unread("no other node answers")
    return found


def _check_sidecar(own: Node, facts: Facts) -> Iterator[Finding]:
    if not own.status:
        yield Finding(Level.SKIPPED, f"this node's sidecar does not run ({own.failure})", command=f"lrq-ha sidecar --config {facts.path}")
    elif own.status.get("role") == Role.STANDALONE.value:
        yield fail(f"this node's sidecar runs, and takes no part: {own.status.get('reason')}", "Mend what the reason names")


def _check_nodes(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    ids = {peer.name: peer.id for peer in facts.config.peers}
    for node in others:
        if not node.status:
            yield warn(f"{node.name} does not answer: {node.failure}", f"Start its sidecar, or correct peers.http of {node.name} and its http.listen")
            continue
        said = node.status.get("node"), node.status.get("group")
        if said != (node.name, facts.config.node.group):
            yield fail(f"{node.http} is node {said[0]} of group {said[1]}, and no {node.name} of group {facts.config.node.group}",
                       f"Correct peers.http of {node.name} here, or [node] there")  # fmt: skip
        elif node.status.get("id", ids[node.name]) != ids[node.name]:
            yield fail(f"{node.name} has id {node.status['id']} and [[peers]] here says {ids[node.name]}",
                       f"Correct peers.id of {node.name} here: the id of a node that has run never changes")  # fmt: skip


def _check_settings(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    here = dict(facts.config.settings().shared)
    for node in others:
        theirs: Mapping[str, Any] = node.status.get("shared") or {}
        differing = [key for key in here if theirs.get(key, here[key]) != here[key]]
        for key in differing:
            yield fail(f"replication.{key} is {here[key]} in {facts.path} and {theirs[key]} on {node.name}",
                       "Make it equal in all configurations, and restart those sidecars, backups first")  # fmt: skip


def _check_doors(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    for node in others:
        if node.door:
            level = fail if node.status else warn
            yield level(f"the door of {node.name} is not reached from here: {node.door}",
                        f"Correct peers.door of {node.name}, its door.listen, or the firewall between")  # fmt: skip


def _check_links(own: Node, facts: Facts) -> Iterator[Finding]:
    running = [own, *facts.others]
    names = {node.name for node in running if node.status}
    for node in running:
        for other, link in (node.status.get("peers") or {}).items():
            problem = link.get("problem")
            if problem and other in names and own.name in (node.name, other):
                yield warn(f"{node.name} says of {other}: {problem}", "Mend what it names")


def _own_running(facts: Facts) -> Node | Unread:
    return facts.own if facts.own.status else Unread("this node's sidecar does not run")


def _check_clocks(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    for node in others:
        if node.ahead_s is not None and abs(node.ahead_s) > CLOCKS_DIFFER_S + node.uncertain_s:
            way = "ahead of" if node.ahead_s > 0 else "behind"
            yield warn(f"the clock of {node.name} is {abs(node.ahead_s):.1f} s {way} this one: times in logs and lags between sites are wrong",
                       command="timedatectl set-ntp true")  # fmt: skip


def _check_software(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    own = facts.own.status.get("software")
    for node in others:
        if own and node.status.get("software") not in (None, own):
            text = f"this node runs lrq-ha {own}, and {node.name} runs {node.status['software']}"
            yield warn(text, "Bring all nodes to one version (docs/operations/maintenance.md)")


def _check_plugins(found: tuple[BrokerApi, Sequence[Node]], _: Facts) -> Iterator[Finding]:
    api, others = found
    here = set(api.plugins)
    for node in others:
        if isinstance(node.logins, Unread) or "plugins" not in node.logins:
            continue
        there = set(node.logins["plugins"])
        if missing := sorted(there - here):
            yield warn(f"the broker of {node.name} has plugins that this one lacks: {name_some(missing)}",
                       command=f"rabbitmq-plugins enable {' '.join(missing)}")  # fmt: skip
        if more := sorted(here - there):
            yield warn(f"this broker has plugins that the one of {node.name} lacks: {name_some(more)}", f"Enable them there, with the command, "
                       f"on {node.name}'s machine", f"rabbitmq-plugins enable {' '.join(more)}")  # fmt: skip


def _with_api(facts: Facts) -> tuple[BrokerApi, Sequence[Node]] | Unread:
    others = _answering(facts)
    if isinstance(facts.api, Unread):
        return facts.api
    return others if isinstance(others, Unread) else (facts.api, others)


def _check_logins(own: Node, facts: Facts) -> Iterator[Finding]:
    here = own.logins
    if isinstance(here, Unread):
        yield Finding(Level.SKIPPED, here.why)
        return
    for node in facts.others:
        if isinstance(node.logins, Unread):
            yield Finding(Level.SKIPPED, node.logins.why)
            continue
        text = compare_names(own.name, dict(here), node.name, dict(node.logins))
        if " differ: " in text:
            replicates = bool(facts.config.definitions.replicate)
            backup = node.name if own.status.get("primary") == own.name else own.name
            yield warn(f"{text}: such a client is locked out after a failover",
                       "" if replicates else "Replicate definitions, or make them equal (docs/operations/definitions.md)",
                       f"lrq-ha definitions take {backup} --config {facts.path} --dry-run" if replicates else "")  # fmt: skip


def _check_broker_versions(others: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    own = facts.own.version or ("" if isinstance(facts.broker, Unread) else facts.broker.version)
    for node in others:
        if not own or not node.version or parse_version(own)[:2] == parse_version(node.version)[:2]:
            continue
        yield warn(f"this broker is RabbitMQ {own}, and the one of {node.name} is {node.version}",
                   "Bring all brokers to one series; until then mind what follows")  # fmt: skip
        for change in changes_between(own, node.version):
            since = ".".join(map(str, change.since))
            uses = change.uses(facts.api) if change.uses and isinstance(facts.api, BrokerApi) else []
            if uses or change.uses is None:
                here = f" Here: {name_some(uses)}." if uses else ""
                yield warn(f"since RabbitMQ {since} {change.text}.{here}", change.todo[:1].upper() + change.todo[1:])


def _check_etcd(members: Sequence[EtcdMember], facts: Facts) -> Iterator[Finding]:
    own_log = facts.own.status.get("log")
    for member in members:
        if member.failure:
            yield warn(f"etcd at {member.endpoint} gives no answer of its majority: {member.failure}",
                       "Start the member, or correct coordination.endpoints, user and password_file")  # fmt: skip
        elif len(parse_version(member.version)) > 0 and parse_version(member.version) < ETCD_OLDEST:
            yield fail(f"etcd at {member.endpoint} is {member.version}", "Install etcd 3.4 or newer")
        elif member.log and own_log and member.log != own_log:
            yield fail(f"the record in etcd at {member.endpoint} is of another group with this name",
                       "Choose another coordination.namespace, equal on all nodes of a group")  # fmt: skip
    if members and all(member.failure for member in members):
        yield fail("etcd does not answer: no node takes over by itself", "Start etcd", "etcdctl endpoint health --cluster")


GROUP_CHECKS: tuple[Check[Any], ...] = (
    Check("sidecar", "this node's sidecar runs, and takes part", lambda facts: facts.own, _check_sidecar,
          "this node's sidecar runs", Level.FAIL, "its reason in `lrq-ha list`"),
    Check("nodes", "each other node answers at `peers.http`, with the name, id and group that it should have", lambda facts: facts.others,
          _check_nodes,           "all other nodes answer, with the names and ids that they should have", Level.FAIL, "`[[peers]]`"),
    Check("settings", "the keys of `[replication]` that have to be equal are equal", _answering, _check_settings,
          "the keys that have to be equal are equal", Level.FAIL, "`[replication]`"),
    Check("doors", "the doors of the other nodes are reached from here", lambda facts: facts.others, _check_doors,
          "all doors are reached from here", Level.FAIL, "`peers.door`, `door.listen`, firewall"),
    Check("links", "the sidecars are connected to each other, both ways", _own_running, _check_links,
          "the sidecars that run are connected", Level.WARN, "what the text names"),
    Check("clocks", "the clocks differ by a second at most", _answering, _check_clocks,
          "the clocks agree", Level.WARN, "`timedatectl set-ntp true`"),
    Check("software", "all nodes run one version of lrq-ha", _answering, _check_software,
          "all nodes run one version", Level.WARN, "[upgrading](maintenance.md#upgrading)"),
    Check("broker-versions", "all brokers are of one series; else, what differs between them and matters here", _answering, _check_broker_versions,
          "the brokers are of one series", Level.WARN, "what the text names"),
    Check("plugins", "all brokers have the plugins of the others", _with_api, _check_plugins,
          "all brokers have equal plugins", Level.WARN, "`rabbitmq-plugins enable PLUGIN`"),
    Check("logins", "all brokers have the users and vhosts of the others", _own_running, _check_logins,
          "all brokers have equal users and vhosts", Level.WARN, "[definitions](definitions.md)"),
    Check("etcd", "each member of etcd answers for the majority, is 3.4 or newer, and has this group's record", lambda facts: facts.etcd, _check_etcd,
          "etcd answers, and has this group's record", Level.FAIL, "`[coordination]`"),
)  # fmt: skip
