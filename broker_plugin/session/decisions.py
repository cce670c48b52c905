"""Where a publish or a declaration goes: to the log, to the own broker, or both. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Decision(Enum):
    """Where a publish goes."""

    LOGGED = "into the log, then to the broker"
    LOCAL = "into the log, confirmed when the own stream has it, then to the broker"
    PASSED = "to the broker as it came: not replicated"
    TRANSMIT = "a log entry for other sites"
    STATUS = "a status for the log"
    DEMAND = "a full sync that is wanted from a source"
    COMMIT = "a receiver's position for the log"
    RECEIVE = "a batch from another site"
    FORBIDDEN = "nowhere"
    UNASKED = "not known before the broker has been asked"


LOGGED, LOCAL, UNASKED = Decision.LOGGED, Decision.LOCAL, Decision.UNASKED
IN_LOG = (LOGGED, LOCAL)


@dataclass(frozen=True)
class Peer:
    """The other end of a connection from a sidecar: a node of this group (`node` > 0) or a site (`site`)."""

    node: int = 0
    site: str = ""
