"""`lrq-ha sidecar`: runs one node's sidecar, or checks its configuration. Rule: logs go to stderr and never hold a password."""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from pathlib import Path

from lrq_ha.overview.text import one_line
from lrq_ha.sidecar import config as configuration

from .flood import LimitedHandler

log = logging.getLogger("lrq_ha.config")

_LEVELS = ("debug", "info", "warning", "error")
#: Text that may hold URLs. Each word is looked at once, from either end: a log line may be as long, and as odd, as a stranger likes.
_WORD = re.compile(r"[^\s'\"]+")
_SCHEME = re.compile(r"\w+://")
#: The form of a URL for error texts.
_FORM = "amqp://USER:PASSWORD@"

_EPILOG = """\
Once the door and the HTTP address listen, stdout gets one line: READY {"node": …, "role": …, "door": …, "http": …, "pid": …}.
Logs go to stderr. SIGTERM or Ctrl-C ends the sidecar in order. The configuration is described in docs/configuration.md.

examples:
  lrq-ha sidecar --sample > e1.toml          a configuration with every key, its meaning and its default
  lrq-ha sidecar --config e1.toml --check    is it valid?
  lrq-ha sidecar --config e1.toml
"""


def redact(text: str) -> str:
    """`text` with the passwords of all URLs replaced by ***."""
    return _WORD.sub(_redact, text) if "@" in text else text


def _redact(found: re.Match[str]) -> str:
    """A word without the part between USER: and @, also of a malformed URL."""
    word = found[0]
    at = word.rfind("@")
    colon = word.find(":", 0, max(at, 0))
    if colon < 0 or (word.startswith(_FORM) and at < len(_FORM)):
        return word
    scheme = _SCHEME.match(word, word.rfind("/", 0, colon) + 1)
    if scheme is not None:
        name = word.find(":", scheme.end(), at)
        if name >= 0 and not {"/", "@"}.intersection(word[scheme.end() : name]):
            colon = name
    return f"{word[:colon]}:***{word[at:]}"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever names clients give."""
        return one_line(super().formatMessage(record))


def set_up_logging(level: str) -> None:
    """Sends logs from `level` on to stderr, one line each: time, level, logger, text."""
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("pamqp").setLevel(logging.CRITICAL)  # it logs data that clients send


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `sidecar`."""
    parser = subparsers.add_parser(
        "sidecar",
        help="run one node's sidecar in the foreground",
        description="Runs the sidecar of one node beside its broker, in the foreground.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="the node's configuration (TOML)")
    what.add_argument("--sample", action="store_true", help="print a sample configuration and end")
    parser.add_argument("--check", action="store_true", help="only check the configuration; nothing is started or connected to")
    parser.add_argument("--log-level", choices=_LEVELS, default="info", help="least severe messages to log (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.sample:
        print(configuration.sample(), end="")
        return 0
    config = configuration.load(args.config)
    files = configuration.secret_files(args.config, config)
    warnings = [text for text in (*map(configuration.exposed, files), configuration.unprotected(config)) if text]
    if args.check:
        for text in warnings:
            print(f"lrq-ha: warning: {text}", file=sys.stderr)
        peers = ", ".join(peer.name for peer in config.peers) or "none"
        sites = ", ".join(site.remote_id for site in config.sites) or "none"
        print(f"{args.config} is valid: node {config.node.name} (id {config.node.id}) of group {config.node.group}; peers: {peers}; sites: {sites}")
        return 0
    set_up_logging(args.log_level)
    for text in warnings:
        log.warning("%s", text)
    # Imported only here: the other commands need not wait for the modules of a running sidecar.
    return int(importlib.import_module("lrq_ha.sidecar.process").run(config, args.config))
