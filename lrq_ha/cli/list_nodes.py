"""The nodes of a group over the sidecars' HTTP: their addresses, their status, `lrq-ha list`; commands.py sends them commands.

Rules: the list of nodes comes from a lab's lab.json or from one node's configuration; every request has a time limit; a node
that does not answer is shown as such and never hides the others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from broker_plugin.amqp.tls import client_files
from lrq_ha.direct_http import PLAIN, HttpAccess
from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, Target, ask_all, begin_asking, describe_failure, url_of_listener
from lrq_ha.overview.nodes import describe_coordination, describe_role, node_table, primaries_of, primary_of, values_of
from lrq_ha.overview.sites import site_lines
from lrq_ha.overview.text import align_table, one_line, wrap_remark
from lrq_ha.replication.positions import epoch_name
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.http.tokens import read_tokens
from lrq_ha.sidecar.tables import TlsTable

#: The time that background requests may cost a command.
ASKING_TIMEOUT_S = 2.0
#: A promotion waits for other nodes.
COMMAND_TIMEOUT_S = 60.0
WATCH_INTERVAL_S = 1.0
CONFIG_VARIABLE = "LRQ_HA_CONFIG"
LAB_DIRECTORY = Path(".lab")

_WHERE = f"""\
The nodes are taken from --dir (a lab), --config (that node and its peers), the configuration named by the environment
variable {CONFIG_VARIABLE}, or the lab in ./{LAB_DIRECTORY}, whichever comes first.
"""


# ---- the list of nodes -----------------------------------------------------------------------------------------------


def find_targets(args: argparse.Namespace) -> list[Target]:
    """The nodes meant by the options of a command (see the help of `lrq-ha list`).

    Raises:
        LrqError: No source of nodes, or it cannot be used.
    """
    token_file: Path | None = args.token_file
    if args.dir:
        return _from_lab(args.dir / "lab.json", token_file, args.ca)
    if config := args.config or _named_config():
        return _from_config(config, token_file, args.ca)
    if (default := LAB_DIRECTORY / "lab.json").exists():
        return _from_lab(default, token_file, args.ca)
    raise LrqError(
        f"no nodes are known: there is no {default} here and {CONFIG_VARIABLE} is not set",
        todo="Name a node's configuration with --config FILE or a lab's folder with --dir DIR, or start a lab with `lrq-ha lab up`",
    )


def find_config(config: Path | None) -> Path:
    """The configuration file that a command is given, or else the environment names. Raises LrqError if there is neither."""
    if path := config or _named_config():
        return path
    raise LrqError("no node is named", todo=f"Name its configuration with --config FILE, or in {CONFIG_VARIABLE}")


def _named_config() -> Path | None:
    return Path(name) if (name := os.environ.get(CONFIG_VARIABLE)) else None


def _from_lab(file: Path, token_file: Path | None, ca: str) -> list[Target]:
    try:
        groups = json.loads(file.read_text("utf-8"))["groups"]
        access = _access([], token_file, TlsTable.model_validate({"ca": ca}))
        targets = [
            Target(name, group, node["http"].rstrip("/"), Path(node["config"]) if "config" in node else None, access)
            for group, of in groups.items()
            for name, node in of["nodes"].items()
        ]
        if not targets or not all(target.http.startswith("http://") for target in targets):
            raise ValueError("nodes with an http:// address")
        return targets
    except OSError as error:
        raise LrqError(f"{file} cannot be read: {error.strerror}", todo="Is the lab up? `lrq-ha lab up` starts it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LrqError(f"{file} is not the description of a lab ({error!r})", todo="Start the lab again") from error


def _from_config(file: Path, token_file: Path | None, ca: str) -> list[Target]:
    return targets_of(configuration.read(file), file, token_file, ca)


def targets_of(config: configuration.Config, file: Path, token_file: Path | None, ca: str) -> list[Target]:
    """The nodes of a configuration: its own first. Raises LrqError if a file that requests need cannot be used."""
    own = url_of_listener(config.http.listen, tls=bool(config.http.tls))
    nodes = [(config.node.name, own, file), *((peer.name, peer.http.rstrip("/"), None) for peer in config.peers)]
    if token_file is None and config.http.token_file:
        token_file = Path(config.http.token_file)
    access = _access([url for _, url, _ in nodes], token_file, config.tls.model_copy(update={"ca": ca} if ca else {}))
    return [Target(name, config.node.group, url, where, access) for name, url, where in nodes]


def _access(urls: Sequence[str], token_file: Path | None, tls: TlsTable) -> HttpAccess:
    """Token and TLS for requests to these URLs. Raises LrqError if a file that they need cannot be used."""
    token = read_tokens(token_file)[0] if token_file else ""
    uses_tls = any(url.startswith("https:") for url in urls)
    files = client_files(tls.ca, tls.certificate, tls.key, tls.minimum_version) if uses_tls else None
    return HttpAccess(token, files.context if files else None) if token or files else PLAIN


def named(name: str, targets: Sequence[Target]) -> Target:
    for target in targets:
        if target.name == name:
            return target
    raise LrqError(f"there is no node {name}", todo=f"Known nodes: {', '.join(target.name for target in targets)}")


# ---- asking ----------------------------------------------------------------------------------------------------------


class Asking:
    """Queries nodes in the background, from now on."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._until = time.monotonic() + ASKING_TIMEOUT_S
        self._answers = [begin_asking(target) for target in dict.fromkeys(targets)]

    def reports(self) -> list[Report]:
        """The status of the nodes that have answered ASKING_TIMEOUT_S after it began, in the order given."""
        wait(self._answers, max(0.0, self._until - time.monotonic()))
        reports = [answer.result() for answer in self._answers if answer.done()]
        return [report for report in reports if report.status]


def tell(target: Target, command: str, body: dict[str, Any], longer_s: float = 0.0) -> str:
    """Sends a command to a node and returns its answer. `longer_s`: seconds that it may take beyond the usual limit.

    Raises:
        LrqError: The node refuses, with its reason, or does not answer in time.
    """
    url = f"{target.http}/{command}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with target.access.open(request, timeout=COMMAND_TIMEOUT_S + longer_s, authorized=True) as answer:
            return _text(answer.read())
    except urllib.error.HTTPError as refusal:
        raise refused(target, refusal) from refusal
    except TimeoutError as error:
        raise LrqError(
            f"{target.name} has not answered within {COMMAND_TIMEOUT_S + longer_s:g} s (POST {url}); it may still do it",
            todo="Look with `lrq-ha list` before trying again",
            retriable=True,
        ) from error
    except (OSError, http.client.HTTPException) as error:
        why = describe_failure(error, COMMAND_TIMEOUT_S + longer_s)
        raise LrqError(f"{target.name} does not answer (POST {url}: {why})", todo="Is its sidecar running?", retriable=True) from error


def fetch(target: Target, path: str) -> Any:
    """A node's answer to GET, with its token.

    Raises:
        LrqError: The node refuses, with its reason, or does not answer in time.
    """
    url = f"{target.http}/{path}"
    try:
        with target.access.open(url, timeout=COMMAND_TIMEOUT_S, authorized=True) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refusal:
        raise refused(target, refusal) from refusal
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = describe_failure(error, COMMAND_TIMEOUT_S)
        raise LrqError(f"{target.name} does not answer (GET {url}: {why})", todo="Is its sidecar running?", retriable=True) from error


def refused(target: Target, refusal: urllib.error.HTTPError) -> LrqError:
    """A node's error answer, in its own words."""
    with refusal:
        return LrqError(_text(refusal.read()) or f"{target.name} answered {refusal.code} to {refusal.url}")


def _text(body: bytes) -> str:
    try:
        return one_line(str(json.loads(body)["text"]))
    except (ValueError, KeyError, TypeError):
        return one_line(body.decode(errors="replace").strip())


# ---- showing ---------------------------------------------------------------------------------------------------------


def as_text(reports: Sequence[Report], width: int | None) -> str:
    """The nodes as an aligned table, and below it each one's role start and reason; then the sites and receive queues of each primary.

    A backup's lag and its place in the in-sync set come from its primary, if that answers.

    Args:
        reports: The nodes' status.
        width: Columns that a line of a reason may have, unless one word is longer; None: each reason is one line.
    """
    table = node_table(reports)
    name_width = max(len(table.headings[0]), *(len(one_line(row[0])) for row in table.rows))
    reasons = [line for name, why in table.remarks for line in wrap_remark(one_line(name).ljust(name_width), why, width)]
    groups = dict.fromkeys(report.target.group for report in reports)
    sites = [line for group in groups if (primary := primary_of(group, reports)) for line in site_lines(group, primary.status, width)]
    etcd = [line for group in groups if (line := describe_coordination(group, reports))]
    return "\n".join([*align_table(table.headings, table.rows), *([""] if reasons else []), *reasons, *etcd, *sites])


def say_if_several(reports: Sequence[Report]) -> None:
    """Names all nodes that claim to be primary, if there are several."""
    for group in dict.fromkeys(report.target.group for report in reports):
        primaries = primaries_of(group, reports)
        if len(primaries) > 1:
            said = ", ".join(f"{report.target.name} (epoch {epoch_name(report.epoch())})" for report in primaries)
            print(f"several nodes of group {group} say that they are primary: {said}; the highest epoch counts", file=sys.stderr)


def as_json(reports: Sequence[Report]) -> str:
    """The nodes as one line of JSON: a list of {name, group, http, answers, failure, status}."""
    return json.dumps(values_of(reports))


def as_tsv(reports: Sequence[Report]) -> str:
    """The nodes as lines of cells with tabs between, below a line of headings; the last cell is the reason."""
    table = node_table(reports)
    rows = [(*row, describe_role(report)) for row, report in zip(table.rows, reports)]
    return "\n".join("\t".join(map(one_line, row)) for row in ((*table.headings, "REASON"), *rows))


# ---- the commands ----------------------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `list`."""
    show = add_command(
        subparsers,
        "list",
        "show every node: role, epoch, positions in the log, lag",
        "Asks every node and shows what it says. LAG and LAG S are what a backup lacks of its primary's log: entries, seconds. "
        "LOG LEFT: so much may still be written before the broker drops what that node needs next. Below the table stands since when each node has "
        "its role, and why; then the sites to which a group sends, and its receive queues, if there are any. LEFT: as LOG LEFT, for the "
        "entries that a site needs. All that a node says is in --format json.",
        "Exit code 0 if at least one node answered, 1 if none did.",
    )
    show.add_argument("--watch", action="store_true", help=f"again every {WATCH_INTERVAL_S:g} s until Ctrl-C")
    show.add_argument("--format", choices=("text", "json", "tsv"), default="text", help="json: one line, one list; tsv: the table, with tabs "
                      "(default: %(default)s)")
    show.set_defaults(run=_list)


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, description: str, epilog: str, *, ca: bool = True,
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Adds a command that asks nodes. `ca`: it gets the option --ca; else the command has one of its own. `aliases`: its other names."""
    parser = subparsers.add_parser(
        name,
        aliases=aliases,
        help=summary,
        description=description,
        epilog=f"{_WHERE}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="configuration of a node: it and its peers are asked")
    where.add_argument("--dir", type=Path, metavar="DIR", help="folder of a lab: all of its nodes are asked")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="has the nodes' token (default: http.token_file of the configuration)")
    if ca:
        parser.add_argument(
            "--ca", default="", metavar="FILE", help="who may sign the nodes' certificates for https:// (PEM; default: [tls] of the configuration)"
        )
    return parser


def terminal_width() -> int | None:
    """Columns of the terminal; None if standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


_FORMATS: Mapping[str, Callable[[Sequence[Report]], str]] = {
    "text": lambda reports: as_text(reports, terminal_width()), "json": as_json, "tsv": as_tsv,
}  # fmt: skip


def _list(args: argparse.Namespace) -> int:
    while True:
        # Found each time: a lab may have been started again on other ports.
        reports = ask_all(find_targets(args))
        if args.watch and args.format == "text":
            # On a terminal each table takes the place of the one before; else an empty line parts them.
            print("\x1b[H\x1b[2J", end="") if sys.stdout.isatty() else print()
        print(_FORMATS[args.format](reports), flush=True)
        say_if_several(reports)
        if not args.watch:
            return 1 if all(report.failure for report in reports) else 0
        time.sleep(WATCH_INTERVAL_S)
