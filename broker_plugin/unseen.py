"""What a quorum queue may hold without a word: it is ready to nobody, so no answer that AMQP gives counts it (measured). Pure.

Rules:
- With delayed retries (RabbitMQ 4.3) what was given back is held back for a while, at most `x-delayed-retry-max`. Of type `failed` that is what was
  rejected, or held by a channel that closed; of type `returned` the rest, also what a sidecar looks at and gives back; of type `all` everything.
- With `x-dead-letter-strategy: at-least-once` (all versions) dead letters stay until their target has taken them: for ever, if there is none.
- What policies say is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LATE_S = 1.0  # a broker's timers


def held_back_s(arguments: Mapping[str, Any]) -> float:
    """How long a queue declared so holds back what is given back to it, at most; 0: not at all; infinite: nobody knows."""
    if arguments.get("x-delayed-retry-type", "disabled") == "disabled":
        return 0.0
    longest = arguments.get("x-delayed-retry-max", arguments.get("x-delayed-retry-min"))
    return longest / 1_000 + LATE_S if isinstance(longest, int) else math.inf


def keeps_dead_letters(arguments: Mapping[str, Any]) -> bool:
    """Whether dead letters may wait in a queue declared so."""
    return arguments.get("x-dead-letter-strategy") == "at-least-once"
