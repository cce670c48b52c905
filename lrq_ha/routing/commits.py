"""How far the receivers of a sink group's applications have come: the last commit for each receiver and queue, from the group's log. Pure.

Rules:

- A commit names the token of the process that has committed before. So a process that was replaced changes nothing, and is told.
- A commit without a token frees the receiver's position in the queue. A commit without a value has a token: its process has taken the queue over.
- A receiver's name belongs to the user that has used it first, until its last position is freed. Only that user is told the positions.
- A commit counts for a receiver that asks only when its entry is safe; a commit is compared with the last one, safe or not.
- Bounded: RECEIVERS_MAX names, COMMITS_MAX commits, COMMIT_BYTES_MAX each, and receive queues that have had a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.names import TAKEN_OVER

RECEIVERS_MAX = 1_000
COMMITS_MAX = 10_000
COMMIT_BYTES_MAX = 2 << 10  # the values of `lrq_ha.receiver` take less than half of that

Key = tuple[str, str]
"""Receiver and queue."""


class Commits:
    """The known commits, fed in log order."""

    def __init__(self) -> None:
        self._safe: dict[Key, pb.Commit] = {}
        self._unsafe: deque[tuple[int, pb.Commit]] = deque()  # with their entries, ascending
        self._newest: dict[Key, pb.Commit] = {}

    def refusal(self, commit: pb.Commit, received: Position) -> str:
        """Why a commit cannot be the next one; empty if it can.

        Args:
            commit: With the user that sends it.
            received: The last position that has come for its queue; (0, 0): no batch has come for a queue of that name.
        """
        known = self._newest.get((commit.receiver, commit.queue))
        users = {receiver: each.user for (receiver, _), each in self._newest.items()} if known is None else {known.receiver: known.user}
        if users.get(commit.receiver, commit.user) != commit.user:
            return f"the receiver name '{commit.receiver}' belongs to another user"
        if commit.expected != (known.token if known else ""):
            return f"{TAKEN_OVER} '{commit.receiver}'"
        if not commit.token:
            nothing_to_free = known is None or commit.value
            return f"a commit without a token frees a position of '{commit.receiver}', and names that queue and no value" if nothing_to_free else ""
        if received == START:
            return f"no batch has come for '{commit.queue}': a receiver has no position in it"
        if position_of(commit.position) > received:
            return f"a commit of {position_of(commit.position)}, and {commit.queue} has come to {received}"
        if known is None and len(self._newest) >= COMMITS_MAX:
            return f"there are {COMMITS_MAX} positions of receivers already"
        if commit.receiver not in users and len(users) >= RECEIVERS_MAX:
            return f"there are {RECEIVERS_MAX} names of receivers already"
        return ""

    def noted(self, entry: int, commit: pb.Commit) -> None:
        """The log's entry `entry` is a commit."""
        self._unsafe.append((entry, commit))
        _replace(self._newest, commit)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._unsafe and self._unsafe[-1][0] >= first:
            self._unsafe.pop()
        self._newest = dict(self._safe)
        for _, commit in self._unsafe:
            _replace(self._newest, commit)

    def safe(self, upto: int) -> None:
        """Entries up to `upto` are safe."""
        while self._unsafe and self._unsafe[0][0] <= upto:
            _replace(self._safe, self._unsafe.popleft()[1])

    def of(self, receiver: str, queue: str) -> pb.Commit:
        """The safe commit of a receiver in a queue; an empty one if there is none."""
        return self._safe.get((receiver, queue), pb.Commit())

    def of_queue(self, queue: str) -> list[pb.Commit]:
        """The safe commits of all receivers in a queue, by name."""
        return sorted((commit for (_, name), commit in self._safe.items() if name == queue), key=lambda commit: commit.receiver)

    def rows(self) -> list[pb.Commit]:
        """The state after all noted entries, for a checkpoint that is appended next."""
        return list(self._newest.values())

    def load(self, rows: Iterable[pb.Commit]) -> None:
        """Replaces everything by `rows` of a checkpoint that is safe."""
        self._safe = {(commit.receiver, commit.queue): commit for commit in rows}
        self._newest = dict(self._safe)
        self._unsafe.clear()


def _replace(commits: dict[Key, pb.Commit], commit: pb.Commit) -> None:
    key = commit.receiver, commit.queue
    if commit.token:
        commits[key] = commit
    else:
        commits.pop(key, None)
