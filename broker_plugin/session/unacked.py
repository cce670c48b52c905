"""What a client holds of a channel's deliveries, by tag. No I/O.

Rules:
- Tags ascend as they are given out, so the order of a Held is that of its tags. Any of them may be settled at any time; none is brought back.
- The oldest and the newest are at hand, whatever was there before. A plain dict that is emptied from its front, as by every consumer that acks in
  order, keeps its dead entries, and each new iterator walks over them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TypeVar

V = TypeVar("V")


class Unacked(OrderedDict[int, V]):
    """See above."""

    __slots__ = ()

    @property
    def last(self) -> int:
        """The highest tag; 0 if there is none."""
        return next(reversed(self), 0)

    def settle(self, tag: int, multiple: bool) -> list[V]:
        """Takes out what an ack or rejection of `tag` covers (0 with multiple: everything), in order. Costs what it covers."""
        if not multiple:
            return [self.pop(tag)] if tag in self else []
        return [self.pop(covered) for covered in list(takewhile(lambda t: t <= tag, self) if tag else self)]
