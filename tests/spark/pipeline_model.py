"""Random histories of receive queues, and a model that applies their transactions one by one, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

SCHEMA = "queue STRING, type STRING, epoch BIGINT, sequence BIGINT, index INT, payload BINARY, request_id STRING, restart BOOLEAN"
DELTA, PART, END = "LOG_ENTRY_SYNC", "SNAPSHOT_SYNC", "LAST_FULL_SYNC_ENTRY"

Rows = dict[str, dict[str, int | None]]
"""Table -> key -> value."""


class Transaction(NamedTuple):
    """A transaction of a queue. Its payloads are (table, op, rows), a row being (key, value)."""

    type: str
    epoch: int
    sequence: int
    payloads: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = ()
    request: str | None = None
    restart: bool = False

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.sequence

    def entries(self, queue: str) -> list[tuple[Any, ...]]:
        """Its rows in format lrq."""
        payloads: Sequence[bytes | None] = [encode(*payload) for payload in self.payloads] or [None]
        head = (queue, self.type, self.epoch, self.sequence)
        return [(*head, index, payload, self.request, self.restart) for index, payload in enumerate(payloads)]


def encode(table: str, op: str, rows: Sequence[tuple[str, int]]) -> bytes:
    """A payload of the form lrq-json."""
    found = [{"k": key} if op == "delete" else {"k": key, "v": value} for key, value in rows]
    return json.dumps({"table": table, "op": op, "rows": found}).encode()


@dataclass
class _Open:
    request: str
    whole: bool
    rows: list[Transaction] = field(default_factory=list)
    deltas: list[Transaction] = field(default_factory=list)


class Model:
    """One queue's tables, transaction by transaction."""

    def __init__(self, *, need_snapshot: bool = True) -> None:
        self.position = (0, 0)
        self._in_force = not need_snapshot
        self._waiting = False
        self._live: list[Transaction] = []
        self._open: _Open | None = None
        self._known: set[str | None] = set()

    def apply(self, one: Transaction) -> None:
        """Applies the next transaction."""
        assert one.position > self.position
        self.position = one.position
        if one.type == DELTA:
            if self._open:
                self._open.deltas.append(one)
            if self._in_force and not self._waiting:
                self._live.append(one)
            return
        if one.request not in self._known:
            self._known.add(one.request)
            self._open = _Open(one.request or "", one.restart)
            self._waiting = self._waiting or one.restart
        if self._open is None or self._open.request != one.request:
            return
        self._open.whole |= one.type == PART and not one.payloads
        self._open.rows.append(one)
        if one.type == END:
            if self._open.whole:
                self._live = self._open.rows + self._open.deltas
                self._in_force, self._waiting = True, False
            self._open = None

    @property
    def tables(self) -> Rows:
        """Tables without their empty ones."""
        found: Rows = {}
        for one in self._live:
            for table, op, rows in one.payloads:
                if op == "truncate":
                    found[table] = {}
                for key, value in rows:
                    if op == "put":
                        found.setdefault(table, {})[key] = value
                    elif op == "delete":
                        found.get(table, {}).pop(key, None)
        return {table: rows for table, rows in found.items() if rows}


def random_history(random: Random, length: int) -> list[Transaction]:
    """Transactions of one queue: deltas, snapshots that end or do not, restarts, late rows, trimmed beginnings."""
    return list(_transactions(random, length))


def _transactions(random: Random, length: int) -> Iterator[Transaction]:
    epoch, sequence, requests = 257, 0, 0
    current: str | None = None
    marked = False
    for number in range(length):
        sequence += random.randint(1, 3)
        if random.random() < 0.04:
            epoch, sequence = epoch + 256, max(1, sequence - random.randint(0, 5))
        dice = random.random()
        begins = number == 0 and random.random() < 0.8
        if begins or dice < 0.12 or (current is None and dice < 0.2):
            requests += 1
            current, restart = f"r{requests}", random.random() < 0.4
            kind = random.choice((PART, PART, PART, END))
            payloads = _payloads(random) if random.random() < 0.2 else ()
            yield Transaction(kind, epoch, sequence, payloads, current, restart)
            if kind == END:
                current = None
            marked = False
        elif current and dice < 0.4:
            yield Transaction(PART, epoch, sequence, _payloads(random) if marked or random.random() < 0.9 else (), current)
            marked = True
        elif current and dice < 0.5:
            yield Transaction(END, epoch, sequence, random.choice(((), _payloads(random))), current)
            current = None
        elif (older := requests - (current is not None)) and dice < 0.58:  # a late row of an older snapshot, or of one that has ended
            payloads = _payloads(random) if random.random() < 0.6 else ()
            yield Transaction(random.choice((PART, PART, END)), epoch, sequence, payloads, f"r{random.randint(1, older)}")
        else:
            yield Transaction(DELTA, epoch, sequence, _payloads(random))


def _payloads(random: Random) -> tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...]:
    def payload() -> tuple[str, str, tuple[tuple[str, int], ...]]:
        op = random.choices(("put", "delete", "truncate"), (12, 4, 1))[0]
        rows = tuple((random.choice("abcdef"), random.randint(0, 999)) for _ in range(random.randint(0, 3)))
        return random.choice(("t", "t", "u")), op, () if op == "truncate" else rows

    return tuple(payload() for _ in range(random.randint(1, 2)))


def cut(random: Random, history: Sequence[Transaction], pieces: int) -> list[list[Transaction]]:
    """Pieces of a history, one after the other; a piece may begin with a repeat of what came before, and may be empty."""
    places = sorted(random.randint(0, len(history)) for _ in range(pieces - 1))
    bounds = [0, *places, len(history)]
    return [list(history[max(0, begin - random.choice((0, 0, 1, 5))) : end]) for begin, end in pairwise(bounds)]
