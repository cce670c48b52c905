"""The confirms that a channel owes its client, in runs of delivery tags. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from lrq_ha.errors import IllegalEvent

from ..log.messages import Settled


class Tags:
    """Tags that mostly ascend as they are added, and are removed in any order. The first is at hand, however many there are."""

    __slots__ = ("_tags",)

    def __init__(self) -> None:
        self._tags: list[int] = []

    def __len__(self) -> int:
        return len(self._tags)

    def __contains__(self, tag: int) -> bool:
        at = bisect_left(self._tags, tag)
        return at < len(self._tags) and self._tags[at] == tag

    @property
    def first(self) -> int:
        return self._tags[0]

    def add(self, tag: int) -> None:
        insort(self._tags, tag)

    def discard(self, tag: int) -> None:
        if tag in self:
            del self._tags[bisect_left(self._tags, tag)]


class Confirms:
    """Publishes of one channel that wait for an answer. The broker's tags in `_runs` ascend and are consecutive within a run.

    Attributes:
        local: Client's tags of publishes that wait for something other than the broker's answer.
        early: Client's first tags of runs with local completion that are not confirmed yet, ascending.
        waiting: Number of publishes whose confirm comes from the broker.
    """

    __slots__ = ("_answered", "_broker_tag", "_client_tag", "_runs", "early", "local", "selected", "waiting")

    def __init__(self) -> None:
        self.selected = False
        self.local = Tags()
        self.early: deque[int] = deque()
        self.waiting = 0
        self._client_tag = 0
        self._broker_tag = 0
        self._runs: list[tuple[int, Settled]] = []  # (broker's tag of the first, the run); if not empty, at least one is unanswered
        self._answered = 0  # number of answered runs at the beginning of `_runs`

    def __bool__(self) -> bool:
        return bool(self._runs) or bool(self.local)

    @property
    def open(self) -> bool:
        """Whether there are publishes that the broker has not answered."""
        return bool(self._runs)

    def forwarded(self, count: int, sequence: int, producer: str = "", number: int = 0) -> None:
        """`count` publishes go to the broker, in order, as the entries from `sequence` on (0: not in the log)."""
        client = self._client_tag + 1 if self.selected else 0
        self._runs.append((self._broker_tag + 1, Settled(client, count, sequence, producer, number)))
        self._broker_tag += count
        if self.selected:
            self._client_tag += count
            self.waiting += count

    def forwarded_early(self, count: int, sequence: int, producer: str = "", number: int = 0) -> int:
        """Like `forwarded`, with local completion: the broker's answer is not the client's. Returns the client's first tag."""
        self._runs.append((self._broker_tag + 1, Settled(0, count, sequence, producer, number)))
        self._broker_tag += count
        first = self._client_tag + 1
        self._client_tag += count
        self.early.append(first)
        return first

    def covers_others(self, tag: int) -> bool:
        """Whether a `multiple` ack up to `tag` would cover a publish that still waits here."""
        return (bool(self.local) and self.local.first <= tag) or bool(self.early and self.early[0] <= tag)

    @property
    def oldest(self) -> int:
        """The first entry of the log to which the broker owes an answer; 0 if there is none."""
        return next((run.sequence for at in range(self._answered, len(self._runs)) if (run := self._runs[at][1]).sequence), 0)

    def ended_here(self) -> int:
        """A publish that does not go to the broker. Returns the client's tag, 0 if the client asked for no confirms."""
        if not self.selected:
            return 0
        self._client_tag += 1
        self.local.add(self._client_tag)
        return self._client_tag

    def answered(self, tag: int, multiple: bool) -> list[Settled]:
        """The broker's ack or nack. Raises IllegalEvent for a tag that is not open."""
        settled = self._take(tag, multiple)
        for run in settled:
            if run.client_tag:
                self.waiting -= run.publishes
        return settled

    def _take(self, tag: int, multiple: bool) -> list[Settled]:
        if not multiple:
            return [self._take_one(tag)]
        runs, at = self._runs, self._answered
        settled = []
        last, total = tag if tag else self._broker_tag, len(runs)
        while at < total and runs[at][0] <= last:
            first, run = runs[at]
            taken = last - first + 1
            if taken >= run.publishes:
                settled.append(run)
                at += 1
            else:
                settled.append(_part(run, 0, taken))
                runs[at] = first + taken, _part(run, taken, run.publishes - taken)
        self._drop(at)
        return settled

    def _take_one(self, tag: int) -> Settled:
        runs, at = self._runs, self._answered
        if not runs or runs[at][0] != tag:
            at = bisect_left(runs, (tag + 1,), at) - 1
            if at < self._answered or tag >= runs[at][0] + runs[at][1].publishes:
                raise IllegalEvent(f"the broker confirmed publish {tag}, which is not open")
        first, run = runs[at]
        if run.publishes == 1:
            if at == self._answered:
                self._drop(at + 1)
            else:
                del runs[at]
            return run
        before, behind = tag - first, first + run.publishes - tag - 1
        if not before:
            runs[at] = tag + 1, _part(run, 1, behind)
        else:
            runs[at] = first, _part(run, 0, before)
            if behind:
                runs.insert(at + 1, (tag + 1, _part(run, before + 1, behind)))
        return _part(run, before, 1)

    def _drop(self, answered: int) -> None:
        """Marks runs at the beginning as answered. They leave the list when they are half of it, so that the rest is not moved each time."""
        if 2 * answered >= len(self._runs):
            del self._runs[:answered]
            answered = 0
        self._answered = answered

    def abandon(self) -> list[Settled]:
        """The channel is gone. Returns all runs without an answer."""
        left = [run for _, run in self._runs[self._answered :]]
        self._runs.clear()
        self._answered = self.waiting = 0
        return left


def _part(run: Settled, skip: int, count: int) -> Settled:
    return Settled(
        run.client_tag + skip if run.client_tag else 0,
        count,
        run.sequence + skip if run.sequence else 0,
        run.producer,
        run.number + skip if run.producer else 0,
    )
