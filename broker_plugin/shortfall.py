"""What this node's broker lacks of what the log needs, as an operator is told it. No I/O.

A node keeps the log, and acknowledges it, whatever its broker lacks. But its queues would not be whole, so it leads only where an operator
insists. There are two kinds:

- A *hold*: the sidecar's user may not do what applying takes, or a vhost is missing. Nothing is written meanwhile, so nothing is lost: the applier
  goes on where it stopped.
- A *gap*: something of the log is not on this broker (a declaration that it refused, a queue that was deleted there), and the rest goes on.

Invariant: each place (a vhost, a queue) has one text, which ends in what mends it.
"""

from __future__ import annotations

from collections.abc import Hashable

SHOWN_MAX = 3
KEPT_MAX = 1_000


class Shortfall:
    """See above."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, str] = {}
        self._gaps: dict[Hashable, str] = {}

    @property
    def holds(self) -> bool:
        """Whether nothing may be written to the queues."""
        return bool(self._holds)

    def hold(self, place: Hashable, text: str) -> bool:
        """Nothing is to be written because of this; without a text, this is mended. Returns whether that is new."""
        return _set(self._holds, place, text)

    def note_gap(self, place: Hashable, text: str) -> bool:
        """This is missing; without a text, it is there now. Returns whether that is new."""
        return _set(self._gaps, place, text)

    def tell(self) -> str:
        """What is missing, for people; empty if nothing is."""
        found = [*self._holds.values(), *self._gaps.values()]
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        return "; ".join(found[:SHOWN_MAX]) + more


def _set(texts: dict[Hashable, str], place: Hashable, text: str) -> bool:
    if not text:
        return texts.pop(place, None) is not None
    if place not in texts and len(texts) >= KEPT_MAX:
        return False
    is_new = place not in texts
    texts[place] = text
    return is_new
