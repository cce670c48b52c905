"""The status of a group's nodes, as one of its sidecars has it: its own, and that of the others over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from lrq_ha.overview.asking import Report, Target, ask_all

#: However many pages look at a node, it asks the others no more often.
ASK_INTERVAL_S = 0.5


class GroupWatch:
    """The nodes of a group.

    Args:
        own: This node's status.
        others: The other nodes of its configuration.
    """

    def __init__(self, own: Callable[[], Report], others: Callable[[], Sequence[Target]]) -> None:
        self._own = own
        self._others = others
        self._asking: asyncio.Task[list[Report]] | None = None
        self._again_at = 0.0

    async def look(self) -> list[Report]:
        """The status of this node, and of the others in the order of the configuration. Takes `STATUS_TIMEOUT_S` at most."""
        if self._asking is None or (self._asking.done() and time.monotonic() >= self._again_at):
            self._asking = asyncio.create_task(asyncio.to_thread(ask_all, list(self._others())))
            self._again_at = time.monotonic() + ASK_INTERVAL_S
        others = await asyncio.shield(self._asking)
        return [self._own(), *others]
