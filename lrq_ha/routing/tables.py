"""The tables of a session: its states, the steps between them, and the meaning of the sink's report (negotiation).

    WAITING_FOR_CONNECTION → NEGOTIATING → IN_SNAPSHOT_SYNC → WAIT_SNAPSHOT_APPLY → IN_LOG_ENTRY_SYNC

Rules: a step that is not in TRANSITIONS is a bug and raises. In the last three states deltas flow (the chain is the log in order,
see the package's docstring); they differ in the progress of the newest snapshot.
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    WAITING_FOR_CONNECTION = auto()
    NEGOTIATING = auto()  # the sink is asked for its state
    IN_SNAPSHOT_SYNC = auto()  # a snapshot is requested or under way
    WAIT_SNAPSHOT_APPLY = auto()  # its end marker is taken from the log and not yet acked
    IN_LOG_ENTRY_SYNC = auto()
    ERROR = auto()  # only a new connection or an operator helps


class Step(Enum):
    """The steps of a session."""

    LINK_UP = auto()
    LINK_LOST = auto()
    TRACK_LOST = auto()  # a batch was refused or an ack is overdue
    REFUSE = auto()
    RESTART = auto()  # the chain restarts with a snapshot
    RESUME_SNAPSHOT = auto()  # the chain goes on; the newest snapshot has not ended
    RESUME_LOG = auto()
    SNAPSHOT_BEGINS = auto()  # the start marker is taken from the log
    SNAPSHOT_ENDS = auto()  # the end marker is taken from the log
    SNAPSHOT_ACKED = auto()
    SNAPSHOT_DROPPED = auto()  # cancelled, and the sink does not need it


class Reason(Enum):
    """Why a session is in its state; the value is for people."""

    CONNECTED = "the link is up"
    DISCONNECTED = "the link is down"
    BATCH_REFUSED = "the sink refused a batch: it lacks what comes before"
    ACK_OVERDUE = "the sink does not ack what was sent"
    BEHIND_SINK = (
        "the sink holds later positions than this log, which was begun again: give the group another name, or restart its primary until its epoch is"
        " above that of the former log"
    )
    OTHER_LOG = "the sink knows another log by this group's name: give this group another name"
    NEVER_SYNCED = "the sink has had no snapshot"
    OTHER_HISTORY = "the sink holds entries that this log lost"
    TRIMMED = "the log no longer holds what the sink lacks"
    SNAPSHOT_UNFINISHED = "the sink has part of a snapshot"
    IN_STEP = "the log still holds what the sink lacks"
    CLIENT_UNKNOWN = "the client has not announced itself: it is asked for nothing yet"
    NO_PROVIDER = "the client has no full sync provider"
    EMPTY_SNAPSHOT = "the client has no full sync provider: an empty snapshot, then all deltas that are left"
    SNAPSHOT_UNSUPPLIED = (
        "the client has no full sync provider any more: the snapshot that the site has begun is ended without rows, and only deltas behind that"
        " request count"
    )
    SNAPSHOT_BEGUN = "a snapshot was asked for"
    SNAPSHOT_SILENT = "no snapshot data for too long: cancelled, to be asked for again"
    SNAPSHOT_TRIMMED_AGAIN = (
        "rows of the snapshot were dropped before the site had them, not for the first time: log_bytes_max of this group has to be above the size of"
        " a snapshot, or the client's provider has to be slower than the site"
    )
    SNAPSHOT_CANCELLED = "the snapshot was cancelled, to be asked for again"
    SNAPSHOT_SENT = "the snapshot's end marker is on its way"
    SNAPSHOT_DONE = "the sink has the whole snapshot"
    READ_TOO_LATE = "an entry was read too late to be sent in order: a full sync has to bring it"
    SITE_DEMANDS = "the site demands a full sync"
    OPERATOR_DEMANDS = "an operator demands a full sync"
    LATE_REQUEST = "a full sync request came out of order: asked for again"


_S = State
TRANSITIONS: dict[State, dict[Step, State]] = {
    _S.WAITING_FOR_CONNECTION: {Step.LINK_UP: _S.NEGOTIATING},
    _S.NEGOTIATING: {
        Step.REFUSE: _S.ERROR,
        Step.RESTART: _S.IN_SNAPSHOT_SYNC,
        Step.RESUME_SNAPSHOT: _S.IN_SNAPSHOT_SYNC,
        Step.RESUME_LOG: _S.IN_LOG_ENTRY_SYNC,
        Step.LINK_LOST: _S.WAITING_FOR_CONNECTION,
    },
    _S.IN_SNAPSHOT_SYNC: {
        Step.RESTART: _S.IN_SNAPSHOT_SYNC,
        Step.SNAPSHOT_BEGINS: _S.IN_SNAPSHOT_SYNC,
        Step.SNAPSHOT_ENDS: _S.WAIT_SNAPSHOT_APPLY,
        Step.SNAPSHOT_DROPPED: _S.IN_LOG_ENTRY_SYNC,
        Step.TRACK_LOST: _S.NEGOTIATING,
        Step.LINK_LOST: _S.WAITING_FOR_CONNECTION,
    },
    _S.WAIT_SNAPSHOT_APPLY: {
        Step.RESTART: _S.IN_SNAPSHOT_SYNC,
        Step.SNAPSHOT_BEGINS: _S.IN_SNAPSHOT_SYNC,
        Step.SNAPSHOT_ACKED: _S.IN_LOG_ENTRY_SYNC,
        Step.TRACK_LOST: _S.NEGOTIATING,
        Step.LINK_LOST: _S.WAITING_FOR_CONNECTION,
    },
    _S.IN_LOG_ENTRY_SYNC: {
        Step.RESTART: _S.IN_SNAPSHOT_SYNC,
        Step.SNAPSHOT_BEGINS: _S.IN_SNAPSHOT_SYNC,
        Step.TRACK_LOST: _S.NEGOTIATING,
        Step.LINK_LOST: _S.WAITING_FOR_CONNECTION,
    },
    _S.ERROR: {Step.LINK_LOST: _S.WAITING_FOR_CONNECTION},
}
SENDING = frozenset({_S.IN_SNAPSHOT_SYNC, _S.WAIT_SNAPSHOT_APPLY, _S.IN_LOG_ENTRY_SYNC})


class Holds(Enum):
    """The state of a receive queue at a sink, as the source sees it."""

    NOTHING = auto()
    OTHER_LOG = auto()  # its entries are of another log: a group of that name, or one that was set up again
    OTHER_HISTORY = auto()  # its last entry is not in the source's log, which has gone on from before it
    LATER_HISTORY = auto()  # as OTHER_HISTORY, and the log has not even come that far
    PART_OF_SNAPSHOT = auto()
    SNAPSHOT = auto()  # whole, and perhaps deltas behind it


# The steps that follow. Whether the log still holds the next transaction is known only from a read: then RESTART, TRIMMED.
# "Transferred, not applied" of the Corfu design is an end marker without ack here: the sink reports only what is safe there.
NEGOTIATION: dict[Holds, tuple[Step, Reason]] = {
    Holds.OTHER_LOG: (Step.REFUSE, Reason.OTHER_LOG),
    Holds.NOTHING: (Step.RESTART, Reason.NEVER_SYNCED),
    Holds.OTHER_HISTORY: (Step.RESTART, Reason.OTHER_HISTORY),
    Holds.LATER_HISTORY: (Step.REFUSE, Reason.BEHIND_SINK),
    Holds.PART_OF_SNAPSHOT: (Step.RESUME_SNAPSHOT, Reason.SNAPSHOT_UNFINISHED),
    Holds.SNAPSHOT: (Step.RESUME_LOG, Reason.IN_STEP),
}
