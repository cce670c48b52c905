"""The door's host in an incarnation: takes other nodes' messages, and decides whether clients are served.

Rules:

- A node speaks under its own id only, and only if this node's configuration has it. Its newest connection that speaks replaces the older.
- A push counts only on that connection; it is acked when the core says so.
- A backup that does not get its queues written takes no more of the log, and so slows the publishers: soon, as a promotion has to write the lag
  (`pace`), but only in the set, where confirms wait for it; and permanently if it would hold too much. Only the primary that it follows is not
  read: other nodes' requests, and a primary that is not followed yet, are read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import NoReturn

from broker_plugin.amqp import encode
from broker_plugin.amqp.reply_codes import NOT_ALLOWED
from broker_plugin.apply.applier import Applier
from broker_plugin.door.peer import PeerConnection
from broker_plugin.door.relay import Primary
from broker_plugin.log import codec
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Ack, PeerGone, PeerMessage, Push, RefusePush
from lrq_ha.replication.positions import owner_of

from ..config import Config
from ..node.client_drain import ClientDrain
from ..node.core import Core
from ..node.recovery import state_before
from .pace import Pace

log = logging.getLogger("lrq_ha.node")

#: While full queues refuse messages, this many times the limit may wait: operations that make room in them come with the log.
FULL_LIMITS = 4
HOLD_SHARE = 1 / 3  # of backup_timeout_s: the longest pause at a time for a lag
REFUSAL_SHOWN_S = 5.0  # a node that was refused tries again every second
PAUSED_SHOWN_S = 2.0  # a backup that is too slow alternates between pause and progress
PAUSED_SAID_AGAIN_S = 60.0


class PeerServer:
    """The door's Host in this incarnation.

    Args:
        config: The node's configuration.
        core: Gets the events.
        turning_away: Why a primary serves no clients.
        applier: Asked for the queues' lag.
    """

    def __init__(self, config: Config, core: Core, turning_away: ClientDrain, applier: Callable[[], Applier]) -> None:
        self.replica = core.replica
        self._config = config
        self._core = core
        self._node = core.node
        self._turning_away = turning_away
        doors = {config.node.id: None, **{peer.id: config.door_address(peer.door, "/") for peer in config.peers}}
        self._primaries = {number: Primary(number, config.names[number], door) for number, door in doors.items()}
        self._ends: dict[int, PeerConnection] = {}
        self._refused = (0.0, "")
        self._applier = applier
        self._pace = Pace(config.replication.apply_lag_s_max, config.replication.backup_timeout_s * HOLD_SHARE)
        self._paused = False
        self._held = False  # paused at the last look, as it holds too much
        self._pause = (-math.inf, "")  # time of the last pause, and the queues' lag then
        self._said_at = -math.inf

    def hears(self, peer: int) -> bool:
        """Whether a peer is connected to this door and has spoken."""
        return peer in self._ends

    @property
    def refused(self) -> str:
        """Why a node was refused as a member of the group just now; empty if none was refused."""
        at, refusal = self._refused
        return refusal if time.monotonic() - at < REFUSAL_SHOWN_S else ""

    # ---- door.Host ---------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""
        if self._node.serving:
            return self._turning_away.reason or self._node.cut_off
        me, primary = self._config.node.name, self._node.primary()
        if primary and primary != self._config.node.id:
            return f"node {me} is a backup; primary is {self._node.name(primary)}"
        return f"node {me} is {self._node.role.value} ({self._node.reason}); it serves no clients"

    def primary(self) -> Primary | None:
        """The primary, as far as this node knows; None if it knows none."""
        primary = self._node.primary()
        return self._primaries.get(primary) if primary else None

    def control(self, end: PeerConnection, body: bytes) -> None:
        """A control message of another node. Raises LrqError if the node is not of the group."""
        try:
            sender, message = codec.decode_control(body, self._config.node.group)
        except codec.UnsuitableVersion as error:
            self._refuse(end, f"{self._node.name(end.node)}: {error}")
        refusal = self._refusal_of(sender) if sender == end.node else f"node {end.node} speaks as node {sender}"
        if refusal:
            self._refuse(end, refusal)
        old = self._ends.get(end.node)
        if old is not end:
            self._ends[end.node] = end
            if old is not None:
                old.close()
        self._core.feed(PeerMessage(sender, message))

    def _refuse(self, end: PeerConnection, refusal: str) -> NoReturn:
        """Tells a node that it is refused as a member of the group, and raises LrqError."""
        self._refused = (time.monotonic(), refusal)
        if end.transport is not None:
            end.transport.write(encode.connection_close(NOT_ALLOWED, refusal))
        raise LrqError(refusal)

    def _refusal_of(self, sender: int) -> str:
        """Why a node is refused as a member of the group; empty if it is accepted."""
        node = self._config.node
        if sender == node.id:
            return f"two nodes of group {node.group} have the id {sender}, {node.name} is one: give each its own in [node] id and [[peers]] id"
        if sender not in self._node.peers:
            return f"node {sender} is not among the [[peers]] of {node.name} (id {node.id}): correct them or the node's [node] id"
        return ""

    def push(self, end: PeerConnection, header: bytes, body: bytes) -> None:
        """A batch of the log from its leader."""
        batch, safe = codec.parse_batch(codec.header_table(header))
        if self._ends.get(end.node) is not end:
            end.close()
            return
        end.expect_ack(batch.last)
        before = None
        if batch.begins_renewal and not self._node.log.end:
            before = state_before(pb.Batch.FromString(body).runs[0].checkpoint)
        self._core.feed(Push(end.node, batch, safe, body, before))
        self._consider_pausing()

    def peer_gone(self, end: PeerConnection) -> None:
        """The other node's connection to this door is lost."""
        if self._ends.get(end.node) is end:
            del self._ends[end.node]
            self._core.feed(PeerGone(end.node))

    def arriving_bytes(self) -> int:
        """Bytes received of the batch that the primary sends."""
        end = self._ends.get(self._node.primary())
        return end.arriving_bytes if end is not None else 0

    # ---- effects -----------------------------------------------------------------------------------------------------

    def ack(self, effect: Ack) -> None:
        """Acks pushes."""
        end = self._ends.get(effect.peer)
        if end is not None:
            end.acknowledge(effect.upto)

    def refuse_push(self, effect: RefusePush) -> None:
        """Ends the connection that a push came on. The sender counts as alive: it will speak on its next connection."""
        end = self._ends.pop(effect.peer, None)
        if end is not None:
            log.info("refused a push of %s: %s", self._node.name(effect.peer), effect.reason)
            asyncio.get_running_loop().call_soon(end.close)

    # ---- back-pressure -----------------------------------------------------------------------------------------------

    def applied(self) -> None:
        """The applier's queue may have shrunk, or this node follow another primary. Call it periodically: a paused connection brings no event."""
        if self._paused or self.replica.to_apply:
            self._consider_pausing()

    def _consider_pausing(self) -> None:
        """A backup that does not get its queues written takes no more of the log, and so slows the publishers.

        Not while it waits for news that only the log brings: the safe position; and later operations that may make room in a full queue. The pause is
        short, as a backup without progress for backup_timeout_s is removed.
        """
        node, replica = self._node, self.replica
        primary = owner_of(node.leader_epoch) if node.following else 0
        behind = self._behind()
        paused = bool(behind) and primary > 0 and (not replica.to_apply or replica.to_apply[0].last <= replica.progress.safe)
        if paused or self._paused:  # one that has connected meanwhile, too
            if paused:
                self._pauses(behind)
            self._paused = paused
            for peer, end in self._ends.items():
                end.pause(paused and peer == primary)

    def _behind(self) -> str:
        """The queues' lag, for people, if it is too large."""
        settings, replica = self._config.replication, self.replica
        limit = min(settings.apply_lag_bytes_max, settings.log_quarter_bytes)
        if replica.progress.parked:
            limit *= FULL_LIMITS
        held = replica.to_apply_bytes + replica.progress.parked_bytes
        applier = self._applier()
        overdue = applier.overdue() if self._node.log.in_set else 0
        slow = self._pace.look(time.monotonic(), replica.reached(), self._node.log.end, overdue, applier.waited_s())
        if held > (limit - limit // 16 if self._held else limit):
            self._held = True
            return f"{held >> 20} MiB"
        self._held = False
        return f"{overdue} entries" if slow else ""

    @property
    def pausing(self) -> str:
        """Text: this backup takes no more of the log, or did just now, and why; empty if it is fast enough."""
        at, behind = self._pause
        if time.monotonic() - at > PAUSED_SHOWN_S:
            return ""
        waiting = ", which slows publishers" if self._node.log.in_set else ""
        return f"its queues are {behind} behind the log: it takes no more of it for the time being{waiting}"

    def _pauses(self, behind: str) -> None:
        """Notes a pause, and logs it now and then."""
        now = time.monotonic()
        self._pause = now, behind
        if not self._paused and now - self._said_at >= PAUSED_SAID_AGAIN_S:
            self._said_at = now
            log.warning("%s", self.pausing)
