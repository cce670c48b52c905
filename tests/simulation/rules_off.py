"""Each rule of the log switched off alone, to show that the checks would notice: options for Cluster, and what to patch meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from lrq_ha.replication import node as core
from lrq_ha.replication.events import Ack, Effect, Event, Push, WriteBatch, WriteFence
from lrq_ha.replication.log import LogIndex, LogState, Members, common_end
from lrq_ha.replication.node import Node, _Written
from lrq_ha.replication.positions import owner_of

Options = dict[str, object]


class AcksAtAccept(Node):
    """A push is acknowledged when it is accepted, not when the own stream has it (R4)."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, Push) and any(isinstance(e, WriteBatch) for e in effects):
            effects.append(Ack(event.peer, event.batch.last))
        return effects


class PromisesLate(Node):
    """A promise raises `top` only when its FENCE is confirmed (R2)."""

    def _write_fence(self, epoch: int, out_end: int, then: Callable[[float], None]) -> None:
        def confirmed(now: float) -> None:
            self.log.fence(epoch, out_end)
            then(now)

        self._pending.append(_Written(0, confirmed))
        self._effects.append(WriteFence(epoch, out_end))


class RestartsWithItsSet(Node):
    """A restarted leader takes an epoch when the nodes of its own set answer, not all that are configured (section 7)."""

    def _consider_taking(self, now: float) -> None:
        outside = [p for n, p in self.peers.items() if n not in self.log.members and p.hello is None]
        if owner_of(self.log.last_epoch) == self.me == owner_of(self.log.top) and outside:
            everybody, self.peers = self.peers, {n: p for n, p in self.peers.items() if p not in outside}
            super()._consider_taking(now)
            self.peers = everybody
        else:
            super()._consider_taking(now)


class IgnoresSecondHistory(Node):
    """A node takes an epoch by itself although one that answers would refuse to be cut (section 7)."""

    def _consider_taking(self, now: float) -> None:
        with patch.object(core, "refuses_cut", lambda *_: False):
            super()._consider_taking(now)

    def _conclude(self, campaign: core._Campaign, now: float) -> None:
        with patch.object(core, "refuses_cut", lambda *_: False):
            super()._conclude(campaign, now)


Sets = Sequence[tuple[int, Members]]


def removal_at_append(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    held = min([durable, *(acknowledged.get(n, 0) for n in sets[-1][1] if n != leader)])
    return held if held >= marker else 0


def addition_when_safe(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    in_force: Members = frozenset()
    for sequence, members in reversed(sets):
        if sequence < marker:
            break
        in_force = members if in_force - members else in_force | members
        held = min([durable, *(acknowledged.get(n, 0) for n in in_force if n != leader)])
        if held >= sequence:
            return held
    return 0


def safe_without_marker(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    """The new set counts although no node has its MARKER yet."""
    return min([durable, *(acknowledged.get(n, 0) for n in sets[-1][1] if n != leader)])


def refuses_by_sets_inside(tail: LogState, leader: LogState, leader_epoch: int, owner_of_epoch: int) -> bool:
    common = common_end(tail, leader)
    return any(owner_of_epoch not in members for sequence, members in tail.sets if sequence > common)


def refuses_by_next_entry(tail: LogState, leader: LogState, leader_epoch: int, owner_of_epoch: int) -> bool:
    common = common_end(tail, leader)
    writers = [owner_of(epoch) for epoch, first in leader.epochs if first <= common + 1]
    taker = writers[-1] if common < leader.end else owner_of_epoch
    sets = [m for s, m in tail.sets if s <= common][-1:] + [m for s, m in tail.sets if s > common]
    return tail.end > common and any(taker not in members for members in sets)


def fence_without_out(self: LogIndex, epoch: int, out_end: int = 0) -> None:
    self.top = max(self.top, epoch)


def fence_without_end(self: LogIndex, epoch: int, out_end: int = 0) -> None:
    self.top = max(self.top, epoch)
    self.in_set = self.in_set and not out_end


def _patched(owner: object, name: str, value: object) -> Callable[[], Iterator[Options]]:
    def use() -> Iterator[Options]:
        with patch.object(owner, name, value):
            yield {}

    return use


def _options(**options: object) -> Callable[[], Iterator[Options]]:
    def use() -> Iterator[Options]:
        yield options

    return use


_RULES: dict[str, Callable[[], Iterator[Options]]] = {
    "push acknowledged at accept": _options(node_class=AcksAtAccept),
    "promise raises top only when FENCE is confirmed": _options(node_class=PromisesLate),
    "older exchange not deleted at a start": _options(late_writes=True),
    "leader restarts alone": _options(restart_alone=True),
    "leader restarts when its own set answers": _options(node_class=RestartsWithItsSet),
    "restarts by itself although a second history answers": _options(node_class=IgnoresSecondHistory),
    "tail always cut": _patched(core, "refuses_cut", lambda *_: False),
    "tail judged by the sets inside it": _patched(core, "refuses_cut", refuses_by_sets_inside),
    "tail judged by the writer of the next entry": _patched(core, "refuses_cut", refuses_by_next_entry),
    "FENCE does not tell a node that it is out": _patched(LogIndex, "fence", fence_without_out),
    "a set entry from before undoes out": _patched(LogIndex, "fence", fence_without_end),
    "removal counts at append": _patched(core, "safe_position", removal_at_append),
    "addition counts when safe under the old set": _patched(core, "safe_position", addition_when_safe),
    "safe before the MARKER is": _patched(core, "safe_position", safe_without_marker),
    "shorter log promoted": _patched(LogState, "rank", property(lambda _self: (0, 0))),
}


def names() -> list[str]:
    return list(_RULES)


@contextmanager
def rule_off(name: str) -> Iterator[Options]:
    """Switches one rule off; gives the options that Cluster needs for it."""
    yield from _RULES[name]()
