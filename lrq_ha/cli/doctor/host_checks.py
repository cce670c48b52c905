"""The checks of this machine, as data. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator
from shlex import quote
from typing import Any

from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.open_files import count_needed

from .check import Check, Finding, Level, fail, warn
from .facts import Facts, Host

EXPIRES_SOON_S = 30 * 86_400.0
SWAPPINESS_MAX = 10
_NEVER = 2  # vm.overcommit_memory: no more than there is


def _check_files(host: Host, _: Facts) -> Iterator[Finding]:
    for text, command in host.exposed:
        yield fail(text, "" if command else "Correct the path, or give the sidecar's user the right to read it", command)


def _check_addresses(host: Host, facts: Facts) -> Iterator[Finding]:
    own = facts.own.status
    if own and (own.get("node"), own.get("group")) != (facts.config.node.name, facts.config.node.group):
        yield fail(
            f"another sidecar answers at {facts.own.http}: node {own.get('node')} of group {own.get('group')}",
            "Give each sidecar of this machine addresses of its own",
        )
    elif not own:
        for key, why in host.busy.items():
            listen = getattr(facts.config.http if key.startswith("http") else facts.config.door, key.partition(".")[2])
            port = listen.rpartition(":")[2]
            yield fail(
                f"{key} = {listen} cannot be listened on: {why}",
                f"Stop the process that the command shows, or change {key}",
                f"ss -ltnp {quote(f'sport = :{port}')}",
            )


def _check_protection(host: Host, facts: Facts) -> Iterator[Finding]:
    if text := configuration.unprotected(facts.config):
        text, _, todo = text.partition(": ")
        yield warn(text, todo[:1].upper() + todo[1:])


def _check_certificates(host: Host, _: Facts) -> Iterator[Finding]:
    for each in host.certificates:
        left_s = each.expires - host.now
        if left_s <= 0:
            yield fail(f"the certificate of [{each.table}], {each.file}, has expired", "Replace the file: the sidecar reads it again by itself")
        elif left_s < EXPIRES_SOON_S:
            day = time.strftime("%Y-%m-%d", time.gmtime(each.expires))
            yield warn(f"the certificate of [{each.table}], {each.file}, expires on {day}", "Replace the file: the sidecar reads it again by itself")
        if each.untrusted:
            yield warn(
                f"the authorities of tls.ca do not vouch for the certificate of [{each.table}], {each.file}: {each.untrusted}",
                "Other nodes with this tls.ca refuse it: give the certificate with its chain, or name its authority in tls.ca",
            )


def _check_open_files(host: Host, facts: Facts) -> Iterator[Finding]:
    needed = count_needed(facts.config.door.connections_max)
    running = facts.own.status.get("files_max")
    allowed = running if isinstance(running, int) and running >= 0 else host.files_max
    if allowed < needed:
        whose = "the sidecar" if running else "a process that is started from here"
        yield warn(
            f"door.connections_max = {facts.config.door.connections_max} needs {needed} open files, and {whose} may have {allowed}: "
            "the door takes fewer connections",
            f"Put LimitNOFILE={needed} into the unit of the sidecar, or lower door.connections_max",
        )


def _check_memory(host: Host, _: Facts) -> Iterator[Finding]:
    if host.swap and host.swappiness > SWAPPINESS_MAX:
        yield warn(
            f"this machine swaps early (vm.swappiness = {host.swappiness}): confirms wait for pages of the broker",
            command=f"sysctl -w vm.swappiness={SWAPPINESS_MAX}",
        )
    if host.overcommit == _NEVER:
        yield warn(
            "vm.overcommit_memory = 2: RabbitMQ's Erlang VM reserves more memory than it uses, and may not get it",
            command="sysctl -w vm.overcommit_memory=0",
        )


HOST_CHECKS: tuple[Check[Any], ...] = (
    Check("files", "no other user may use the files with passwords, tokens and keys", lambda facts: facts.host, _check_files,
          "the files with secrets are the sidecar's alone", Level.FAIL, "`chmod go-rwx FILE`"),
    Check("addresses", "door and HTTP addresses are free, or this sidecar's", lambda facts: facts.host, _check_addresses,
          "the addresses are free, or this sidecar's", Level.FAIL, "end the other process (`ss -ltnp`), or change the key"),
    Check("token", "commands from other machines need a token", lambda facts: facts.host, _check_protection,
          "commands need a token, or come from this machine", Level.WARN, "`http.token_file`"),
    Check("certificates", "certificates are valid for 30 days, and `tls.ca` vouches for them", lambda facts: facts.host, _check_certificates,
          "no certificate expires within 30 days", Level.FAIL, "replace the file"),
    Check("open-files", "the process may open two files for each connection", lambda facts: facts.host, _check_open_files,
          "enough files may be open", Level.WARN, "`LimitNOFILE` of the unit"),
    Check("memory", "the kernel neither swaps early nor refuses Erlang's reservations", lambda facts: facts.host, _check_memory,
          "the kernel's settings of memory suit a broker", Level.WARN, "`sysctl -w vm.swappiness=10`"),
)  # fmt: skip
