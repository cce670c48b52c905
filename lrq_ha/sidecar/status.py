"""The content of GET /status for an incarnation, and the obstacles in words.

Rule: it only reads.
"""

from __future__ import annotations

import time
from typing import Any

from broker_plugin.apply.applier import Applier
from lrq_ha.errors import LrqError
from lrq_ha.replication.roles import Role
from lrq_ha.routing import names
from lrq_ha.routing.statuses import CLIENTS_MAX

from .definitions import Definitions
from .node.client_drain import ClientDrain
from .node.core import Core
from .node.log_growth import LogGrowth
from .node.log_writer import LogWriter, taken_out
from .peers.log_shipping import LogShipping
from .peers.peer_server import PeerServer
from .sites.sessions import Sites
from .sites.snapshot_keeper import SnapshotKeeper

SILENT_SHOWN_S = 3.0
_FOLLOWS = frozenset({Role.JOINING, Role.CATCH_UP, Role.READY})  # it follows a primary, or waits for one


class Status:
    """The status of an incarnation.

    Args:
        core, own_log, sending, receiving, turning_away, sites, keeper, applier, definitions: Parts of the incarnation.

    Attributes:
        since: Unix time since when the node has its role.
    """

    def __init__(
        self,
        core: Core,
        *,
        own_log: LogWriter,
        sending: LogShipping,
        receiving: PeerServer,
        turning_away: ClientDrain,
        sites: Sites,
        keeper: SnapshotKeeper,
        applier: Applier,
        definitions: Definitions,
    ) -> None:
        self.since = time.time()
        self._node = core.node
        self._replica = core.replica
        self._log = own_log
        self._sending = sending
        self._receiving = receiving
        self._turning_away = turning_away
        self._sites = sites
        self._keeper = keeper
        self._applier = applier
        self._definitions = definitions
        self._growth = LogGrowth()
        self._leader_growth = (0, LogGrowth())  # of the primary's log, and the epoch in which this node heard of it

    def ticked(self) -> None:
        """Remembers whether the log, and the primary's, have grown; once per tick."""
        now, node = time.monotonic(), self._node
        self._growth.note_end(node.log.end, now)
        if (end := node.leader_end) is not None:
            if self._leader_growth[0] != node.leader_epoch:
                self._leader_growth = node.leader_epoch, LogGrowth()
            self._leader_growth[1].note_end(end, now)

    def _lag_s(self, has: int) -> float:
        """Seconds since the log was no longer than a peer's, by this node's clock."""
        return 0.0 if has >= self._node.log.end else self._growth.behind_s(has, time.monotonic())

    def _follower_lag(self) -> dict[str, float] | None:
        """What this node lacks of the log of the primary that it follows; None: it follows none. Bytes by the mean size of an entry."""
        node = self._node
        if (leader_end := node.leader_end) is None:
            return None
        entries = max(0, leader_end - node.log.end)
        seconds = self._leader_growth[1].behind_s(node.log.end, time.monotonic()) if entries else 0.0
        return {"entries": entries, "bytes": round(entries * self._log.watch.retention.entry_bytes), "seconds": seconds}

    def _broker(self) -> dict[str, Any]:
        """Whether the own broker takes the log."""
        streams = self._log.streams
        return {
            "version": streams.broker_version,
            "blocked": self._blocked(),
            "alarm": self._turning_away.alarm,
            "silent_s": round(self._log.silent_s(), 2),
        }

    def tell(self) -> dict[str, Any]:
        """Values for JSON, by name."""
        node, replica = self._node, self._replica
        primary = node.primary()
        return {
            "role": node.role.value,
            "serving": node.serving and not node.cut_off,
            "reason": node.reason + self._troubles(),
            "epoch": node.leading or node.leader_epoch,
            "log": replica.index.log_id.hex() or None,
            "head": node.head,
            "end": node.log.end,
            "safe": node.safe,
            "applied": replica.progress.tracker.applied,
            "in_set": node.log.in_set or bool(node.leading),
            "members": [node.name(n) for n in sorted(node.in_sync)],
            "primary": node.name(primary) if primary else None,
            "follower_lag": self._follower_lag(),
            "broker": self._broker(),
            "peers": {node.name(number): self._peer(number) for number in node.peers},
            "sessions": self._sites.status(),
            "receiving": self._keeper.tell(),
            "clients": replica.index.statuses.clients,
            "clients_max": CLIENTS_MAX,
            "since": self.since,
            "generation": replica.index.generations.newest,
            "unsafe_bytes": replica.progress.unsafe_bytes,
            "at_stake_entries": replica.progress.at_stake_entries,
            "at_stake_bytes": replica.progress.at_stake_bytes,
            "to_apply_bytes": replica.to_apply_bytes,
            "memory_bytes": self._log.memory.bytes,
            "checkpoint_bytes": replica.checkpoint_bytes,
            "applied_record_bytes": self._log.record_bytes,
            "paused": node.paused or node.pause_recorded,
            "lacks": node.lacks,
            "definitions": self._definitions.tell(),
            "mode": "strict" if node.settings.strict else "available",
            "diverged_from": node.tail_from if node.role is Role.DIVERGED else None,
        }

    def _peer(self, number: int) -> dict[str, Any]:
        node, watch = self._node, self._log.watch
        peer, has, gauge = node.peers[number], watch.has(number) if node.leading else None, watch.gauge(number)
        on_its_way = self._sending.on_its_way_bytes(number)
        return {
            "connected": peer.connected and self._receiving.hears(number),
            "problem": self._sending.links[number].problem or watch.trouble(number) or self._differs(number),
            "lacks": peer.hello.lacks if peer.hello else "",
            "software": peer.hello.software if peer.hello else "",
            "acked": peer.acknowledged,
            "guard": peer.guard.tell(node.log.end) if node.leading else None,
            "applied": peer.applied,
            "lag_entries": None if has is None else max(0, node.log.end - has),
            "lag_bytes": gauge["log_bytes_behind"] if on_its_way is None else on_its_way,
            **gauge,
            "lag_seconds": None if has is None else self._lag_s(has),
            "apply_lag_entries": max(0, node.log.end - peer.applied) if node.leading else None,
        }

    def _differs(self, number: int) -> str:
        """The keys that must be equal on all nodes and differ on another node; empty if none."""
        node = self._node
        hello = node.peers[number].hello
        if hello is None or not hello.shared:
            return ""
        theirs, me, other = dict(hello.shared), node.name(node.me), node.name(number)
        found = [
            f"replication.{key} is {value} on {me} and {theirs[key]} on {other}"
            for key, value in node.settings.shared
            if theirs.get(key, value) != value
        ]
        return f"{'; '.join(found)}: make it equal on all nodes" if found else ""

    def _lacking_peers(self) -> list[str]:
        """The features that other nodes' brokers lack, in their own words."""
        node = self._node
        return [f"{node.name(number)}: {lacks}" for number, lacks in sorted(node.lacking().items()) if number != node.me]

    def _troubles(self) -> str:
        """Faults of the broker, full queues, actions under way, obstacles between nodes, and nodes that a primary's log may leave behind."""
        node = self._node
        own_log, definitions = (self._log.record_trouble(), self._log.size_trouble()), self._definitions.trouble()
        broker = (self._blocked(), node.lacks, self._applier.full(), *own_log, definitions)
        if node.leading:
            behind = "; ".join(filter(None, map(self._log.watch.trouble, node.peers)))
            doing, how_far = self._turning_away.busy, self._turning_away.progress()
            others = (*self._lacking_peers(), *map(self._differs, node.peers))
            own = (self._log.trouble(), self._sites.trouble(), self._keeper.trouble(), self._at_stake())
            known = (*broker, node.cut_off, doing, how_far, taken_out(node), behind, *own, *self._cut_off(), *others)
            return "".join(f"; {trouble}" for trouble in known if trouble)
        if node.role not in _FOLLOWS or node.primary():
            return "".join(f"; {trouble}" for trouble in (*broker, self._receiving.pausing) if trouble)
        troubles = [*filter(None, (node.lacks,)), *self._cut_off()]
        if refusal := self._receiving.refused:
            troubles.append(f"refused: {refusal}")
        return f" ({'; '.join(troubles)})" if troubles else ""

    def _cut_off(self) -> list[str]:
        """The nodes without a link to this one, and why."""
        return [f"{self._node.name(number)}: {link.problem}" for number, link in self._sending.links.items() if link.problem]

    def _blocked(self) -> str:
        """Why no waiting entry is written to the log."""
        if alarm := self._turning_away.alarm:
            return f"its broker takes nothing more for the log: {alarm}"
        silent_s = self._log.silent_s()
        if silent_s < SILENT_SHOWN_S:
            return ""
        return f"its broker has confirmed nothing of the log for {silent_s:.0f} s: see its log, and whether its disk is full"

    def _at_stake(self) -> str:
        """Confirmed messages that would be lost with this primary."""
        entries, size = self._replica.progress.at_stake_entries, self._replica.progress.at_stake_bytes
        return f"{entries} publishes ({size} bytes) are confirmed (local completion) and not on all in-sync backups" if entries else ""

    def levels(self) -> list[dict[str, str]]:
        """The queues that the log knows, and how much of each the other nodes get."""
        known = self._replica.declared.definitions.queues()
        return [{"vhost": vhost, "queue": queue, "level": self._replica.declared.level((vhost, queue)).value} for vhost, queue in sorted(known)]

    def queues(self) -> list[str]:
        """The receive queues that exist here.

        Raises:
            LrqError: There may be more of them, as this node's log lacks entries.
        """
        node = self._node
        # A backup that has lost its primary stays ready, whatever the primary goes on with.
        has_all = node.role in (Role.RECOVERING, Role.ACTIVE) or (node.role is Role.READY and node.primary())
        if not has_all:
            cut_off = ", and it hears no primary" if node.role is Role.READY else ""
            raise LrqError(f"this node may not have all of its group's log now: its role is {node.role.value}{cut_off}", retriable=True)
        return [queue for queue in self._replica.index.sink.queues() if names.parse_recv_queue(queue)]
