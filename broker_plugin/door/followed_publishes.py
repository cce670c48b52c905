"""The publishes of one connection whose outcome interceptors wait for: the log has them, and the broker has not answered them."""

from __future__ import annotations

from collections.abc import Callable

from lrq_ha.interceptors.events import Message, Outcome

from ..log.messages import Settled

FOLLOWED_MAX = 100_000  # of one connection; about 1 KB each


class FollowedPublishes:
    """Publishes by channel and sequence.

    Args:
        tell: Called with the channel, the message and the outcome of each.
    """

    def __init__(self, tell: Callable[[int, Message, Outcome], None]) -> None:
        self._tell = tell
        self._messages: dict[int, dict[int, Message]] = {}
        self._returned: set[int] = set()
        self.count = 0

    def follow(self, number: int, sequence: int, message: Message) -> None:
        """A publish on channel `number` is in the log. Above the limit it is not followed."""
        if self.count >= FOLLOWED_MAX:
            self._tell(number, message, Outcome.UNFOLLOWED)
            return
        self.count += 1
        self._messages.setdefault(number, {})[sequence] = message

    def returned(self, number: int, sequence: int) -> None:
        """The broker has returned a publish; its answer follows."""
        if sequence in self._messages.get(number, ()):
            self._returned.add(sequence)

    def answered(self, number: int, settled: list[Settled], ok: bool) -> None:
        """The broker has answered these publishes of a channel."""
        followed = self._messages.get(number)
        if not followed:
            return
        for run in settled:
            for sequence in range(run.sequence, run.sequence + run.publishes) if run.sequence else ():
                message = followed.pop(sequence, None)
                if message is None:
                    continue
                self.count -= 1
                outcome = Outcome.ACCEPTED if ok else Outcome.NACKED
                if sequence in self._returned:
                    self._returned.discard(sequence)
                    outcome = Outcome.UNROUTABLE
                self._tell(number, message, outcome)

    def unanswered(self, number: int) -> None:
        """A channel has ended: the broker answers no more publishes on it."""
        followed = self._messages.pop(number, {})
        self.count -= len(followed)
        for sequence, message in followed.items():
            self._returned.discard(sequence)
            self._tell(number, message, Outcome.UNANSWERED)
