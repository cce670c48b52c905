"""The nodes of a group over the sidecars' HTTP: which there are, what they say, `lrq-ha list`; orders.py tells them something.

Rules: which nodes there are comes from a lab's lab.json or from one node's configuration; every question has a time limit; a node
that does not answer is shown as such and never hides the others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lrq_ha.direct_http import NOT_HTTP, http_open
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.positions import epoch_name
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration

from .text import one_line

STATUS_TIMEOUT_S = 2.0
#: A promotion waits for other nodes.
COMMAND_TIMEOUT_S = 60.0
WATCH_INTERVAL_S = 1.0
ASKED_AT_ONCE_MAX = 16
CONFIG_VARIABLE = "LRQ_HA_CONFIG"
LAB_DIRECTORY = Path(".lab")
NO_ANSWER = "no answer"

_HEADINGS = ("NODE", "GROUP", "ROLE", "EPOCH", "END", "SAFE", "APPLIED", "LAG", "LAG BYTES", "LAG S", "LOG LEFT", "IN SYNC", "SINCE / REASON")
#: Columns of numbers, which stand to the right.
_NUMBERS = frozenset({"END", "SAFE", "APPLIED", "LAG", "LAG BYTES", "LAG S", "LOG LEFT"})

_WHERE = f"""\
The nodes are taken from --dir (a lab), --config (that node and its peers), the configuration named by the environment
variable {CONFIG_VARIABLE}, or the lab in ./{LAB_DIRECTORY}, whichever comes first.
"""


@dataclass(frozen=True)
class Target:
    """A node that can be asked. `http` is the base URL of its sidecar, without a slash at the end."""

    name: str
    group: str
    http: str


@dataclass(frozen=True)
class Report:
    """What a node said. `status` is empty if it did not answer; then `failure` says what was tried and what happened."""

    target: Target
    status: dict[str, Any]
    failure: str = ""

    @property
    def is_primary(self) -> bool:
        return self.status.get("role") == Role.ACTIVE.value or bool(self.status.get("serving"))

    def epoch(self) -> int:
        """Its epoch; 0 if it names none."""
        found = self.status.get("epoch")
        return found if isinstance(found, int) else 0


# ---- which nodes there are -------------------------------------------------------------------------------------------


def find_targets(config: Path | None, directory: Path | None) -> list[Target]:
    """The nodes meant by the options of a command (see the help of `lrq-ha list`).

    Raises:
        LrqError: No source of nodes, or it cannot be used.
    """
    if directory:
        return _from_lab(directory / "lab.json")
    if config := config or (Path(name) if (name := os.environ.get(CONFIG_VARIABLE)) else None):
        return _from_config(config)
    if (default := LAB_DIRECTORY / "lab.json").exists():
        return _from_lab(default)
    raise LrqError(
        f"no nodes are known: there is no {default} here and {CONFIG_VARIABLE} is not set",
        todo="Name a node's configuration with --config FILE or a lab's folder with --dir DIR, or start a lab with `lrq-ha lab up`",
    )


def _from_lab(file: Path) -> list[Target]:
    try:
        groups = json.loads(file.read_text("utf-8"))["groups"]
        targets = [Target(name, group, node["http"].rstrip("/")) for group, of in groups.items() for name, node in of["nodes"].items()]
        if not targets or not all(target.http.startswith("http://") for target in targets):
            raise ValueError("nodes with an http:// address")
        return targets
    except OSError as error:
        raise LrqError(f"{file} cannot be read: {error.strerror}", todo="Is the lab up? `lrq-ha lab up` starts it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LrqError(f"{file} is not the description of a lab ({error!r})", todo="Start the lab again") from error


def _from_config(file: Path) -> list[Target]:
    config = configuration.read(file)
    host, _, port = config.http.listen.rpartition(":")
    # A sidecar that listens on all addresses is reached on this machine's own.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    own = Target(config.node.name, config.node.group, f"http://{host}:{port}")
    return [own, *(Target(peer.name, config.node.group, peer.http.rstrip("/")) for peer in config.peers)]


def named(name: str, targets: Sequence[Target]) -> Target:
    for target in targets:
        if target.name == name:
            return target
    raise LrqError(f"there is no node {name}", todo=f"Known nodes: {', '.join(target.name for target in targets)}")


# ---- asking ----------------------------------------------------------------------------------------------------------


def ask(target: Target) -> Report:
    """One node's status; a node that does not answer within STATUS_TIMEOUT_S gives a report that says so."""
    url = f"{target.http}/status"
    try:
        with http_open(url, timeout=STATUS_TIMEOUT_S) as answer:
            status = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Report(target, {}, f"tried {url}: {_reason(error, STATUS_TIMEOUT_S)}")
    return Report(target, status) if isinstance(status, dict) else Report(target, {}, f"tried {url}: the answer is not a status")


def ask_all(targets: Sequence[Target]) -> list[Report]:
    """The status of every node, asked at the same time, in the order given."""
    with ThreadPoolExecutor(min(len(targets), ASKED_AT_ONCE_MAX)) as pool:
        return list(pool.map(ask, targets))


def _reason(error: Exception, limit_s: float) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    if isinstance(inner, TimeoutError):
        return f"nothing within {limit_s:g} s"
    if isinstance(inner, http.client.HTTPException) and not isinstance(inner, OSError):
        return NOT_HTTP
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__).lower()


def tell(target: Target, command: str, body: dict[str, Any], longer_s: float = 0.0) -> str:
    """Sends a command to a node and returns what it answers. `longer_s`: so much longer than others it may take.

    Raises:
        LrqError: It refuses, and says why, or does not answer in time.
    """
    url = f"{target.http}/{command}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with http_open(request, timeout=COMMAND_TIMEOUT_S + longer_s) as answer:
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
        why = _reason(error, COMMAND_TIMEOUT_S + longer_s)
        raise LrqError(f"{target.name} does not answer (POST {url}: {why})", todo="Is its sidecar running?", retriable=True) from error


def refused(target: Target, refusal: urllib.error.HTTPError) -> LrqError:
    """A node's answer that is an error, in its own words."""
    with refusal:
        return LrqError(_text(refusal.read()) or f"{target.name} answered {refusal.code} to {refusal.url}")


def _text(body: bytes) -> str:
    try:
        return one_line(str(json.loads(body)["text"]))
    except (ValueError, KeyError, TypeError):
        return one_line(body.decode(errors="replace").strip())


# ---- showing ---------------------------------------------------------------------------------------------------------


def table(reports: Sequence[Report]) -> str:
    """The nodes as an aligned table. A backup's lag and its place in the in-sync set are its primary's word, if that answers."""
    rows = [_HEADINGS, *(tuple(map(one_line, _row(report, primary_of(report.target.group, reports)))) for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if heading in _NUMBERS else cell.ljust(width) for heading, cell, width in zip(_HEADINGS, row, widths)
        ).rstrip()
        for row in rows
    )


def primary_of(group: str, reports: Sequence[Report]) -> Report | None:
    """The primary of a group: where several say that they are, the one with the highest epoch."""
    return max(_primaries(group, reports), key=Report.epoch, default=None)


def _primaries(group: str, reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if report.target.group == group and report.is_primary]


def say_if_several(reports: Sequence[Report]) -> None:
    """Names all that say that they are primary, where those are several."""
    for group in dict.fromkeys(report.target.group for report in reports):
        primaries = _primaries(group, reports)
        if len(primaries) > 1:
            said = ", ".join(f"{report.target.name} (epoch {epoch_name(report.epoch())})" for report in primaries)
            print(f"several nodes of group {group} say that they are primary: {said}; the highest epoch counts", file=sys.stderr)


def _row(report: Report, primary: Report | None) -> tuple[str, ...]:
    target, status = report.target, report.status
    lag: dict[str, Any] = {}
    in_sync = status.get("in_set")
    reason = str(status.get("reason") or "")
    if status.get("paused") and "paused" not in reason:
        reason += "; paused: takes no epoch by itself until lrq-ha resume"
    if primary and primary is not report:
        lag = (primary.status.get("peers") or {}).get(target.name) or {}
        in_sync = target.name in (primary.status.get("members") or [])
    return (
        target.name,
        target.group,
        str(status.get("role", "?")) if status else NO_ANSWER,
        _epoch(status.get("epoch")),
        *(_cell(status.get(key)) for key in ("end", "safe", "applied")),
        *(_cell(lag.get(key)) for key in ("lag_entries", "lag_bytes", "lag_seconds", "log_bytes_left")),
        "-" if in_sync is None else "yes" if in_sync else "no",
        " ".join(filter(None, (_since(status.get("since")), reason))) or report.failure,
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _epoch(value: object) -> str:
    return epoch_name(value) if isinstance(value, int) else _cell(value)


def _since(value: object) -> str:
    """A Unix time in seconds as local time; anything else as it is."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value).isoformat(" ", "seconds")
    return str(value or "")


def as_json(reports: Sequence[Report]) -> str:
    """The nodes as one line of JSON: a list of {name, group, http, answers, failure, status}."""
    return json.dumps(
        [
            {
                "name": r.target.name,
                "group": r.target.group,
                "http": r.target.http,
                "answers": not r.failure,
                "failure": r.failure or None,
                "status": r.status or None,
            }
            for r in reports
        ]
    )


# ---- the commands ----------------------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `list`."""
    show = add_command(
        subparsers,
        "list",
        "show every node: role, epoch, positions in the log, lag",
        "Asks every node and shows what it says. LAG is what a backup lacks of its primary's log: entries, bytes, seconds. "
        "The bytes are somewhat too many where not all of that is on its way to it. "
        "LOG LEFT: so many bytes may still be written before the broker drops what it needs next.",
        "Exit code 0 if at least one node answered, 1 if none did.",
    )
    show.add_argument("--watch", action="store_true", help=f"again every {WATCH_INTERVAL_S:g} s until Ctrl-C")
    show.add_argument("--format", choices=("text", "json"), default="text", help="json: one line, one list (default: %(default)s)")
    show.set_defaults(run=_list)


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name, help=summary, description=description, epilog=f"{_WHERE}\n{epilog}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="configuration of a node: it and its peers are asked")
    where.add_argument("--dir", type=Path, metavar="DIR", help="folder of a lab: all of its nodes are asked")
    return parser


def _list(args: argparse.Namespace) -> int:
    while True:
        # Found anew each time: a lab may have been started again on other ports.
        reports = ask_all(find_targets(args.config, args.dir))
        if args.watch and args.format == "text":
            # On a terminal each table takes the place of the one before; else an empty line parts them.
            print("\x1b[H\x1b[2J", end="") if sys.stdout.isatty() else print()
        print(as_json(reports) if args.format == "json" else table(reports), flush=True)
        say_if_several(reports)
        if not args.watch:
            return 1 if all(report.failure for report in reports) else 0
        time.sleep(WATCH_INTERVAL_S)
