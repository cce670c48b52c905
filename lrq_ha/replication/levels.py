"""How much of a queue the other nodes get: its level. Pure.

Rules:

- `all`: its declaration, bindings and messages. `configuration`: its declaration and bindings; its messages are this broker's alone. `none`: nothing.
- A queue's level is settled when it is declared: by the argument `x-lrq-replicate`, else by the first pattern that its name matches, else `none`.
  What stands in the log then counts until the queue is deleted: neither a later declaration without the argument nor other patterns change it.
- An exchange holds no messages: it is replicated unless its name has the level `none`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from lrq_ha.errors import LrqError

ARGUMENT = "x-lrq-replicate"


class Level(Enum):
    """The level of a queue, as its argument and the configuration name it."""

    NONE = "none"
    CONFIGURATION = "configuration"
    ALL = "all"


ALLOWED = ", ".join(level.value for level in Level)


class BadLevel(LrqError):
    """A level, or a pattern of names, that there is not."""


def parse(value: object) -> Level:
    """The level of this name. Raises BadLevel, which names those that there are."""
    for level in Level:
        if value == level.value:
            return level
    raise BadLevel(f"{value!r} is none of the levels {ALLOWED}")


class Levels:
    """What new queues and exchanges get by their names.

    Args:
        patterns: Regular expressions and the names of levels; the first that is found in a name counts.

    Raises:
        BadLevel: A pattern or level cannot be used.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = []
        for pattern, level in patterns.items():
            try:
                self._patterns.append((re.compile(pattern), parse(level)))
            except re.error as error:
                raise BadLevel(f"pattern '{pattern}' is no regular expression: {error}") from error
            except BadLevel as error:
                raise BadLevel(f"pattern '{pattern}': {error.what}") from error

    def of(self, name: str) -> Level:
        """The level of this name; what RabbitMQ itself names (`amq.…`) is never replicated, nor is what has no name yet."""
        if not name or name.startswith("amq."):
            return Level.NONE
        return next((level for pattern, level in self._patterns if pattern.search(name)), Level.NONE)
