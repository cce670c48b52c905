"""Which queues may refuse a message because they are full: those within its reach that are declared so
(`x-overflow`). No I/O.

Rules:
- As in `bindings`, one queue too many is better than one too few. Settings by policies, and bindings made around the
  door, are not seen.
- Only declarations up to the entry that this node has come to count: its broker knows nothing of later entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..amqp import declarations
from ..log.bindings import KNOWN_MAX, binding_table
from ..log.catalog import Catalog
from ..log.definitions import Definitions

REFUSE = frozenset({"reject-publish", declarations.REJECT_PUBLISH_DLX})


class Reach(NamedTuple):
    """The queues that a message may reach, and those of them that may refuse it."""

    queues: frozenset[str]
    refuse: frozenset[str]


class QueueLimits:
    """Queue limits of one vhost, as this node's broker has them. `reached`: asked for the entry that the node has come to."""

    def __init__(self, declared: Catalog, vhost: str, reached: Callable[[], int]) -> None:
        self._declared = declared
        self._vhost = vhost
        self._reached = reached
        self._known: dict[tuple[str, tuple[str, ...]], Reach] = {}
        self._known_of: tuple[Definitions, int] | None = None

    def reach(self, exchange: str, keys: tuple[str, ...]) -> Reach:
        """The queues that a publish with these routing keys may reach."""
        definitions = self._declared.definitions.at(self._reached())
        if self._known_of != (definitions, definitions.version) or len(self._known) >= KNOWN_MAX:
            self._known, self._known_of = {}, (definitions, definitions.version)
        found = self._known.get((exchange, keys))
        if found is None:
            ways = binding_table(definitions, self._vhost)
            queues = frozenset().union(*(ways.queues(exchange, key) for key in keys))
            refuse = frozenset(queue for queue in queues if self._argument(definitions, queue, "x-overflow") in REFUSE)
            found = self._known[exchange, keys] = Reach(queues, refuse)
        return found

    def length_max(self, queue: str) -> int | None:
        """How many messages a queue takes; None: unknown."""
        found = self._argument(self._declared.definitions.at(self._reached()), queue, "x-max-length")
        return found if isinstance(found, int) else None

    def _argument(self, definitions: Definitions, queue: str, name: str) -> object:
        method = definitions.queue((self._vhost, queue)) or b""
        return declarations.queue_arguments(method)[name] if declarations.has_argument(method, name) else None
