"""The register of a group in etcd, as the core sees it, and the rules on a record that was read (E8).

Theory of operation:

- The register has two keys. `state` holds the group's record: the epoch that was taken last, its leader, and the set. `leader` stands for the
  leader's lease: it is gone when the lease is.
- Each change compares the register with what its author has read, so that of two changes one fails.
- The set of the record is a part of every set in force: a node that the record counts in has everything that was confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .log import LogIndex, Members


class Why(Enum):
    """The right by which an epoch was taken, as the history in etcd has it."""

    LEASE = "lease"  # the leader's lease was gone
    SWITCHOVER = "switchover"
    RESTART = "restart"  # the leader before has started again
    ALL = "all"  # all nodes have promised
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Record:
    """The group's record. `version` grows by one with each change; `paused`: no node takes an epoch by itself."""

    version: int
    epoch: int
    leader: int
    members: Members
    paused: bool = False


@dataclass(frozen=True, slots=True)
class RegisterView:
    """What the register held when it was read.

    Args:
        record: None: there is none.
        revision: etcd's revision of the record's last change; 0 without a record.
        holder: The node whose key `leader` is there; 0: none.
        holder_revision: etcd's revision of that key; 0 without it.
        foreign: The record is that of a group with another log.
    """

    record: Record | None
    revision: int
    holder: int
    holder_revision: int
    foreign: bool = False


_NAMES = "give each group its own name, or another [coordination] namespace"

#: E9: a record is there, and no node of the group has a log. That record may be of a group which serves.
OF_ANOTHER_GROUP = (
    f"etcd has the record of another group under this name, as the logs of this one are empty: {_NAMES}. "
    "Or, if the data of all its nodes was deleted, run lrq-ha promote NODE"
)


def went_back(view: RegisterView, log: LogIndex, version: int) -> str:
    """E8, as text for the operator: the register is not the newest that is known; empty if it may be.

    Args:
        view: The register.
        log: This node's log.
        version: The newest version of the record that this log, and those of the nodes that answer, know of.
    """
    record = view.record
    if view.foreign:
        return f"etcd has the record of another group under this name: {_NAMES}"
    todo = "once all nodes answer, run lrq-ha coordination repair --dry-run"
    if record is None:
        return f"etcd has no record of this group, and the group's log knows of one: was etcd emptied? Then, {todo}" if version else ""
    if record.version < version or record.epoch < log.last_epoch:
        return f"etcd's record of this group is older than the group's log: was etcd restored from a backup? Then, {todo}"
    return ""
