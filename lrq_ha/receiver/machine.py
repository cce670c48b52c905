"""The messages of one receive queue, turned into the steps of a listener. Pure: it follows "the rule for readers" of lrq_ha.routing.

Rules:

- Each step names the progress that is true once the listener has taken the step. After a lost connection a new machine begins at the
  progress that was committed last.
- A list holds whole transactions of one kind. A transaction that is larger than a list may be goes alone.
- Deltas during a snapshot are not kept: the stream keeps them. Behind the snapshot's end, reading goes back to its base (`rewind`). The progress
  says whether there were any: a snapshot without deltas needs no base, also when the reading of it was interrupted.
- A position counts in one log only: a message of another log ends the reading (`OtherLog`).
- Without a hole before a snapshot, deltas go on, and the snapshot begins for the listener only when its end marker is there: a full sync that was
  given up changes nothing. Then, too, reading goes back to its base.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.log_identity import is_other_log
from lrq_ha.streams.message import Message

from .errors import OtherLog
from .progress import Phase, Progress
from .updates import Snapshot, Update, UpdateType, updates_of

BATCH_ENTRIES_MAX = 1_000
BATCH_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Begin:
    """A snapshot begins: the listener clears its tables, or builds new ones aside."""

    progress: Progress
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Apply:
    """A list of updates of one kind."""

    progress: Progress
    updates: list[Update]

    @property
    def kind(self) -> UpdateType:
        """Of all its updates."""
        return self.updates[0].type


@dataclass(frozen=True, slots=True)
class Complete:
    """The snapshot has ended."""

    progress: Progress
    snapshot: Snapshot

    @property
    def source(self) -> str:
        """The source's remote id."""
        return self.snapshot.source


@dataclass(frozen=True, slots=True)
class Reach:
    """The deltas behind the base were given again: the tables equal the source's."""

    progress: Progress
    source: str


@dataclass(frozen=True, slots=True)
class Hole:
    """The queue lacks transactions between two positions: the tables can no longer follow."""

    after: Position
    before: Position


@dataclass(frozen=True, slots=True)
class Skip:
    """The application has skipped updates of a list that it refused. No machine makes it: `Refusal` does.

    Attributes:
        progress: Behind the skipped updates.
        first: Position of the first of them.
        count: How many updates.
    """

    progress: Progress
    first: Position
    count: int


Step = Begin | Apply | Complete | Reach | Hole | Skip


class Machine:
    """The reading of one queue.

    Args:
        queue: Its name.
        progress: The committed progress; None: none yet, so reading begins at a snapshot.
        entries_max, bytes_max: Of a list.

    Attributes:
        rewind: Set when reading must go back: the next message to take is the one that holds what follows `seen`.
        seen: The greatest position that was read.
    """

    def __init__(
        self, queue: str, progress: Progress | None, entries_max: int = BATCH_ENTRIES_MAX, bytes_max: int = BATCH_BYTES_MAX
    ) -> None:
        self.queue = queue
        self.seen = progress.position if progress else START
        self.rewind = False
        self._progress = progress  # None: waiting for a snapshot
        self._entries_max, self._bytes_max = entries_max, bytes_max
        self._steps: list[Step] = []
        self._list: list[Update] = []
        self._list_bytes = 0
        self._announced: tuple[str, Position] | None = None  # request and base of a snapshot that has begun behind no hole
        self._whole = ""  # the request of such a snapshot whose end marker was read: it is read again, and given
        self._read_before = START  # how far reading had come then

    @property
    def phase(self) -> Phase | None:
        """The phase after the steps that were returned; None: waiting for a snapshot."""
        return self._progress.phase if self._progress else None

    def take(self, messages: Iterable[Message]) -> list[Step]:
        """The steps of the next messages, in stream order. When `rewind` is set on return, the rest of `messages` was not taken.

        Raises:
            OtherLog: A message is of another log than the progress. No step of these messages counts.
        """
        self._steps, self.rewind = [], False
        for message in messages:
            self._take_message(message)
            if self.rewind:
                break
        self._close_list()
        return self._steps

    def check_log(self, log_id: bytes) -> None:
        """Learns the log that the queue has; empty: not known. Raises OtherLog if the progress is of another one."""
        progress = self._progress
        if progress is None:
            return
        if is_other_log(bytes.fromhex(progress.log), log_id):
            raise OtherLog(self.queue, progress.log, log_id.hex())
        if log_id and not progress.log:
            self._progress = replace(progress, log=log_id.hex())

    def _take_message(self, message: Message) -> None:
        self.check_log(message.batch.log_id)
        if self._whole and message.previous > self.seen:  # the beginning of the snapshot was dropped meanwhile
            self.seen, self._whole = self._read_before, ""
        if self._progress is not None and message.previous > self.seen:
            self._close_list()
            self._steps.append(Hole(self.seen, message.previous))
            self._progress = None
        for number, transaction in enumerate(message.batch.transactions):
            position = position_of(transaction.position)
            if position <= self.seen:
                continue
            self.seen = position
            restarts = number == 0 and message.previous == START
            if transaction.type == pb.LOG_ENTRY_SYNC:
                self._take_delta(message, transaction)
            elif self.phase is Phase.LOCAL_REPLAY and not restarts:  # the snapshot that has ended
                self._advance(position)
            elif transaction.type == pb.SNAPSHOT_SYNC and not transaction.payloads:
                self._take_marker(message, transaction, restarts)
            else:
                self._take_rows(message, transaction, restarts)
            if self.rewind:
                return
            self._consider_normal(message)

    def _take_delta(self, message: Message, transaction: pb.ReceivedTransaction) -> None:
        if self._progress is not None and self._progress.phase is Phase.BOOTSTRAP:
            self._progress = replace(self._progress, missed=True)
        elif self._progress is not None:
            self._add(message, transaction)

    def _take_marker(self, message: Message, transaction: pb.ReceivedTransaction, restarts: bool) -> None:
        """A start marker: the snapshot begins now, or when it is whole."""
        if self.phase is Phase.NORMAL and not restarts and transaction.request_id != self._whole:
            self._announced = transaction.request_id, self.seen
        else:
            self._begin(message, transaction)

    def _begin(self, message: Message, transaction: pb.ReceivedTransaction) -> None:
        self._close_list()
        self._announced, self._whole = None, ""
        self._progress = Progress(Phase.BOOTSTRAP, self.seen, transaction.request_id, self.seen, missed=False, log=message.batch.log_id.hex())
        self._steps.append(Begin(self._progress, self._snapshot(message)))

    def _take_rows(self, message: Message, transaction: pb.ReceivedTransaction, restarts: bool) -> None:
        """Rows of a snapshot, or its end marker."""
        progress, ends = self._progress, transaction.type == pb.LAST_FULL_SYNC_ENTRY
        if ends and self._announced and self._announced[0] == transaction.request_id:
            self._read_again(self._announced[1])
            return
        if progress is None or progress.phase is not Phase.BOOTSTRAP or progress.request_id != transaction.request_id:
            if not (ends and restarts):  # rows of a snapshot that was given up, or whose beginning was dropped
                return
            self._begin(message, transaction)
        self._add(message, transaction)
        if ends:
            self._complete(message)

    def _complete(self, message: Message) -> None:
        self._close_list()
        progress, snapshot = self._progress, self._snapshot(message)
        assert progress is not None
        if progress.missed:
            self._progress = Progress(Phase.LOCAL_REPLAY, progress.base, progress.request_id, progress.base, self.seen, log=progress.log)
            self.seen = progress.base
            self.rewind = True
        else:
            self._progress = Progress(Phase.NORMAL, self.seen, log=progress.log)
        self._steps.append(Complete(self._progress, snapshot))

    def _read_again(self, base: Position) -> None:
        """The announced snapshot is whole: reading goes back to its start marker."""
        self._close_list()
        assert self._announced is not None
        self._whole, self._announced, self._read_before = self._announced[0], None, self.seen
        self.seen = Position(base.epoch, base.sequence - 1)
        self.rewind = True

    def _consider_normal(self, message: Message) -> None:
        progress = self._progress
        if progress is not None and progress.phase is Phase.LOCAL_REPLAY and self.seen >= progress.end:
            self._close_list()
            self._progress = Progress(Phase.NORMAL, self.seen, log=progress.log)
            self._steps.append(Reach(self._progress, message.batch.source))

    def _snapshot(self, message: Message) -> Snapshot:
        assert self._progress is not None
        progress, batch = self._progress, message.batch
        return Snapshot(self.queue, batch.source, batch.client_name, progress.request_id, progress.base)

    # ---- lists -------------------------------------------------------------------------------------------------------

    def _add(self, message: Message, transaction: pb.ReceivedTransaction) -> None:
        """Adds a transaction to the list under way, or to a new one if it is of another kind or the list is full."""
        updates = list(updates_of(self.queue, message.batch, transaction))
        size = sum(len(payload) for payload in transaction.payloads)
        if self._list and updates:
            full = len(self._list) + len(updates) > self._entries_max or self._list_bytes + size > self._bytes_max
            if full or self._list[0].type is not updates[0].type:
                self._close_list()
        self._list += updates
        self._list_bytes += size
        self._advance(self.seen)

    def _advance(self, position: Position) -> None:
        assert self._progress is not None
        self._progress = replace(self._progress, position=position)

    def _close_list(self) -> None:
        if self._list:
            assert self._progress is not None
            progress = replace(self._progress, position=self._list[-1].position)
            self._steps.append(Apply(progress, self._list))
            self._list, self._list_bytes = [], 0
