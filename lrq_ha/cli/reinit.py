"""`lrq-ha reinit`: deletes a node's data, with or without a copy of the messages that it alone holds, which republish.py publishes again.

Rule: nothing is deleted on a node before the whole copy is on this machine's disk.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
from pathlib import Path
from typing import Any, BinaryIO

from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Target

from .list_nodes import add_command, find_targets, named, refused, tell

READ_TIMEOUT_S = 60.0
TAIL_MODE = 0o600  # it holds messages
_AGAIN = "See the node with `lrq-ha list`, then run this again"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `reinit`."""
    reinit = add_command(
        subparsers,
        "reinit",
        "rebuild a backup, as after it has diverged",
        "Deletes what NODE's log brought to its broker, and the log; the node then follows its primary from the first entry. A diverged node holds "
        "entries that it may have confirmed alone: they are saved to a file, or given up. It is refused where no primary answers NODE.",
        "examples:\n  lrq-ha reinit e1 --export e1-tail.jsonl\n  lrq-ha republish e1-tail.jsonl --to amqp://app:SECRET@192.0.2.2:5673",
    )
    reinit.add_argument("node", metavar="NODE", help="the backup")
    what = reinit.add_mutually_exclusive_group(required=True)
    what.add_argument("--export", type=Path, metavar="FILE", help="save what it alone holds to a new file first")
    what.add_argument("--discard", action="store_true", help="give up what it alone holds")
    reinit.add_argument("--force", action="store_true", help="although no primary answers NODE: if no other node has what NODE has, it is lost")
    reinit.add_argument("--dry-run", action="store_true", help="only say what would happen")
    reinit.set_defaults(run=_reinit)


def _open_tail(target: Target) -> Any:
    """Opens a node's tail. Raises LrqError if the node refuses, OSError or HTTPException if it does not answer."""
    try:
        return target.access.open(f"{target.http}/tail", timeout=READ_TIMEOUT_S, authorized=True)
    except urllib.error.HTTPError as refusal:
        raise refused(target, refusal) from refusal


def _new(file: Path) -> BinaryIO:
    """A new file. Raises LrqError if the file exists, or cannot be made."""
    try:
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, TAIL_MODE), "wb")
    except FileExistsError:
        raise LrqError(f"{file} exists already", todo="Name a file that does not") from None
    except OSError as error:
        raise LrqError(f"{file} cannot be written: {error.strerror}", todo="Name another file") from error


def _may_save(target: Target, file: Path) -> None:
    """Raises LrqError if `_save` would refuse at once: the file exists or cannot be made, or the node has no tail."""
    _new(file).close()
    file.unlink()
    try:
        _open_tail(target).close()
    except (OSError, http.client.HTTPException) as error:
        raise LrqError(f"{target.http}/tail cannot be read: {error}", todo=_AGAIN, retriable=True) from error


def _reinit(args: argparse.Namespace) -> int:
    target = named(args.node, find_targets(args))
    if args.export:
        _may_save(target, args.export)
    would = tell(target, "reinit", {"force": args.force, "dry_run": True})  # a refusal comes before anything is saved
    if args.dry_run:
        print(would)
        return 0
    if args.export:
        count = _save(target, args.export)
        print(f"{count} entries are in {args.export}", file=sys.stderr)
    print(tell(target, "reinit", {"force": args.force, "dry_run": False}))
    return 0


def _save(target: Target, file: Path) -> int:
    """Copies a node's tail to a new file; returns the number of entries. Raises LrqError, and leaves no file, unless it is complete."""
    url = f"{target.http}/tail"
    out = _new(file)  # before anything else, so that no older file is deleted below
    count, complete = 0, False
    try:
        with out, _open_tail(target) as answer:
            for line in answer:
                entry = json.loads(line)
                complete = entry["kind"] == "end"
                if entry["kind"] == "error":
                    text = f"{target.name} cannot give all of its entries, so nothing was saved, and nothing is deleted: {entry['text']}"
                    raise LrqError(text, todo="Mend what it names, then run this again")
                if not complete:
                    out.write(line)
                    count += 1
            out.flush()
            os.fsync(out.fileno())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LrqError(f"{url} cannot be saved to {file}: {error}", todo=_AGAIN, retriable=True) from error
    finally:
        if not complete:
            file.unlink()
    if not complete:
        raise LrqError(f"{url} ended too early: nothing was saved, and nothing is deleted", todo=_AGAIN, retriable=True)
    return count
