"""Clients of a simulated group: publishers that number and resend, ordinary ones, consumers that ack, reject, give back and vanish.

A client speaks to one primary at a time and connects anew when it is lost. What it has not heard of is in doubt, and is sent again.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from door import Relay
    from sidecar import Site
    from world import World

WINDOW = 6
RECENT = 3
SKIPPED_MAX = 4


class Publish(NamedTuple):
    """`id`: the number of its replication ID; 0: none."""

    exchange: str
    key: str
    number: int
    id: int


@dataclass(eq=False)
class Client:
    """A publisher (`targets`) or a consumer (`queue`) or both. `ascending`: it never uses the numbers that it skips."""

    world: World
    name: str
    targets: tuple[tuple[str, str], ...] = ()
    queue: str = ""
    prefetch: int = 2
    numbered: bool = False
    ascending: bool = False

    def __post_init__(self) -> None:
        self.producer = self.name if self.numbered else ""
        self.relay: Relay | None = None
        self.held: list[int] = []
        self.asked = False
        self.committing: list[Publish] = []
        self._sent: dict[int, Publish] = {}
        self._tag = 0
        self._next_id = 1
        self._again: deque[Publish] = deque()
        self._recent: deque[Publish] = deque(maxlen=RECENT)

    @property
    def idle(self) -> bool:
        """Nothing of it is in doubt."""
        return not self._sent and not self._again and not self.committing

    # ---- what it does ------------------------------------------------------------------------------------------------

    def connect(self, site: Site) -> None:
        self._tag = 0
        self.relay = self.world.open_relay(site, self)
        if self.queue and self.queue in site.broker.queues:
            self.relay.consume(self.queue, self.prefetch)

    def publish(self, r: random.Random) -> bool:
        """Sends what is in doubt again, or else something new."""
        if self.relay is None or len(self._sent) >= WINDOW or self.committing:
            return False
        if self._again:
            self._send(self._again.popleft())
            return True
        if not self.world.takes_publishes or not self.targets:
            return False
        exchange, key = r.choice(self.targets)
        self._send(Publish(exchange, key, self.world.next_number(), self._number()))
        return True

    def _number(self) -> int:
        if not self.numbered:
            return 0
        number = self._next_id
        self._next_id += 1 + (number % SKIPPED_MAX if self.ascending else 0)
        return number

    def _send(self, publish: Publish) -> None:
        assert self.relay is not None
        self._tag += 1
        self._sent[self._tag] = publish
        self.relay.publish(*publish)

    def transact(self, r: random.Random, count: int) -> bool:
        """All or nothing: `count` publishes at once, and acks, or rejections, of some of what it holds."""
        if self.relay is None or self._again or self._sent or self.committing or not self.world.takes_publishes or not self.targets:
            return False
        for _ in range(count):
            exchange, key = r.choice(self.targets)
            self.committing.append(Publish(exchange, key, self.world.next_number(), self._number()))
        tags: list[int] = []
        if self.held:
            settled = r.randint(1, len(self.held))
            tags, self.held = self.held[:settled], self.held[settled:]
        self.relay.commit([(*p,) for p in self.committing], tags, "reject" if tags and r.random() < 0.2 else "ack")
        return True

    def committed(self) -> None:
        """Its transaction is done."""
        if self.relay is not None:
            for publish in self.committing:
                self.world.confirmed_to_client(self.relay.site, publish.number)
        self.committing = []

    def settle(self, r: random.Random) -> bool:
        """Acks, rejects or gives back some of what it holds."""
        if self.relay is None or not self.held:
            return False
        if self.targets and r.random() < 0.8 and self.transact(r, r.randint(1, 2)):
            return True
        count = r.randint(1, len(self.held))
        tags, self.held = self.held[:count], self.held[count:]
        what = r.random()
        self.relay.settle(tags, "ack" if what < 0.7 else "reject" if what < 0.85 else "requeue")
        return True

    def vanish(self) -> bool:
        """Its connection breaks."""
        if self.relay is None:
            return False
        self.relay.client_lost()
        return True

    # ---- what it hears -----------------------------------------------------------------------------------------------

    def answered(self, tag: int, ok: bool, *, early: bool = False) -> None:
        publish = self._sent.pop(tag)
        if not ok:
            if self.world.takes_publishes:  # else it gives up
                self._again.append(publish)
        elif self.relay is not None:
            self._recent.append(publish)
            tell = self.world.confirmed_early if early else self.world.confirmed_to_client
            tell(self.relay.site, publish.number)

    def declared(self) -> None:
        self.asked = False

    def delivered(self, tag: int) -> None:
        self.held.append(tag)

    def lost(self) -> None:
        """The connection is gone, and with it perhaps the newest confirms."""
        self.relay = None
        self.held = []
        self.asked = False
        unheard = list(self._sent.values())
        if self.numbered:
            unheard += self.committing  # one by one: those that are in the log are confirmed
        self.committing = []
        self._sent.clear()
        if self.numbered:
            known = {p.id for p in (*unheard, *self._again)}
            unheard = [*(p for p in self._recent if p.id not in known), *unheard]
            self._again = deque(sorted([*unheard, *self._again], key=lambda p: p.id))
        elif self.world.takes_publishes:
            # Nobody can know that it is the same message, so it is a new one.
            self._again.extend(p._replace(number=self.world.next_number()) for p in unheard)
        self._recent.clear()
