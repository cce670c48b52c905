"""Events (into a session) and effects (out of a session). Positions are the source group's log positions.

Duties of the driver:

  1. A session is told of every status entry of its client in log order, as `Statuses` has them (at its start: of its known ones), and of one at
     position p before it is given anything read from behind p. It may be told of one again.
  2. A reader that it starts gives every transaction of that view from `from_sequence` on, whole, in log order, or says
     `Trimmed` and ends. A reader at the end says so (`ReadEnd`), again whenever the view's end has moved on.
  3. Only safe entries are given (views hold nothing else).
  4. A log position holds at most one transaction, or one status entry: the door refuses an atomic TX entry with more, or combines
     it. The door checks a transaction (`chain.check`) before it is logged.
  5. Batches of one session go out in order, on one channel. An ack is passed on when the sink's log entry is safe there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import names
from lrq_ha.routing.chain import START
from lrq_ha.routing.log_identity import is_other_log
from lrq_ha.routing.shares import ViewEntry
from lrq_ha.routing.tables import Holds, Reason, State


class Stream(Enum):
    """The views that a session reads."""

    LOG_ENTRIES = names.SEND_LOG_ENTRIES
    SNAP_SYNC = names.SEND_SNAP_SYNC


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a link to a door of the destination's primary."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The link is gone, and with it every batch that was not acked."""


@dataclass(frozen=True, slots=True)
class SinkReport:
    """The state of the sink: the answer to AskSink.

    Args:
        last: Last transaction that is safe there; (0, 0): none.
        snapshot_request: The full sync that began last there; empty: none.
        snapshot_complete: Its end marker is there.
        in_history: `last` is an entry of the source's own history (by its epoch table; true for (0, 0)).
        bare: No snapshot has been whole there since the chain began.
        log_id: The identity of the log that the sink has entries of; empty: not known.
    """

    last: Position
    snapshot_request: str
    snapshot_complete: bool
    in_history: bool = True
    bare: bool = False
    log_id: bytes = b""

    def holds(self, log_id: bytes, known: Position) -> Holds:
        """The state of the sink for a source with this log, of which entries up to `known` are known."""
        if self.last == START:
            return Holds.NOTHING
        if is_other_log(self.log_id, log_id):
            return Holds.OTHER_LOG
        if not self.in_history:
            return Holds.OTHER_HISTORY if self.last < known else Holds.LATER_HISTORY
        return Holds.SNAPSHOT if self.snapshot_complete else Holds.PART_OF_SNAPSHOT


@dataclass(frozen=True, slots=True)
class Read:
    """Transactions from a view, in log order.

    Args:
        reader: The number in StartRead.
        entries: Those of other clients may be left out.
        through: Everything up to here was given.
    """

    reader: int
    entries: tuple[ViewEntry, ...]
    through: Position


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The reader has given everything of its view up to `through`."""

    reader: int
    through: Position


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The reader has ended: of the next transactions, all before sequence `first_available` may be gone."""

    reader: int
    first_available: int


@dataclass(frozen=True, slots=True)
class StatusEntry:
    """A status entry of this session's client in the group's log. Entries about other destinations are ignored."""

    position: Position
    status: pb.Status


@dataclass(frozen=True, slots=True)
class Acked:
    """The sink holds everything of the chain up to `upto`, safely."""

    upto: Position


@dataclass(frozen=True, slots=True)
class Refused:
    """The sink refused a batch: it saw a gap."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A full sync is wanted: by a reader that has given an entry after its ReadEnd beyond it, by the site, or by an operator.

    Args:
        reason: Who wants it.
        note: The words of an operator.
    """

    reason: Reason
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; a few times a second is enough. `now` in seconds, never going back."""

    now: float


Event = Connected | Disconnected | SinkReport | Read | ReadEnd | Trimmed | StatusEntry | Acked | Refused | Demand | Tick

# ---- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskSink:
    """Ask the sink for its state of `queue`."""

    queue: str


@dataclass(frozen=True, slots=True)
class LeaveDoor:
    """End the link and try the next door: this door answers, and acks nothing."""


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read `stream` from `from_sequence` (of the log) on. The reader replaces the stream's earlier one."""

    stream: Stream
    from_sequence: int
    reader: int


@dataclass(frozen=True, slots=True)
class StopRead:
    stream: Stream


@dataclass(frozen=True, slots=True)
class PauseRead:
    """Enough for now: transactions under way are still taken."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class ResumeRead:
    stream: Stream


@dataclass(frozen=True, slots=True)
class Send:
    """Publish `body` (a ReceivedBatch) to `queue` through the sink's door.

    Args:
        last: Position of its last transaction.
    """

    queue: str
    body: bytes
    last: Position


@dataclass(frozen=True, slots=True)
class AppendStatus:
    """Append `status` to the group's log; it comes back as a StatusEntry."""

    status: pb.Status


@dataclass(frozen=True, slots=True)
class Report:
    """For operators: the session is in `state`, because of `reason`."""

    state: State
    reason: Reason


Effect = AskSink | LeaveDoor | StartRead | StopRead | PauseRead | ResumeRead | Send | AppendStatus | Report
