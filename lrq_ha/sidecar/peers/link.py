"""This node's connection to another node's door: control messages and pushes go out on it, acks of pushes come back.

Rules: it is reopened without end, with a growing pause; channel 1 is for control messages, channel 2 for pushes (broker_plugin/door/peer.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from broker_plugin.amqp.connection import Address, Channel, Connection
from broker_plugin.door.peer import PROCESS
from broker_plugin.log import codec
from lrq_ha.errors import LrqError
from lrq_ha.replication.subscription import StoredBatch
from lrq_ha.routing.names import LOG_PREFIX

log = logging.getLogger("lrq_ha.links")

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
STEADY_S = 2.0  # a link that stood that long resets the back-off; a link that the other node ends each time does not
CONNECT_TIMEOUT_S = 3.0
HEARTBEAT_S = 2
PARTING_S = 2.0  # no client is served meanwhile


class Link:
    """The link to one peer.

    Args:
        me, group: This node's id and group.
        peer: The other node's id.
        name: The other node's name.
        address: The other node's door, vhost lrq.
        on_up, on_down: Called when the link is up, and when it is lost.
        on_ack: Called with the sequence up to which the other node has the log.
    """

    def __init__(
        self,
        me: int,
        group: str,
        peer: int,
        name: str,
        address: Address,
        on_up: Callable[[int], None],
        on_down: Callable[[int], None],
        on_ack: Callable[[int, int], None],
    ) -> None:
        self.peer = peer
        self._name = name
        self._me, self._group = me, group
        self._address = address
        self._queue = LOG_PREFIX + group
        self._on_up, self._on_down, self._on_ack = on_up, on_down, on_ack
        self._connection: Connection | None = None
        self._control: Channel | None = None
        self._pushes: Channel | None = None
        self._sent: deque[tuple[int, int]] = deque()
        self.problem = "not connected yet"
        self._noted = ""

    @property
    def up(self) -> bool:
        return self._pushes is not None

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        loop = asyncio.get_running_loop()
        pause = BACKOFF_FIRST_S
        while True:
            lost = asyncio.Event()
            try:
                properties = {"lrq_node": self._me, "lrq_group": self._group, "lrq_process": PROCESS}
                connection = await Connection.open(
                    self._address,
                    client_properties=properties,
                    heartbeat_s=HEARTBEAT_S,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    on_close=lambda _error, lost=lost: lost.set(),  # type: ignore[misc]
                )
                try:
                    self._connection = connection
                    control = await connection.channel()
                    pushes = await connection.channel(on_confirm=self._confirmed)
                    await pushes.confirm_select()
                    self._control, self._pushes = control, pushes
                    self._sent.clear()
                    self.problem = ""
                    up_at = loop.time()
                    self._on_up(self.peer)
                    await lost.wait()
                    if loop.time() - up_at >= STEADY_S:
                        pause = BACKOFF_FIRST_S
                    self._note(str(connection.error or "closed"))
                finally:
                    was_up, self._connection, self._control, self._pushes = self.up, None, None, None
                    connection.abort()
                    if was_up:
                        self._on_down(self.peer)
            except LrqError as error:
                self._note(str(error))
            await asyncio.sleep(pause)
            pause = min(BACKOFF_MAX_S, pause * 2)

    def _note(self, problem: str) -> None:
        self.problem = problem
        if problem != self._noted:
            self._noted = problem
            log.info("no link to %s: %s", self._name, problem)

    def send(self, body: bytes) -> None:
        """Sends a control message; it is lost if the link is down."""
        if self._control is not None and self._control.error is None:
            self._control.publish("", self._queue, body, {codec.CONTROL: 1}, persistent=False)

    def push(self, batch: StoredBatch, leader: int, safe: int) -> None:
        """Sends a batch."""
        if self._pushes is not None and self._pushes.error is None:
            header = batch.header
            headers = codec.batch_headers(header, safe) | {codec.LEADER: leader}
            tag = self._pushes.publish("", self._queue, batch.body, headers)
            self._sent.append((tag, header.last))

    def _confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        answered = self._pushes.answered_to if self._pushes else 0
        last = 0
        while self._sent and self._sent[0][0] <= answered:
            last = self._sent.popleft()[1]
        if last:
            self._on_ack(self.peer, last)

    async def part(self) -> bool:
        """Ends the link in order. Returns whether the other node has taken everything sent: it answers the close when it has.

        False if data was lost with the link before, or the answer does not come in time.
        """
        connection = self._connection
        if connection is None or not self.up:
            return False
        try:
            async with asyncio.timeout(PARTING_S):
                await connection.close(200, "handed over")
        except TimeoutError:
            connection.abort()
        return connection.error is not None and connection.error.code == 200

    def drop(self) -> None:
        """Closes the connection; `run` opens it again."""
        if self._connection is not None:
            self._connection.abort()
