"""A step that the listener refuses, and how much of it the application has skipped. Pure.

Rules:

- A refused list is given again whole, after 0.1 s, doubling to 30 s, until the listener takes it or `skip_to` is set.
- Only updates of a list are skipped. A snapshot's start and end are not: the tables would keep what is no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lrq_ha.errors import MalformedInput
from lrq_ha.replication.positions import Position

from .machine import Apply, Begin, Complete, Reach, Skip

AGAIN_MIN_S, AGAIN_MAX_S = 0.1, 30.0

Given = Begin | Apply | Complete | Reach | Skip


@dataclass
class Refusal:
    """A refused step.

    Attributes:
        queue: The receive queue.
        step: What the listener was given.
        attempt: How often.
        skip_to: Updates up to here are skipped; None: the step is given again.
    """

    queue: str
    step: Given
    attempt: int = 1
    skip_to: Position | None = None

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt."""
        return float(min(AGAIN_MIN_S * 2 ** min(self.attempt - 1, 30), AGAIN_MAX_S))

    def demand_skip(self, position: Position) -> None:
        """Sets `skip_to`.

        Raises:
            MalformedInput: The step is no list of updates, or `position` is not one of the list's.
        """
        if not isinstance(self.step, Apply):
            raise MalformedInput(
                f"{self.queue}: the listener refuses no list of updates but {type(self.step).__name__}, which cannot be skipped",
                todo="Mend the listener, or the place of its position",
            )
        first, last = self.step.updates[0].position, self.step.updates[-1].position
        if not first <= position <= last:
            raise MalformedInput(
                f"{self.queue}: {position} is not in the list that is refused, which has the positions {first} to {last}",
                todo="Give the position that Redelivery names, or one before it in the list",
            )
        self.skip_to = position

    def skipped(self) -> list[Given]:
        """The steps instead of the list, once `skip_to` is set: the progress without the skipped updates, then what is left of the list."""
        assert isinstance(self.step, Apply)
        assert self.skip_to is not None
        dropped = [update for update in self.step.updates if update.position <= self.skip_to]
        left = self.step.updates[len(dropped) :]
        skip = Skip(replace(self.step.progress, position=dropped[-1].position), dropped[0].position, len(dropped))
        return [skip, Apply(self.step.progress, left)] if left else [skip]
