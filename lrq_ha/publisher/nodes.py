"""Which address to try next and when: pure. Rules: addresses are taken in turn; a round is quick, and after a round in which none
took us the wait doubles up to a bound; random jitter (handed in) keeps a crowd of clients from coming back all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

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
