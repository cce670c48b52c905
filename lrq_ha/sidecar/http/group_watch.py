"""The status of a group's nodes, as one of its sidecars has it: its own, and that of the others over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lrq_ha.overview.asking import STATUS_TIMEOUT_S, Report, Target, begin_asking, result_of


class GroupWatch:
    """The nodes of a group.

    Args:
        own: This node's status.
        others: The other nodes of its configuration.
    """

    def __init__(self, own: Callable[[], Report], others: Callable[[], Sequence[Target]]) -> None:
        self._own = own
        self._others = others
        self._asked: dict[Target, Future[Report]] = {}

    async def look(self) -> list[Report]:
        """The status of this node, and of the others in the order of the configuration, within `STATUS_TIMEOUT_S`.

        A node that has not answered the last question yet is not asked another one.
        """
        own, before = self._own(), self._asked
        self._asked = {other: before[other] if other in before and not before[other].done() else begin_asking(other) for other in self._others()}
        waiters = [asyncio.wrap_future(answer) for answer in self._asked.values()]
        if waiters:
            _, late = await asyncio.wait(waiters, timeout=STATUS_TIMEOUT_S)
            for waiter in late:
                waiter.cancel()
        return [own, *(result_of(other, answer) for other, answer in self._asked.items())]
