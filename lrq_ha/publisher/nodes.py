"""The next address to try, its time, and each address's last answer: pure.

Rules: addresses are taken in turn; a round is quick, and after a round in which none took us the wait doubles up to a bound; random jitter
(an argument) keeps many clients from reconnecting at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lrq_ha.publisher.errors import NoPrimary

STEP_S = 0.05  # between two addresses of one round
DELAY_MIN_S = 0.1
DELAY_MAX_S = 5.0


@dataclass(slots=True)
class Rotation:
    """Turns over `count` (>= 1) addresses.

    Attributes:
        current: Index of the address in use or being tried.
        failures: Attempts since the last login that held.
    """

    count: int
    current: int = 0
    failures: int = field(default=0)

    def next(self, jitter: float) -> float:
        """Moves on to the next address. Returns the seconds to wait first; `jitter` in 0..1 scales a wait between rounds from half to all of it."""
        self.current = (self.current + 1) % self.count
        self.failures += 1
        rounds, rest = divmod(self.failures, self.count)
        if rest or not rounds:
            return STEP_S
        wait_s = min(DELAY_MIN_S * 2.0 ** min(rounds - 1, 16), DELAY_MAX_S)
        return wait_s * (0.5 + 0.5 * jitter)

    def succeeded(self) -> None:
        """The address holds (it has confirmed something, or stayed for a while): the next loss starts with short waits again."""
        self.failures = 0


class Addresses:
    """The addresses of a group's doors for one vhost, the one in use, and the last answer of each.

    Args:
        vhost: The vhost of the connections.
        names: host:port of each address, without credentials, since they are shown to people.
    """

    def __init__(self, vhost: str, names: Sequence[str]) -> None:
        self.vhost = vhost
        self.names = tuple(names)
        self._rotation = Rotation(len(names))
        self._answers: dict[str, str] = {}

    @property
    def index(self) -> int:
        """Of the address in use or being tried."""
        return self._rotation.current

    @property
    def here(self) -> str:
        """The address at `index`, for people."""
        return f"{self.names[self.index]} vhost {self.vhost!r}"

    @property
    def answers(self) -> dict[str, str]:
        """host:port -> its last answer."""
        return {name: self._answers.get(name, "not tried yet") for name in self.names}

    def trying(self) -> None:
        """An attempt begins. The address's last answer stands until it answers again."""
        self._answers.setdefault(self.names[self.index], "no answer yet")

    def took_us(self) -> None:
        """The login has succeeded."""
        self._answers[self.names[self.index]] = "takes publishes"

    def holds(self) -> None:
        """The address has confirmed something, or stayed for a while."""
        self._rotation.succeeded()

    def left(self, why: str, jitter: float) -> float:
        """The attempt failed or the connection is lost. Moves on; returns the seconds to wait first (see Rotation.next)."""
        self._answers[self.names[self.index]] = why
        return self._rotation.next(jitter)

    def no_primary(self) -> NoPrimary:
        return NoPrimary(self.vhost, self.answers)
