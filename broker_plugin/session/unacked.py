"""The deliveries of a channel that a client holds, by tag. No I/O.

Rules:
- Tags ascend as they are given out, so the order of an Unacked is that of its tags. Any tag may be settled at any time; none is brought back.
- The oldest and the newest tag are at hand after any history. A plain dict that is emptied from its front, as by every consumer that acks
  in order, keeps its dead entries, and each new iterator walks over them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TypeVar

V = TypeVar("V")


class Unacked(OrderedDict[int, V]):
    """Deliveries without an ack, by tag, in the order of their tags."""

    __slots__ = ()

    @property
    def last(self) -> int:
        """The highest tag; 0 if there is none."""
        return next(reversed(self), 0)

    def settle(self, tag: int, multiple: bool) -> list[V]:
        """Takes out, in order, the deliveries that an ack or rejection of `tag` covers (0 with multiple: all). Costs only what is covered."""
        if not multiple:
            return [self.pop(tag)] if tag in self else []
        return [self.pop(covered) for covered in list(takewhile(lambda t: t <= tag, self) if tag else self)]
