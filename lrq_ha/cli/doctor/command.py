"""The command: reads the facts, runs the checks, and shows the findings."""

from __future__ import annotations

import argparse
import asyncio
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.overview.text import one_line
from lrq_ha.sidecar import config as configuration

from ..list_nodes import CONFIG_VARIABLE, find_config, targets_of, terminal_width
from ..sidecar import redact
from .broker_checks import BROKER_CHECKS
from .check import Check, Checked, Finding, Level, run_checks
from .facts import Facts
from .group import read_facts
from .group_checks import GROUP_CHECKS
from .host_checks import HOST_CHECKS

#: All checks but that of the configuration itself, without which there are no others.
CHECKS: tuple[Check[Any], ...] = (*HOST_CHECKS, *BROKER_CHECKS, *GROUP_CHECKS)
CONFIG_CHECK = "config"
_BELOW = " " * 9  # before the lines below a finding
_CODES = {Level.FAIL: 2, Level.WARN: 1}
_EPILOG = f"""\
Exit code 2 if a check has failed, 1 if one warns, else 0. The checks are described in docs/operations/doctor.md.

examples:
  lrq-ha doctor --config /etc/lrq-ha/e1.toml
  lrq-ha doctor --format json                   the node of {CONFIG_VARIABLE}
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this node's set-up, and name the command that mends each fault",
        description="Looks at the configuration, this machine, the broker and the other nodes. A line per finding: ok, warn, FAIL or skipped; below "
        "it what mends it. It works before the first start and at any time. It makes a queue and a stream in the broker, and deletes them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"the node's configuration (default: {CONFIG_VARIABLE})")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one object (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="has the nodes' token (default: http.token_file of the configuration)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    path = find_config(args.config)
    found = examine(path, args.token_file)
    print(as_json(path, found) if args.format == "json" else as_text(found, terminal_width()))
    return exit_code(found)


def examine(path: Path, token_file: Path | None = None) -> list[Checked]:
    """The findings about the node with this configuration."""
    try:
        config = configuration.load(path)
        targets = targets_of(config, path, token_file, "")
    except LrqError as error:
        rest = [Checked(check.name, Finding(Level.SKIPPED, "the configuration cannot be used")) for check in CHECKS]
        return [Checked(CONFIG_CHECK, Finding(Level.FAIL, error.what, error.todo)), *rest]
    facts: Facts = asyncio.run(read_facts(path, config, targets))
    valid = f"{path} is valid: node {config.node.name} of group {config.node.group}"
    return [Checked(CONFIG_CHECK, Finding(Level.OK, valid)), *run_checks(CHECKS, facts)]


def exit_code(found: Sequence[Checked]) -> int:
    """2 if a check has failed, 1 if one warns, else 0."""
    return max((_CODES.get(each.finding.level, 0) for each in found), default=0)


def as_text(found: Sequence[Checked], width: int | None) -> str:
    """The findings, one below the other, then their number. Commands are lines of their own, whole. `width`: see `wrap_remark`."""
    names = max(len(each.check) for each in found)
    lines: list[str] = []
    for each in found:
        finding = each.finding
        head = f"{finding.level.value:<7}  {each.check:<{names}}"
        lines += _wrap(f"{head}  ", finding.text, width)
        if finding.todo:
            lines += _wrap(_BELOW, finding.todo, width)
        if finding.command:
            lines.append(_BELOW + _clean(finding.command))
    counts = [(sum(each.finding.level is level for each in found), level.value) for level in (Level.FAIL, Level.WARN, Level.OK, Level.SKIPPED)]
    return "\n".join([*lines, "", ", ".join(f"{count} {name}" for count, name in counts)])


def _wrap(head: str, text: str, width: int | None) -> list[str]:
    """The lines of a text behind `head`; one line without a width."""
    whole = _clean(text)
    if width is None:
        return [head + whole]
    return textwrap.wrap(whole, width, initial_indent=head, subsequent_indent=_BELOW, break_long_words=False, break_on_hyphens=False)


def as_json(path: Path, found: Sequence[Checked]) -> str:
    """The findings as one line of JSON."""
    checks = [
        {"check": each.check, "level": each.finding.level.value, **{key: _clean(getattr(each.finding, key)) for key in ("text", "todo", "command")}}
        for each in found
    ]
    return json.dumps({"config": str(path), "code": exit_code(found), "checks": checks})


def _clean(text: str) -> str:
    return one_line(redact(" ".join(text.split())))


def documented() -> str:
    """The table for docs/operations/doctor.md."""
    config = (CONFIG_CHECK, "the configuration and the files that it names can be used", Level.FAIL, "the key that the text names")
    rows = [config, *((check.name, check.about, check.worst, check.mends) for check in CHECKS)]
    return "\n".join(["| check | holds if | else | mended by |", "|---|---|---|---|",
                      *(f"| `{name}` | {about} | {worst.value} | {mends} |" for name, about, worst, mends in rows)]) + "\n"  # fmt: skip
