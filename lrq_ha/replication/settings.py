"""The configuration of one group, as far as the core needs it. Rule: no value changes while a node runs."""

from __future__ import annotations

import re
from dataclasses import dataclass


def unnamed(node: int) -> str:
    """The name of a node that is not configured."""
    return f"node {node}"


def id_of_unnamed(text: str) -> int:
    """The id of a node by such a name, or by its id alone; 0 if the text is neither."""
    found = re.fullmatch("(?:node )?([0-9]{1,3})", text)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class NodeSettings:
    """The settings of one group at one of its nodes.

    Args:
        node: This node's id, 1 to 255.
        names: Name of every configured node of the group by id, this one included.
        strict: mode "strict": a backup stays in the set until the operator removes it, even if it is silent or has lost its log.
        restart_alone: A restarted leader takes a new epoch although others are silent. It redefines the operator's word "down" as
            "down, and stays down until it has reached the new primary".
        backup_timeout_s: A member without progress for this long is taken out of the set (mode "available"). It is counted in ticks,
            which come at least every heartbeat_s; a longer gap means that this node stood still, and does not count.
        heartbeat_s: Interval of heartbeats when there is nothing else to send.
        campaign_timeout_s: How long a candidate waits for promises.
        admit_timeout_s: How long safe may be held back so that a newcomer catches the last entries.
        admit_lag_entries_max: A newcomer that lacks no more than this may be waited for.
        handover_timeout_s: How long a leader that has handed over leaves the next epoch to the other node.
        expected_backups: Number of backups that must be in the set before a new primary confirms anything.
        expected_backups_timeout_s: How long it waits for them, from the moment its door opens.
        local_completion: Some publishes are confirmed before they are safe (an operator is told so at a promotion).
        software: This node's version.
        shared: Configuration keys that must be equal on all nodes, and their values.
        lease_ttl_s: etcd coordinates, with a lease of this length; 0: static coordination.
        priority: Of this node where etcd coordinates: the highest takes an epoch first; 0: it takes none by itself.
        sets_kept: Number of the log's newest sets that are told one by one; older ones are told as one (LogIndex.merge_sets).
    """

    node: int
    names: dict[int, str]
    strict: bool = False
    restart_alone: bool = False
    backup_timeout_s: float = 5.0
    heartbeat_s: float = 0.25
    campaign_timeout_s: float = 5.0
    admit_timeout_s: float = 0.5
    admit_lag_entries_max: int = 20_000
    handover_timeout_s: float = 10.0
    expected_backups: int = 0
    expected_backups_timeout_s: float = 10.0
    local_completion: bool = False
    sets_kept: int = 64
    software: str = ""
    shared: tuple[tuple[str, str], ...] = ()
    lease_ttl_s: float = 0.0
    priority: int = 0

    @property
    def registered(self) -> bool:
        """Whether a register (etcd) gives the right to an epoch."""
        return self.lease_ttl_s > 0
