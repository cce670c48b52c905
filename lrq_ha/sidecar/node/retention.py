"""The head of the own log, which the broker drops when the log is full, and the receivers that still need it (R17).

Rules: the head is looked up at a start, whenever the log has grown by a part of its size, and a while after any growth, as the broker drops
it a little later. A peer that may fall off the log, or has, is reported once in this sidecar's log, and all the time in its status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from broker_plugin.log.streams import segment_bytes
from lrq_ha.replication.events import CannotSend, HeadMoved
from lrq_ha.replication.node import Node
from lrq_ha.replication.retention import Retention

log = logging.getLogger("lrq_ha.node")

LOOKS_PER_LOG = 32
LOOK_INTERVAL_S = 2.0
WATCH_INTERVAL_S = 1.0


class Watch:
    """Watches the log's head.

    Args:
        node: The pure core.
        log_bytes_max: Size of the log.
        head: Looks up the first entry that the own stream has; 0 if it has none.
        feed: Gives an event to the core.
    """

    def __init__(self, node: Node, log_bytes_max: int, head: Callable[[], Awaitable[int]], feed: Callable[[HeadMoved | CannotSend], None]) -> None:
        self.retention = Retention(log_bytes_max, segment_bytes(log_bytes_max))
        self._node = node
        self._log_bytes_max = log_bytes_max
        self._head = head
        self._feed = feed
        self._grown = 0
        self._looked_at = self._grown_at = 0.0
        self._said: dict[int, str] = {}

    async def run(self) -> None:
        """Looks and reports until cancelled."""
        while True:
            await self.look()
            self.tell()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def appended(self, last: int, size: int) -> None:
        """A batch went into the log."""
        self.retention.appended(last, size)
        self._grown += size
        self._grown_at = time.monotonic()

    async def look(self, *, now: bool = False) -> None:
        """Looks up the head if it may have moved, or `now`."""
        at = time.monotonic()
        later = at - self._looked_at > LOOK_INTERVAL_S and self._looked_at < self._grown_at + LOOK_INTERVAL_S
        if now or later or not self._node.head or self._grown >= self._log_bytes_max // LOOKS_PER_LOG:
            self._grown, self._looked_at = 0, at
            self._feed(HeadMoved(await self._head()))

    async def cannot_send(self, peer: int) -> None:
        """The own stream no longer has the entries that a peer needs next."""
        await self.look(now=True)
        self._feed(CannotSend(peer))

    def has(self, peer: int) -> int | None:
        """The last entry that a peer is known to have; before it is heard in this epoch, by what the log tells. None: unknown."""
        remote = self._node.peers[peer]
        if remote.subscribed or remote.acknowledged:
            return remote.acknowledged
        if remote.left and peer in self._node.log.members:
            # It stays in the set though it has lost its log, or its end (mode strict): by its own Hello.
            return (remote.hello and remote.hello.log.end) or None
        return self._node.log.in_set_upto(peer) or None

    def gauge(self, peer: int) -> dict[str, int | None]:
        """For the status: bytes of the log that a peer lacks, and bytes until the broker drops entries that the peer needs."""
        has = self.has(peer) if self._node.leading else None
        if has is None:
            return {"log_bytes_behind": None, "log_bytes_left": None}
        gone = self._node.head > has + 1
        return {"log_bytes_behind": self.retention.behind(has), "log_bytes_left": 0 if gone else self.retention.left(has)}

    def tell(self) -> None:
        """Reports changes."""
        for peer in self._node.peers:
            trouble = self.trouble(peer)
            if trouble and self._said.get(peer, "")[:40] != trouble[:40]:
                log.warning("%s", trouble)
            self._said[peer] = trouble

    def trouble(self, peer: int) -> str:
        """Text: the obstacle between a peer and this primary's log, and its consequence; empty if there is none."""
        return "; ".join(filter(None, (self._lacks(peer), self._holds(peer)))) if self._node.leading else ""

    def _holds(self, peer: int) -> str:
        """Mode strict: text: confirms wait for the peer, and why; empty if they do not."""
        node, remote = self._node, self._node.peers[peer]
        if not node.settings.strict or peer not in node.log.members or (remote.subscribed and not remote.left):
            return ""
        name, why = node.name(peer), f" ({remote.left})" if remote.left else ""
        return f"nothing is confirmed until {name} has caught up{why}, or until lrq-ha remove {name}"

    def _lacks(self, peer: int) -> str:
        """Text: entries that a peer needs and that are dropped, or will be soon."""
        node, remote = self._node, self._node.peers[peer]
        name, known, has = node.name(peer), remote.hello.log if remote.hello else None, self.has(peer)
        if remote.fallen and known is not None:
            return node.how_to_join(peer, node.me, known, node.state())
        if has is None:
            return ""
        if node.head > has + 1 and not remote.subscribed:
            return f"{name} has fallen off the log, which begins at entry {node.head} now: what it has ends at {has}"
        if self.retention.in_danger(has):
            behind, left = self.retention.behind(has), self.retention.left(has)
            return (
                f"{name} is in danger of falling off the log: it lacks {behind} bytes, and after {left} more the broker drops what it needs next "
                f"(log_bytes_max {self._log_bytes_max}): bring it back, or it has to be rebuilt"
            )
        return ""
