"""`lrq-ha republish`: publishes again the tail that `lrq-ha reinit NODE --export FILE` has saved.

Rules:

- Each message carries its replication ID, so a message that the group holds already is confirmed and not enqueued twice. A message without an ID gets
  one here, from its position in that node's log: another run does not enqueue it again. As an ID counts for one user only, use one user for all runs.
- A number that the group has may be another message's: a publisher that was restarted after the promotion learned the group's last number, and
  continued from there. So the group is asked whether it has a number, and if so the message is counted separately and not sent.
- Numbers that republish itself has published are among these: it notes them beside FILE, for a further run. As it notes a message before it
  sends it, the ones under way at an interruption are known, too: the group may have them, or a publisher that came in between may have used
  their numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from broker_plugin.amqp import content_header
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Channel, Connection
from broker_plugin.log import stamps
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.overview.text import one_line
from lrq_ha.replication.deduplication import ReplicationId
from lrq_ha.replication.positions import RangeSet
from lrq_ha.routing.names import NUMBERS_MAX, numbers_queue

from . import door_options

_WHICH_FILE = "Name a file that `lrq-ha reinit --export` made"
WINDOW_MESSAGES = 1_000
WINDOW_BYTES = 16 << 20
NAMED_MAX = 20
NOTES_SUFFIX = ".numbers"
#: Keys of an entry that is a publish, beside its ID, which it may lack.
_TEXTS, _BYTES = ("user", "vhost", "exchange", "routing_key"), ("header", "body")

_Source = tuple[str, str]
"""(vhost, producer): the owner of the numbers, with the user."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `republish`."""
    republish = subparsers.add_parser(
        "republish",
        help="publish again what `lrq-ha reinit NODE --export FILE` has saved",
        description="Publishes every message of FILE again, in order, through a primary's door, with its replication ID: what the group holds "
        "already is not enqueued twice, nor what an earlier run has published. Acknowledgements in FILE are not repeated. First stop the publishers "
        f"whose names it says: of each name one connection is let in. Leave FILE{NOTES_SUFFIX}, which it writes, beside FILE for the next run.",
        epilog="An ID counts only for the user who published first: messages of other users are left out, and counted. Run it once for each user. "
        "Messages that never had an ID go with the user of the first one that has; where none has one, run it again as that user only.",
    )
    republish.add_argument("file", type=Path, metavar="FILE")
    republish.add_argument(
        "--new-ids",
        action="store_true",
        help="publish what has numbers that the group has already as new messages, with other IDs: if a publisher was restarted since the "
        "promotion, and gave these numbers to other messages; else they are there twice",
    )
    door_options.add_options(republish, "a primary's door")
    republish.set_defaults(run=_republish)


@dataclass
class _Counts:
    published: int = 0
    had: int = 0  # with a number that the group has from others
    doubtful: int = 0  # as `had`, and an earlier run that was cut off was about to send it
    other_users: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    returned: int = 0  # in no queue


def _republish(args: argparse.Namespace) -> int:
    counts = asyncio.run(_publish_all(args.file, door_options.address(args), args.new_ids))
    print(f"{counts.published} messages published and confirmed", end="")
    if counts.other_users:
        print(f", {counts.other_users.total()} left out: run this as {one_line(', '.join(sorted(counts.other_users)))}, too", end="")
    print(f", {counts.refused} refused by the broker" if counts.refused else "", end="")
    print(f", {counts.returned} came back, as no queue takes them: declare what is missing, and run this again" if counts.returned else "", end="")
    if counts.had:
        unless = "unless the publisher has been restarted since the promotion and gave these numbers to other messages"
        print(f", {counts.had} have numbers that the group has already: they are there, {unless}", end="")
        print(". If it has, run this again with --new-ids", end="")
    if counts.doubtful:
        print(f", {counts.doubtful} were under way when an earlier run was cut off, and the group has their numbers: they are there", end="")
        print(", unless their publisher came in between", end="")
    print()
    return 1 if counts.other_users or counts.refused or counts.returned or counts.had or counts.doubtful else 0


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    """The publishes of a tail."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    published = _checked(entry) if entry["kind"] == "publish" else None
                except (ValueError, KeyError, TypeError, OverflowError, MalformedInput) as error:
                    raise LrqError(f"{file}, line {number}: not an entry of a tail ({error!r})", todo=_WHICH_FILE) from error
                if published:
                    yield published
    except OSError as error:
        raise LrqError(f"{file} cannot be read: {error.strerror}", todo=_WHICH_FILE) from error


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """A publish with its ID and its bytes decoded. Raises one of the errors that `_entries` names if a key is missing or wrong."""
    for key in (*_TEXTS, *_BYTES):
        if not isinstance(entry[key], str):
            raise TypeError(f"{key} is no text")
    given = entry["replication_id"]
    return {
        **entry,
        "replication_id": ReplicationId.parse(str(given).encode()) if given else None,
        "own_id": ReplicationId(f"tail:{entry['epoch']}", int(entry["sequence"])),
        **{key: base64.b64decode(entry[key], validate=True) for key in _BYTES},
    }


async def _publish_all(file: Path, to: Address, new_ids: bool) -> _Counts:
    named = {(entry["user"], entry["replication_id"].producer): None for entry in _entries(file) if entry["replication_id"]}
    user_of_the_rest = next(iter(named), (to.user, ""))[0]
    _say_names(sorted(producer for user, producer in named if user == to.user))
    counts = _Counts()
    with _beside(file) as lines:
        link = _Link(to, _Given(lines, file, to.user), counts, new_ids)
        try:
            try:
                for entry in _entries(file):
                    owner = entry["user"] if entry["replication_id"] else user_of_the_rest
                    if owner == to.user:
                        await link.publish(entry)
                    else:
                        counts.other_users[owner] += 1
            finally:
                await link.close()
        except LrqError as error:
            if not link.begun:
                raise
            done = f"{counts.published} messages were published and confirmed before"
            todo = "See that no client publishes in these producers' names, and run this again: what is confirmed is not enqueued twice"
            raise LrqError(f"{error.what}; {done}", todo=todo, retriable=True) from error
    return counts


def _say_names(producers: list[str]) -> None:
    if producers:
        more = [f"{len(producers) - NAMED_MAX} more"] if len(producers) > NAMED_MAX else []
        named = ", ".join([*producers[:NAMED_MAX], *more])
        print(f"In the names of these producers, whose publishers must have stopped: {one_line(named)}", file=sys.stderr, flush=True)


def _beside(file: Path) -> TextIO:
    """The notes of earlier runs, to append to. Raises LrqError if the file cannot be used."""
    notes = file.with_name(file.name + NOTES_SUFFIX)
    try:
        return notes.open("a+", encoding="utf-8", buffering=1)
    except OSError as error:
        raise LrqError(f"{notes} cannot be written: {error.strerror}", todo=f"Copy {file} to where it can") from error


class _Stage(Enum):
    BEGUN = "begun"
    CONFIRMED = "confirmed"


class _Given:
    """The numbers that republish itself has published, in this run and in earlier ones.

    Args:
        notes: First the tail's identity, then ranges: numbers about to be sent, numbers confirmed.
        file: The tail.
        user: The user of the numbers.
    """

    def __init__(self, notes: TextIO, file: Path, user: str) -> None:
        self._notes = notes
        self._user = user
        self._numbers: dict[_Stage, defaultdict[_Source, RangeSet]] = {stage: defaultdict(RangeSet) for stage in _Stage}
        tail = _digest(file)
        notes.seek(0)
        try:
            of = notes.readline()
            if not of:
                print(json.dumps(tail), file=notes)
            elif json.loads(of) != tail:
                raise LrqError(f"{notes.name} was written for another tail than {file}", todo="Delete it, if that one is done with")
            for line in notes:
                stage, owner, vhost, producer, first, last = json.loads(line)
                if owner == user:
                    self._numbers[_Stage(stage)][vhost, producer].add(int(first), int(last))
        except (ValueError, TypeError) as error:
            raise LrqError(f"{notes.name} is not what republish wrote ({error!r})", todo="Take out the line that was cut short") from error

    def has(self, stage: _Stage, source: _Source, number: int) -> bool:
        return number in self._numbers[stage][source]

    def add(self, stage: _Stage, source: _Source, numbers: Iterable[int]) -> None:
        for first, last in RangeSet.of(numbers):
            self._numbers[stage][source].add(first, last)
            print(json.dumps([stage.value, self._user, *source, first, last]), file=self._notes)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class _Link:
    """A connection for one vhost and producer at a time, so that the order of the file is kept.

    Args:
        to: The door.
        given: The numbers that count as republish's own.
        counts: The messages by outcome.
        new_ids: Publish with new IDs the messages whose numbers the group has had.
    """

    def __init__(self, to: Address, given: _Given, counts: _Counts, new_ids: bool) -> None:
        self._to = to
        self._given = given
        self._counts = counts
        self._new_ids = new_ids
        self._source: _Source | None = None
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._returned = 0
        self._window: list[tuple[dict[str, Any], int]] = []  # the messages to send next, each with its number
        self._window_bytes = 0
        self._group_has: defaultdict[_Source, RangeSet] = defaultdict(RangeSet)
        self._group_lacks = RangeSet()  # while this connection stands
        self.begun = False  # whether anything may have been published

    async def publish(self, entry: dict[str, Any]) -> None:
        """Takes a message; it counts when its window is confirmed."""
        for identity in (entry["replication_id"], entry["own_id"]):
            if identity is None:
                continue
            source = entry["vhost"], identity.producer
            if not await self._has(source, identity.sequence):
                await self._send(source, entry, identity.sequence)
                return
            if self._given.has(_Stage.CONFIRMED, source, identity.sequence):
                self._counts.published += 1
                return
            if identity is not entry["own_id"] and self._given.has(_Stage.BEGUN, source, identity.sequence):
                self._counts.doubtful += 1
                return
            if identity is not entry["own_id"] and not self._new_ids:
                self._counts.had += 1
                return
        self._counts.published += 1  # under an ID of republish's own, whatever the state of its notes

    async def _has(self, source: _Source, number: int) -> bool:
        """Whether the group has this number. One request asks for a run of numbers."""
        if number in self._group_has[source]:
            return True
        channel = await self._open(source)
        if number in self._group_lacks:
            return False

        async def has(count: int) -> int:
            _, found, _ = await channel.queue_declare(numbers_queue(source[1], number, number + count - 1), passive=True)
            return found

        uniform, mixed = 1, NUMBERS_MAX + 1
        here = await has(1)
        while mixed - uniform > 1:
            middle = mixed - 1 if mixed > NUMBERS_MAX else (uniform + mixed) // 2
            if await has(middle) == here * middle:
                uniform = middle
            else:
                mixed = middle
        known = self._group_has[source] if here else self._group_lacks
        known.add(number, number + uniform - 1)
        return bool(here)

    async def _open(self, source: _Source) -> Channel:
        if self._channel is not None and source == self._source:
            return self._channel
        await self.close()
        vhost, producer = self._source = source
        self._connection = await Connection.open(replace(self._to, vhost=vhost), client_properties={"lrq_producer": producer})
        self._channel = channel = await self._connection.channel(on_return=self._came_back)
        await channel.confirm_select()
        return channel

    async def _send(self, source: _Source, entry: dict[str, Any], number: int) -> None:
        await self._open(source)
        self._window.append((entry, number))
        self._window_bytes += len(entry["header"]) + len(entry["body"])
        if len(self._window) >= WINDOW_MESSAGES or self._window_bytes >= WINDOW_BYTES:
            await self._settle()

    def _came_back(self, *_: object) -> None:
        self._returned += 1

    async def _settle(self) -> None:
        """Sends the window, and waits for its confirms."""
        window, self._window, self._window_bytes = self._window, [], 0
        channel, source = self._channel, self._source
        if not window or channel is None or source is None:
            return
        self.begun = True
        self._given.add(_Stage.BEGUN, source, (number for _, number in window))
        refused_before, self._returned = channel.refused, 0
        for entry, number in window:
            header, body, value = entry["header"], entry["body"], ReplicationId(source[1], number).encode()
            if header:
                header = stamps.stamp(header, content_header.field(b"x-lrq-id", value))
                channel.publish_content(entry["exchange"], entry["routing_key"], header, body, mandatory=True)
            else:  # a log entry: its ID stands beside it
                channel.publish(entry["exchange"], entry["routing_key"], body, {"x-lrq-id": value}, mandatory=True)
        await channel.confirmed()
        refused = channel.refused - refused_before
        self._counts.refused += refused
        self._counts.returned += self._returned
        self._counts.published += len(window) - refused - self._returned
        self._given.add(_Stage.CONFIRMED, source, (number for _, number in window))

    async def close(self) -> None:
        """Sends the remaining messages, waits for their confirms, and ends the connection."""
        connection, channel = self._connection, self._channel
        try:
            if channel is not None and channel.error is None:
                await self._settle()
        finally:
            self._connection = self._channel = None
            self._window, self._window_bytes = [], 0
            self._group_lacks = RangeSet()
            if connection is not None:
                await connection.close()
