"""`lrq-ha reinit`: a node begins anew, with or without a copy of what it alone holds; `lrq-ha republish`: that copy is published again.

Rules: nothing is deleted on a node before the whole copy is on this machine's disk. What is published again carries its replication ID, so what the
group holds already is confirmed and not enqueued twice. What never had one gets one here, from its place in that node's log: who runs this again
does not enqueue it again. As an ID counts for one user only, all that goes with one user's run.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import os
import sys
import urllib.error
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from broker_plugin import headers
from broker_plugin.client import Channel, Connection
from broker_plugin.client_errors import Address
from lrq_ha.direct_http import http_open
from lrq_ha.replication.errors import LrqError

from . import door
from .nodes import Target, add_command, find_targets, named, refused, tell

READ_TIMEOUT_S = 60.0
WINDOW_MESSAGES = 1_000
TAIL_MODE = 0o600  # it holds messages
#: Of an entry that is a publish, beside its ID, which it may lack.
_TEXTS, _BYTES = ("user", "vhost", "exchange", "routing_key"), ("header", "body")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `reinit` and `republish`."""
    reinit = add_command(
        subparsers,
        "reinit",
        "let a backup begin anew, as after it has diverged",
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

    republish = subparsers.add_parser(
        "republish",
        help="publish again what `lrq-ha reinit NODE --export FILE` has saved",
        description="Publishes every message of FILE again, in order, through a primary's door, with its replication ID: what the group holds "
        "already is not enqueued twice, nor what an earlier run has published. Acknowledgements in FILE are not repeated.",
        epilog="An ID counts only for the user who published first: messages of other users are left out, and counted. Run it once for each user. "
        "Messages that never had an ID go with the user of the first one that has; where none has one, run it again as the same user only.",
    )
    republish.add_argument("file", type=Path, metavar="FILE")
    door.add_options(republish, "a primary's door")
    republish.set_defaults(run=_republish)


def _open_tail(target: Target) -> Any:
    """Raises LrqError if the node refuses, OSError or HTTPException if it does not answer."""
    try:
        return http_open(f"{target.http}/tail", timeout=READ_TIMEOUT_S)
    except urllib.error.HTTPError as refusal:
        raise refused(target, refusal) from refusal


def _new(file: Path) -> BinaryIO:
    """A new file. Raises LrqError if there is one already, or none can be made."""
    try:
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, TAIL_MODE), "wb")
    except FileExistsError:
        raise LrqError(f"{file} exists already", todo="Name a file that does not") from None
    except OSError as error:
        raise LrqError(f"{file} cannot be written: {error.strerror}") from error


def _may_save(target: Target, file: Path) -> None:
    """Raises LrqError for what `_save` would refuse at once: the file exists or cannot be made, or the node has no tail."""
    _new(file).close()
    file.unlink()
    try:
        _open_tail(target).close()
    except (OSError, http.client.HTTPException) as error:
        raise LrqError(f"{target.http}/tail cannot be read: {error}", retriable=True) from error


def _reinit(args: argparse.Namespace) -> int:
    target = named(args.node, find_targets(args.config, args.dir))
    if args.export:
        _may_save(target, args.export)
    would = tell(target, "reinit", {"force": args.force, "dry_run": True})  # what is refused is refused before anything is saved
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
    out = _new(file)  # before anything else, so that no file is deleted below that was there before
    count, complete = 0, False
    try:
        with out, _open_tail(target) as answer:
            for line in answer:
                entry = json.loads(line)
                complete = entry["kind"] == "end"
                if entry["kind"] == "error":
                    raise LrqError(f"{target.name} cannot give all of its entries, so nothing was saved, and nothing is deleted: {entry['text']}")
                if not complete:
                    out.write(line)
                    count += 1
            out.flush()
            os.fsync(out.fileno())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LrqError(f"{url} cannot be saved to {file}: {error}", retriable=True) from error
    finally:
        if not complete:
            file.unlink()
    if not complete:
        raise LrqError(f"{url} ended too early: nothing was saved, and nothing is deleted", retriable=True)
    return count


# ---- publishing again ------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    published: int = 0
    other_users: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    returned: int = 0  # in no queue


def _republish(args: argparse.Namespace) -> int:
    counts = asyncio.run(_publish_all(args.file, door.address(args)))
    print(f"{counts.published} messages published and confirmed", end="")
    if counts.other_users:
        print(f", {counts.other_users.total()} left out: run this as {', '.join(sorted(counts.other_users))}, too", end="")
    print(f", {counts.refused} refused by the broker" if counts.refused else "", end="")
    print(f", {counts.returned} came back, as no queue takes them: declare what is missing, and run this again" if counts.returned else "")
    return 1 if counts.other_users or counts.refused or counts.returned else 0


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    """The publishes of a tail."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    published = _checked(entry) if entry["kind"] == "publish" else None
                except (ValueError, KeyError, TypeError) as error:
                    raise LrqError(f"{file}, line {number}: not an entry of a tail ({error!r})") from error
                if published:
                    yield published
    except OSError as error:
        raise LrqError(f"{file} cannot be read: {error.strerror}") from error


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """A publish with its bytes decoded. Raises ValueError, KeyError or TypeError if something is missing, or is something else."""
    for key in (*_TEXTS, *_BYTES):
        if not isinstance(entry[key], str):
            raise TypeError(f"{key} is no text")
    return {
        **entry,
        "epoch": str(entry["epoch"]),
        "sequence": int(entry["sequence"]),
        "replication_id": str(entry["replication_id"] or ""),
        **{key: base64.b64decode(entry[key], validate=True) for key in _BYTES},
    }


async def _publish_all(file: Path, to: Address) -> _Counts:
    counts = _Counts()
    user_of_the_rest = next((entry["user"] for entry in _entries(file) if entry["replication_id"]), to.user)
    link = _Link(to)
    try:
        for entry in _entries(file):
            owner = entry["user"] if entry["replication_id"] else user_of_the_rest
            if owner != to.user:
                counts.other_users[owner] += 1
                continue
            await link.publish(entry)
            counts.published += 1
    finally:
        await link.close()
    counts.refused, counts.returned = link.refused, link.returned
    counts.published -= link.refused + link.returned
    return counts


class _Link:
    """A connection for one vhost and producer at a time, so that the order of the file is kept."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self._open_for: tuple[str, str] | None = None
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._in_window = 0
        self.refused = self.returned = 0

    async def publish(self, entry: dict[str, Any]) -> None:
        own_id = entry["replication_id"] or f"tail:{entry['epoch']}/{entry['sequence']}"
        producer = own_id.rpartition("/")[0]
        channel = self._channel
        if channel is None or (entry["vhost"], producer) != self._open_for:
            channel = await self._open(entry["vhost"], producer)
        header, body = entry["header"], entry["body"]
        if header:
            header = headers.stamp(header, headers.field(b"x-lrq-id", own_id.encode()))
            channel.publish_content(entry["exchange"], entry["routing_key"], header, body, mandatory=True)
        else:  # a log entry: its ID stands beside it
            channel.publish(entry["exchange"], entry["routing_key"], body, {"x-lrq-id": own_id}, mandatory=True)
        self._in_window += 1
        if self._in_window >= WINDOW_MESSAGES:
            await channel.confirmed()
            self._in_window = 0

    async def _open(self, vhost: str, producer: str) -> Channel:
        await self.close()
        self._connection = await Connection.open(replace(self._to, vhost=vhost), client_properties={"lrq_producer": producer})
        self._channel = channel = await self._connection.channel(on_return=self._returned)
        await channel.confirm_select()
        self._open_for = (vhost, producer)
        return channel

    def _returned(self, *_: object) -> None:
        self.returned += 1

    async def close(self) -> None:
        if self._channel is not None and self._connection is not None:
            await self._channel.confirmed()
            self.refused += self._channel.refused
            await self._connection.close()
        self._channel = self._connection = None
        self._in_window = 0
