"""Coordination by a register (E1-E3 over R4 and R15) as a small model: random lives of three nodes, and each rule switched off fails one.

Rules of the model:

- The lease of the leader's key may end at any moment. An acknowledgement reaches the leader late, or never.
- A transaction compares the register with what its author has read. It may land at any later moment, and its answer may be lost.
- FENCE comes at any time after the transaction that takes the epoch.
- Checked after each step: every node that may lead, and every leader, has all that was confirmed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.proves("G5", "coordination")

NODES = (0, 1, 2)
STEPS = 60
LIVES = 1_500
LIVES_OFF_MAX = 30_000
Entry = tuple[str, int, frozenset[int]]  # ("data", id, no members) or ("set", epoch, members)


@dataclass(frozen=True)
class Txn:
    """A transaction: `revision` is what the register must still have. `number` is unique."""

    number: int
    kind: str
    author: int
    revision: int
    epoch: int
    members: frozenset[int]
    member: int = -1
    incarnation: int = 0


@dataclass
class Register:
    revision: int = 1
    epoch: int = 1
    leader: int = 0
    members: frozenset[int] = frozenset(NODES)
    held: bool = True  # the leader's key is there
    written_by: int = 0  # number of the transaction


@dataclass
class Member:
    log: list[Entry]
    top: int = 1
    leading: int = 0
    acked: list[int] = field(default_factory=lambda: [1, 1, 1])
    pending: Txn | None = None
    out: int = -1  # with the rule "one change at a time" off: read as out of the register
    won: Txn | None = None
    incarnation: int = 0


class Life:
    """One life. `off`: the rule that is switched off."""

    def __init__(self, seed: int, off: str) -> None:
        self.rng, self.off = random.Random(seed), off
        first: Entry = ("set", 1, frozenset(NODES))
        self.nodes = [Member([first]) for _ in NODES]
        self.nodes[0].leading = 1
        self.register = Register()
        self.flying: list[Txn] = []
        self.confirmed: set[int] = set()
        self.takeovers = self.data = self.numbers = 0

    # ---- the log -----------------------------------------------------------------------------------------------------

    def members(self, i: int) -> frozenset[int]:
        return next(entry[2] for entry in reversed(self.nodes[i].log) if entry[0] == "set")

    def safe(self, i: int) -> int:
        """R4 and R15."""
        node, safe = self.nodes[i], 0
        marker = next((k for k, entry in enumerate(node.log, 1) if entry[:2] == ("set", node.leading)), len(node.log) + 1)
        in_force: frozenset[int] = frozenset()
        for n in range(1, len(node.log) + 1):
            in_force = node.log[n - 1][2] if node.log[n - 1][0] == "set" else in_force
            if n >= marker and all(m == i or node.acked[m] >= n for m in in_force):
                safe = n
        return safe

    def settled(self, i: int) -> bool:
        return self.safe(i) >= max(k for k, entry in enumerate(self.nodes[i].log, 1) if entry[0] == "set")

    def append(self, i: int, members: frozenset[int]) -> None:
        self.nodes[i].log.append(("set", self.nodes[i].leading, members))

    def restart(self, i: int) -> None:
        node = self.nodes[i]
        node.leading, node.pending, node.won, node.out, node.incarnation = 0, None, None, -1, node.incarnation + 1

    # ---- transactions ------------------------------------------------------------------------------------------------

    def send(self, i: int, kind: str, members: frozenset[int], epoch: int = 0, member: int = -1) -> None:
        self.numbers += 1
        node = self.nodes[i]
        txn = Txn(self.numbers, kind, i, self.register.revision, epoch or node.leading, members, member, node.incarnation)
        node.pending = txn
        self.flying.append(txn)

    def land(self, txn: Txn, *, answered: bool) -> None:
        register, node = self.register, self.nodes[txn.author]
        self.flying.remove(txn)
        unchanged = register.revision == txn.revision or (self.off == "E1 compares" and txn.kind == "take")
        if unchanged and not (txn.kind == "take" and register.held):
            register.revision += 1
            register.written_by, register.members = txn.number, txn.members
            if txn.kind == "take":
                register.epoch, register.leader, register.held = txn.epoch, txn.author, True
        if answered and node.pending is not None and node.pending.number == txn.number and node.incarnation == txn.incarnation:
            node.pending = None
            if register.written_by == txn.number:
                self.done(txn)
            elif txn.kind != "take" and register.epoch != txn.epoch:
                self.restart(txn.author)

    def done(self, txn: Txn) -> None:
        """The author knows that the register has what it wrote."""
        i, node = txn.author, self.nodes[txn.author]
        if txn.kind == "take":
            node.won = txn
        elif txn.kind == "remove" and node.leading == txn.epoch and txn.member in self.members(i):
            self.append(i, self.members(i) - {txn.member})

    # ---- steps -------------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Callable[[], object]]:
        register = self.register
        if register.held:
            yield lambda: setattr(register, "held", False)
        for txn in list(self.flying):
            yield lambda txn=txn: self.land(txn, answered=True)
            yield lambda txn=txn: self.land(txn, answered=False)
        for i in NODES:
            node = self.nodes[i]
            if node.pending is not None:
                yield lambda i=i: self.give_up_waiting(i)
            if node.leading:
                yield from self.leader_steps(i)
            elif node.won is not None:
                yield lambda i=i: self.fence(i)
            elif node.pending is None and not register.held and (i in register.members or self.off == "E1 takes members only"):
                for kept in self.subsets(i):
                    yield lambda i=i, kept=kept: self.send(i, "take", kept, epoch=register.epoch + 1)

    def subsets(self, i: int) -> list[frozenset[int]]:
        rest = sorted(self.register.members - {i})
        return [frozenset((i, *(m for bit, m in enumerate(rest) if mask >> bit & 1))) for mask in range(1 << len(rest))]

    def give_up_waiting(self, i: int) -> None:
        """The answer does not come: the author sends the transaction again. (Off: it only reads the register, and goes on with what it finds.)"""
        node = self.nodes[i]
        txn = node.pending
        assert txn is not None
        if self.off == "an unknown answer is repeated":
            node.pending = None
            if self.register.written_by == txn.number:
                self.done(txn)
        else:
            self.flying.append(txn)

    def fence(self, i: int) -> None:
        node = self.nodes[i]
        txn, node.won = node.won, None
        if txn is not None and node.top < txn.epoch:
            node.top = node.leading = txn.epoch
            node.acked, node.out = [0, 0, 0], -1
            self.append(i, txn.members)
            self.takeovers += 1

    def leader_steps(self, i: int) -> Iterator[Callable[[], object]]:
        node, register = self.nodes[i], self.register
        if any(other.top > node.leading for other in self.nodes):
            yield lambda: self.restart(i)
        yield lambda: self.publish(i)
        yield lambda: self.confirmed.update(entry[1] for entry in node.log[: self.safe(i)] if entry[0] == "data")
        for j in NODES:
            if j != i and self.nodes[j].top <= node.leading and self.nodes[j].leading < node.leading:
                yield lambda j=j: self.push(i, j)
                if self.nodes[j].top == node.leading:
                    yield lambda j=j: node.acked.__setitem__(j, max(node.acked[j], self.common(i, j)))
        members, mine = self.members(i), register.epoch == node.leading and register.leader == i
        settled = self.settled(i)
        for m in set(NODES) - members:
            if settled and node.acked[m] >= self.safe(i):
                yield lambda m=m: self.append(i, members | {m})
            if self.off == "E3" and mine and m not in register.members and node.pending is None:
                yield lambda m=m: self.send(i, "add", register.members | {m}, member=m)
        if node.out in members and node.out >= 0 and settled:
            yield lambda: (self.append(i, members - {node.out}), setattr(node, "out", -1))
        if node.pending is not None and self.off != "one change at a time":
            return
        for m in members - {i}:
            if self.off == "E2" and settled:
                yield lambda m=m: self.append(i, members - {m})
            elif mine and m in register.members and node.pending is None:
                yield lambda m=m: self.send(i, "remove", register.members - {m}, member=m)
            elif mine and m not in register.members:
                if self.off == "one change at a time":
                    yield lambda m=m: setattr(node, "out", m)
                else:
                    yield lambda m=m: self.append(i, members - {m})
        if mine and settled and node.pending is None:
            for m in members - register.members:
                yield lambda m=m: self.send(i, "add", register.members | {m}, member=m)

    def publish(self, i: int) -> None:
        self.data += 1
        self.nodes[i].log.append(("data", self.data, frozenset()))

    def common(self, i: int, j: int) -> int:
        pairs = zip(self.nodes[i].log, self.nodes[j].log)
        return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(self.nodes[i].log), len(self.nodes[j].log)))

    def push(self, i: int, j: int) -> None:
        """R13: cut to the common part, then as much as arrives."""
        leader, follower = self.nodes[i], self.nodes[j]
        upto = self.rng.randint(self.common(i, j), len(leader.log))
        if follower.leading:
            self.restart(j)
        follower.log, follower.top = leader.log[:upto], leader.leading

    def problem(self) -> str:
        holders = {*self.register.members} | {i for i in NODES if self.nodes[i].leading and self.nodes[i].leading == self.register.epoch}
        for i in holders:
            if lost := self.confirmed - {entry[1] for entry in self.nodes[i].log if entry[0] == "data"}:
                return f"node {i} may lead and lacks {lost}"
        return ""

    def live(self) -> str:
        for _ in range(STEPS):
            self.rng.choice(list(self.steps()))()
            if problem := self.problem():
                return problem
        return ""


RULES = ("E1 compares", "E1 takes members only", "E2", "E3", "one change at a time", "an unknown answer is repeated")


def test_no_life_loses_what_was_confirmed() -> None:
    lives = [Life(seed, "") for seed in range(LIVES)]
    for life in lives:
        assert not (problem := life.live()), problem
    assert sum(life.takeovers for life in lives) > LIVES / 4
    assert sum(len(life.confirmed) for life in lives) > LIVES / 4


@pytest.mark.parametrize("off", RULES)
def test_each_rule_is_needed(off: str) -> None:
    assert any(Life(seed, off).live() for seed in range(LIVES_OFF_MAX)), f"no life fails without the rule: {off}"


