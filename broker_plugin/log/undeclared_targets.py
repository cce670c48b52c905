"""The queues and exchanges that clients publish to, and that the log does not declare: `strays` looks at them."""

from __future__ import annotations

from typing import NamedTuple

from .catalog import Catalog

TARGETS_MAX = 1_000


class Target(NamedTuple):
    """A queue or exchange that a client publishes to."""

    vhost: str
    name: str
    is_exchange: bool


class UndeclaredTargets:
    """Targets of clients' publishes. `catalog`: knows the log's declarations.

    Attributes:
        targets: Those that the log did not declare, in the order of the publishes: TARGETS_MAX at most.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.targets: dict[Target, None] = {}

    def note_publish(self, vhost: str, exchange: str, routing_key: str) -> None:
        """Notes the target of a client's publishes, unless the log declares it."""
        if exchange.startswith("amq."):
            return
        target = Target(vhost, exchange or routing_key, bool(exchange))
        if len(self.targets) < TARGETS_MAX and not self.is_declared(target):
            self.targets[target] = None

    def is_declared(self, target: Target) -> bool:
        """Whether the log declares the target by now."""
        definitions = self._catalog.definitions
        found = definitions.exchange(target.vhost, target.name) if target.is_exchange else definitions.queue((target.vhost, target.name))
        return found is not None
