"""The log's needs that this node's broker lacks, in texts for operators. No I/O.

A node keeps the log, and acknowledges it, whatever its broker lacks. But its queues would not be whole, so it leads
only where an operator insists. There are three kinds:

- A *hold*: the sidecar's user lacks a right that applying needs, or a vhost is missing. Nothing is written meanwhile,
  so nothing is lost: the applier resumes where it stopped.
- A *gap*: an object of the log is not on this broker (a declaration that it refused, a queue that was deleted there),
  and the rest goes on.
- A *stray*: a primary's broker has an object that the log lacks (`strays`). A stray is dropped with its incarnation,
  as the next one may follow.

Invariant: each place (a vhost, a queue) has one text, which ends in the remedy.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from shlex import quote

SHOWN_MAX = 3
KEPT_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """A declaration that this broker refused. `what`: for operators, as "queue 'orders' in vhost '/'"; `late`: it
    has been carried out since.
    """

    what: str
    late: bool = False


class Refusals:
    """Declarations that this broker refused, by vhost and method: KEPT_MAX at most."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], Refusal] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, vhost: str, method: bytes, refusal: Refusal) -> None:
        if len(self._known) < KEPT_MAX or (vhost, method) in self._known:
            self._known[vhost, method] = refusal

    def remove(self, vhost: str, method: bytes) -> None:
        self._known.pop((vhost, method), None)

    def of(self, vhost: str) -> list[tuple[bytes, Refusal]]:
        """The refusals of one vhost."""
        return [(method, refusal) for (of, method), refusal in self._known.items() if of == vhost]

    def knows(self, vhost: str, method: bytes) -> bool:
        return (vhost, method) in self._known

    def vhosts(self) -> list[str]:
        return sorted({vhost for vhost, _ in self._known})


class Shortfall:
    """The holds, gaps and strays of this node.

    Args:
        before: Of the previous incarnation: its gaps remain. Its holds are found out again.

    Attributes:
        refusals: Declarations behind the gaps.
    """

    def __init__(self, before: Shortfall | None = None) -> None:
        self._holds: dict[Hashable, str] = {}
        self._strays: dict[Hashable, str] = {}
        self._gaps: dict[Hashable, str] = before._gaps if before is not None else {}
        self.refusals: Refusals = before.refusals if before is not None else Refusals()

    @property
    def holds(self) -> bool:
        """Whether nothing may be written to the queues."""
        return bool(self._holds)

    def hold(self, place: Hashable, text: str) -> bool:
        """Sets the reason why nothing is written; without a text, the reason is gone. Returns whether that is new."""
        return _set(self._holds, place, text)

    def note_gap(self, place: Hashable, text: str) -> bool:
        """Notes a missing object; without a text, the object is there now. Returns whether that is new."""
        return _set(self._gaps, place, text)

    def note_stray(self, place: Hashable, text: str) -> bool:
        """Notes an object that the log lacks; without a text, the log has it now. Returns whether that is new."""
        return _set(self._strays, place, text)

    def tell(self) -> str:
        """All texts for operators; empty if there are none."""
        found = [*self._holds.values(), *self._gaps.values(), *self._strays.values()]
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        return "; ".join(found[:SHOWN_MAX]) + more


def reinit(node: str) -> str:
    """The command that rebuilds a node from its primary."""
    return f"lrq-ha reinit {quote(node)} --discard"


def _set(texts: dict[Hashable, str], place: Hashable, text: str) -> bool:
    if not text:
        return texts.pop(place, None) is not None
    if place not in texts and len(texts) >= KEPT_MAX:
        return False
    is_new = place not in texts
    texts[place] = text
    return is_new
