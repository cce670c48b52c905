"""The whole door under hostile clients, on real brokers: each costs its own connection only.

`LRQ_FUZZ_DOOR=1000000` is how many inputs are sent (without it, a short run), `LRQ_FUZZ_SEED` makes them other ones, `LRQ_FUZZ_ONLY=17,18` sends
those of attacks 17 and 18 again, as a failure names them. All the time a canary publishes and consumes through the same door and loses nothing;
the sidecars live and stay within a bound of memory; their logs have no traceback and nothing secret; and in the end the group's logs are the same
and whole.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from corpus import SEED

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from door_clients import Canary, Outcome, run
from door_inputs import MARK, attack
from door_rig import Rig
from load import eventually, same_logs, told

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

INPUTS = int(os.environ.get("LRQ_FUZZ_DOOR", "600"))
ONLY = [int(number) for number in os.environ.get("LRQ_FUZZ_ONLY", "").split(",") if number]
AT_A_TIME = 32
CANARY_EVERY = 50  # inputs: a round of the canary costs as much as a dozen of them
LOOK_S = 1.0
MISSES_MAX = 20
SUSPECT_S = 45.0  # longer than door.drain_timeout_s
TELL_EVERY = 10_000
GROWTH_BYTES_MAX = 256 << 20  # 64 MiB of the log are kept in memory, and as much again in Python's objects
BAD = (b"Traceback", b"could not be handled")
BROKEN = "its log says why"  # what the door tells a client whose bytes it did not expect
DECLARED = ("q", "fuzz-1", "fuzz-2")


@pytest.fixture
def rig(pair: Lab) -> Iterator[Rig]:
    rig = Rig(pair)
    with quiet_brokers(rig) if INPUTS > TELL_EVERY else nullcontext():
        yield rig
    rig.finish()


@contextmanager
def quiet_brokers(rig: Rig) -> Iterator[None]:
    """In a long run a tenth of all work is the brokers' words about hostile clients."""
    for name in (rig.primary, rig.backup):
        rig.lab.ctl(name, "set_log_level", "none")
    try:
        yield
    finally:
        for name in (rig.primary, rig.backup):
            rig.lab.ctl(name, "set_log_level", "info")


class Watch:
    """Looks at both sidecars while it goes on.

    Attributes:
        growth_bytes: The most that one of them has grown by.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._nodes = {name: rig.lab.nodes[name] for name in (rig.primary, rig.backup)}
        self._read = {name: node.log.stat().st_size for name, node in self._nodes.items()}
        self._rss = {name: told(rig.lab, name)["rss_bytes"] for name in self._nodes}
        password = urlsplit(rig.url).password or ""
        secrets = [password.encode(), MARK, b"x" * 20, b"y" * 20, b"z" * 20]
        self._bad = [*BAD, *secrets, *(secret.hex().encode() for secret in secrets)]
        self._misses = 0
        self.growth_bytes = 0

    def look(self) -> str:
        """What is wrong; empty if nothing is."""
        for name, node in self._nodes.items():
            with node.log.open("rb") as log:
                log.seek(self._read[name])
                said = log.read()
            for bad in self._bad:
                if bad in said:
                    line = next((line for line in said.splitlines() if bad in line), b"")
                    return f"the log of {name} says {line[:200]!r}"
            self._read[name] += said.rfind(b"\n") + 1
            try:
                self.growth_bytes = max(self.growth_bytes, self._rig.lab.status(name)["rss_bytes"] - self._rss[name])
                self._misses = 0
            except LrqError as error:  # a busy machine has its pauses
                self._misses += 1
                if self._misses > MISSES_MAX:
                    return str(error)
        if self.growth_bytes > GROWTH_BYTES_MAX:
            return f"a sidecar has grown by {self.growth_bytes >> 20} MiB"
        if self._rig.pids() != self._rig._pids:
            return "a sidecar was restarted"
        return ""


class Siege:
    """All attacks of a run, AT_A_TIME at a time.

    Attributes:
        wrong: What broke; empty if nothing did.
        canary_due: Set whenever CANARY_EVERY inputs are over.
        ends: How many ended how (`Outcome.ended`).
    """

    def __init__(self, rig: Rig, numbers: Iterator[int], inputs: int) -> None:
        self._url, self._watch = rig.url, Watch(rig)
        self._numbers, self._inputs = numbers, inputs
        self.sent = self.left = self.attacks = 0
        self.wrong = ""
        self.canary_due = asyncio.Event()
        self.ends: Counter[int] = Counter()
        self._flying: set[int] = set()
        self._landed: deque[tuple[float, int]] = deque()
        self._guilty: set[int] = set()

    async def lay(self) -> None:
        """Returns when all inputs are sent, or something is wrong."""
        watching = asyncio.create_task(self._look())
        await asyncio.gather(*(self._attack() for _ in range(AT_A_TIME)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self.wrong = self.wrong or await asyncio.to_thread(self._watch.look)

    async def _attack(self) -> None:
        while not self.wrong and self.sent < self._inputs and (number := next(self._numbers, None)) is not None:
            self._flying.add(number)
            self._note(await run(self._url, attack(number)))
            self._flying.discard(number)
            now = time.monotonic()
            self._landed.append((now, number))
            while self._landed[0][0] < now - SUSPECT_S:
                self._landed.popleft()

    def _note(self, outcome: Outcome) -> None:
        before = self.sent
        self.sent += outcome.taken + outcome.left
        self.left += outcome.left
        self.attacks += 1
        self.ends[outcome.ended] += 1
        if outcome.hung or BROKEN in outcome.text:
            self.wrong = self.wrong or ("no answer came" if outcome.hung else f"a client was told: {outcome.text}")
            self._guilty.add(outcome.number)
        if before // CANARY_EVERY < self.sent // CANARY_EVERY:
            self.canary_due.set()
        if before // TELL_EVERY < self.sent // TELL_EVERY:
            print(f"{time.strftime('%H:%M:%S')} {self.sent} inputs", flush=True)

    async def _look(self) -> None:
        while not self.wrong:
            await asyncio.sleep(LOOK_S)
            wrong = await asyncio.to_thread(self._watch.look)
            self.wrong = self.wrong or wrong

    @property
    def suspects(self) -> list[int]:
        """Attacks that may have broken it, the last one first: also one that is over for a while, as the door still sends what was published."""
        return sorted(self._guilty or {*self._flying, *(number for _, number in self._landed)}, reverse=True)

    @property
    def growth_bytes(self) -> int:
        return self._watch.growth_bytes


def culprits(rig: Rig, suspects: list[int]) -> list[int]:
    """As few of them as do it again, found by halves."""
    while len(suspects) > 1:
        middle = len(suspects) // 2
        for half in (suspects[:middle], suspects[middle:]):
            try:
                rig._pids = rig.pids()
                again = Siege(rig, iter(half), 1 << 40)
                asyncio.run(again.lay())
            except LrqError:  # no sidecar is left to try it on
                return suspects
            if again.wrong:
                suspects = half
                break
        else:
            break
    return suspects


async def siege(rig: Rig, queue: str) -> tuple[Siege, Canary]:
    laid = Siege(rig, iter(ONLY) if ONLY else itertools.count(), INPUTS)
    canary, over = Canary(rig.url, queue), asyncio.Event()
    singing = asyncio.create_task(canary.sing(laid.canary_due, over))
    laying = asyncio.create_task(laid.lay())
    await asyncio.wait({singing, laying}, return_when=asyncio.FIRST_COMPLETED)
    if not laying.done():
        laid.wrong = laid.wrong or f"the canary has stopped: {singing.exception()}"
    await laying
    over.set()
    laid.canary_due.set()
    try:
        await singing
    except AssertionError as error:
        laid.wrong = laid.wrong or str(error)
    return laid, canary


@pytest.mark.timeout(max(300, INPUTS // 20))
def test_hostile_clients_cost_their_own_connection_only(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    began = time.monotonic()
    laid, canary = asyncio.run(siege(rig, queue))
    took_s = time.monotonic() - began
    print(
        f"\n{laid.sent} inputs ({laid.left} of them not waited for) in {laid.attacks} attacks, {took_s:.0f} s, {laid.sent / took_s:.0f}/s; "
        f"ends {dict(laid.ends.most_common())}; canary {canary.rounds} rounds, the longest {canary.longest_s:.1f} s; "
        f"grown by {laid.growth_bytes >> 20} MiB at most"
    )
    if laid.wrong:
        numbers = ",".join(map(str, culprits(rig, laid.suspects)))
        pytest.fail(f"{laid.wrong}; again with: LRQ_FUZZ_SEED={SEED} LRQ_FUZZ_ONLY={numbers}")
    assert canary.rounds > 1
    eventually("the door to let go of them", lambda: rig.lab.status(rig.primary)["connections"] <= 2)
    rig.both_hold(queue, [])
    bystander = rig.channel()
    for name in (queue, *DECLARED):
        bystander.queue_delete(name)
    bystander.exchange_delete("e")
    same_logs(rig.lab)
