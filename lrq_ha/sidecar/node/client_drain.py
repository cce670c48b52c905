"""Drain of a primary's clients in order, before it steps down.

Rules: consumers get time to settle their deliveries; if they do not, nothing has changed, unless the operator forces the drain. Then the door stays
closed as long as there is a reason, and everything becomes safe. A drain for one command excludes a drain for another meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from broker_plugin.door import drain
from broker_plugin.door.server import Door

from .core import Core

STEP_DOWN_TIMEOUT_S = 10.0
POLL_S = 0.005


class ClientDrain:
    """Closes the door of a primary in order.

    Args:
        door: The door.
        core: The core whose log is to become safe.

    Attributes:
        door: The door.
        reason: Why clients are turned away, while this node is primary; empty if they are not.
        renewing: Why they must not be turned away now; empty if they may be.
        progress: Progress of the drain; empty if there is none to report.
    """

    def __init__(self, door: Door, core: Core) -> None:
        self.door = door
        self.reason = ""
        self.renewing = ""
        self.progress: Callable[[], str] = str
        self._core = core
        self._node = core.node
        self._replica = core.replica

    @property
    def busy(self) -> str:
        """The action under way; empty if there is none."""
        return self.reason or self.renewing or self.door.draining

    @property
    def alarm(self) -> str:
        """Why the broker accepts no writes to the log, so that publishers wait; empty if it does."""
        return self.door.log_blocked

    def held(self) -> int:
        """Deliveries that consumers have not settled."""
        return drain.held(self.door)

    def hold(self, reason: str) -> None:
        """No new client is let in from now on; connected clients stay."""
        self.reason = reason

    def end(self) -> None:
        """Clients are served again."""
        self.reason = ""

    async def begin(self, node: int, reason: str, timeout_s: float, *, force: bool) -> tuple[bool, str, int]:
        """Turns every client away in order and waits until everything is safe; if that succeeds, no client is let in until `end`.

        Only while no other action is under way (`busy`).

        Args:
            node: Id of the node that must have the whole log, too; 0: none.
            reason: Text for clients.
            timeout_s: Seconds that consumers have to settle their deliveries.
            force: Go on after that time.

        Returns:
            Whether it was done; the text of the answer; number of deliveries that consumers have not settled.
        """
        try:
            left = await drain.drain(self.door, f"{reason}; consumers have {timeout_s:g} s to finish what they hold", timeout_s)
            if not self._core.ready:
                return False, "this node is not primary any more", left
            if left and not force:
                drain.give_up(self.door)
                return False, (
                    f"consumers still hold {left} messages after {timeout_s:g} s; nothing was changed. Wait longer with --timeout, or repeat with "
                    "--force: they are then delivered again"
                ), left
            self.hold(reason)
            await drain.close(self.door, reason, STEP_DOWN_TIMEOUT_S)
        finally:
            self.door.draining = ""  # also if this incarnation is over: the door is the next one's then
        ok, text = await self.become_safe(node)
        return ok, f"; {left} messages are delivered again" if ok and left else text, left

    async def become_safe(self, node: int) -> tuple[bool, str]:
        """Waits until the whole log is safe, and returns at that moment; if it takes too long, clients are served again, and the text says so.

        Args:
            node: As of `begin`.
        """
        deadline = time.monotonic() + STEP_DOWN_TIMEOUT_S
        while not self._all_safe(node):
            if time.monotonic() >= deadline:
                self.end()
                return False, f"the log did not become safe within {STEP_DOWN_TIMEOUT_S:g} s: this node goes on as primary"
            await asyncio.sleep(POLL_S)
        return True, ""

    def _all_safe(self, node: int) -> bool:
        acknowledged = node == 0 or self._node.peers[node].acknowledged == self._node.log.end
        return self._node.safe == self._node.log.end == self._replica.end and acknowledged
