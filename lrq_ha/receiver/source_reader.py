"""Reads one source's receive queue, and gives its steps to the application, one at a time. A thread for each source.

Rules:

- The committed progress alone says where reading goes on. A lost connection, a node that stands still or a failover only costs time.
- A step that was not taken is given again after 0.1 s, doubling to 30 s (`refusal`). Only Fenced, OtherLog and Stop end the reading.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import pika

from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.deduplication import ReplicationId
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.names import RecvQueue, receivers_question
from lrq_ha.streams.errors import MissingQueue
from lrq_ha.streams.message import find
from lrq_ha.streams.node_connection import NodeConnection

from .call_watch import CallWatch
from .errors import Fenced, OtherLog, ReceiverError, Redelivery, Stop, Trimmed
from .listener import Importer, Listener
from .machine import Apply, Begin, Hole, Machine, Skip, Step
from .progress import Phase, Progress
from .refusal import Given, Refusal
from .states import OF_PHASE, State, require_legal

log = logging.getLogger("lrq_ha.receiver")

CONNECT_S = 1.0  # all nodes are tried for so long, again and again
RETRY_S = 0.5
WAITING_S = 1.0
IDLE_S = 0.5
PREFETCH_MESSAGES = 32  # a batch of a source has many transactions when many wait


def parse_id(text: str) -> ReplicationId:
    """The replication ID of a transaction, or of an update's transaction. Raises MalformedInput if it is none."""
    producer, slash, number = text.rpartition("/")
    return ReplicationId.parse(f"{producer}{slash}{number.partition('.')[0]}".encode())


class SourceReader(threading.Thread):
    """The reading of one receive queue.

    Args:
        name: The receiver's name.
        parts: Client and source.
        queue: The queue's name.
        nodes: Addresses of the sink group's doors.
        importer: Takes the steps.
        listener: Is told of states and errors.
        on_change: Is called, in the reader's thread, after each commit and each change of the state.

    Attributes:
        source, queue: The source's remote id, and its receive queue.
        state, reason, since: The state, its reason for operators, and since when (seconds since 1970).
        skipped: How many updates were skipped since the start, or since the last snapshot began.
        failure: The error that ended the reading.
        watch: Of the listener's method that is being called.
    """

    def __init__(
        self,
        name: str,
        parts: RecvQueue,
        queue: str,
        nodes: Sequence[pika.ConnectionParameters],
        importer: Importer,
        listener: Listener,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(name=f"lrq receiver {name} {queue}", daemon=True)
        self.source = parts.remote_id
        self.state, self.reason, self.since = State.DISCONNECTED, "not started", time.time()
        self.failure: BaseException | None = None
        self.skipped = 0
        self.queue = queue
        self.watch = CallWatch(name, queue)
        self._receiver, self._parts = name, parts
        self._nodes = list(nodes)
        self._importer, self._listener = importer, listener
        self._progress: Progress | None = None
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._on_change = on_change
        self._refusal: Refusal | None = None
        self._numbers: dict[str, int] = {}  # by producer: the greatest number of a transaction that the tables have, since the start
        self._unproved: dict[str, int] = {}  # before the tables equal the source's: deltas before them may be missing

    def end(self) -> None:
        """Ends the reading after the step under way. Join the thread next."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()

    def skip(self, position: Position) -> None:
        """Skips the updates of the list that is being refused, up to `position`. Returns at once. Raises MalformedInput as Refusal does."""
        with self._changed:
            if self._refusal is None or not self.is_alive():
                raise MalformedInput(f"{self.queue}: the listener refuses no list, so none can be skipped", todo="Wait for a Redelivery")
            self._refusal.demand_skip(position)
            self._changed.notify_all()

    def wait_for(self, reached: Callable[[SourceReader], bool], timeout_s: float) -> bool:
        """Whether `reached` becomes true within `timeout_s`; it is asked after each commit."""
        with self._changed:
            self._changed.wait_for(lambda: reached(self) or self.failure is not None or self._ending.is_set(), timeout_s)
            return reached(self)

    def has_position(self, position: Position) -> bool:
        """Whether everything up to a position of the source's log is in the application's tables."""
        progress = self._progress
        return progress is not None and progress.phase is not Phase.BOOTSTRAP and progress.position >= position

    def has(self, transaction: ReplicationId) -> bool:
        """Whether a transaction, or a later one of its producer, was committed since the start."""
        return self._numbers.get(transaction.producer, 0) >= transaction.sequence

    @property
    def progress(self) -> Progress | None:
        """The committed progress; None: none."""
        return self._progress

    @property
    def committed(self) -> Position:
        """The committed position; (0, 0): none."""
        return self._progress.position if self._progress else START

    # ---- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Reads from one node after the other, until `end`, Fenced, OtherLog or Stop."""
        loaded = False
        while not self._ending.is_set():
            try:
                if not loaded:
                    self._progress = self._importer.load(self._receiver, self.queue)
                    loaded = True
                with NodeConnection.open(self._nodes, self.name, CONNECT_S) as node:
                    self._read(node)
            except (Fenced, OtherLog, Stop) as error:
                self.failure = error
                self._enter(State.ERROR, str(error) or "the listener has raised Stop")
                return
            except MissingQueue as error:
                self._enter(State.WAITING, error.what)
                self._ending.wait(WAITING_S)
            except LrqError as error:
                self._enter(State.DISCONNECTED, error.what)
                self._ending.wait(RETRY_S)
            except Exception as error:
                log.exception("receiver %s of %s", self._receiver, self.queue)
                self._enter(State.DISCONNECTED, f"{type(error).__name__}: {error}")
                self._ending.wait(RETRY_S)

    def _read(self, node: NodeConnection) -> None:
        machine = Machine(self.queue, self._progress)
        while not self._ending.is_set():
            state = self._ask_queue(node)
            machine.check_log(state.log_id)
            after = machine.seen if machine.phase is not None else before_snapshot(state)
            start = find(node, self.queue, after) if after is not None else None
            if start is None:
                self._enter(State.WAITING, "the queue holds no snapshot yet: the source's client supplies one at its next full sync")
                self._ending.wait(WAITING_S)
                continue
            self._enter(OF_PHASE[machine.phase], f"reads at {node.address}")
            self._follow(node, machine, start.offset)

    def _ask_queue(self, node: NodeConnection) -> pb.ReceiveState:
        """What the door knows of the queue; nothing if it knows no such queue."""
        body = node.get(receivers_question(self._parts.client_name))
        return next((state for state in pb.ReceiveQueues.FromString(body or b"").queues if state.queue == self.queue), pb.ReceiveState())

    def _follow(self, node: NodeConnection, machine: Machine, offset: int) -> None:
        """Takes messages from `offset` on, until the machine rewinds or `end`."""
        with closing(node.follow(self.queue, offset, IDLE_S, PREFETCH_MESSAGES)) as arriving:
            for messages in arriving:
                for step in machine.take(messages):
                    if not self._give(step):
                        return
                if machine.rewind or self._ending.is_set():
                    return

    # ---- the application ---------------------------------------------------------------------------------------------

    def _give(self, step: Step) -> bool:
        """Gives a step until it is taken; False: `end` came before."""
        if isinstance(step, Hole):
            error = Trimmed(self.queue, step.after, step.before)
            self._enter(State.WAITING, error.what)
            self._tell(error)
            return True
        steps: list[Given] = [step]
        while steps and not self._ending.is_set():
            cause: BaseException | None = None
            taken = False
            try:
                with self.watch.watch_call(self._importer.name_method(steps[0])):
                    taken = self._importer.take(self._receiver, self.queue, steps[0], self._progress)
            except (Fenced, Stop):
                raise
            except Exception as error:
                cause = error
            if taken:
                self._commit(steps.pop(0))
            else:
                refusal = self._note_refusal(steps[0])
                self._tell(Redelivery(self.queue, steps[0].progress.position, refusal.attempt, cause))
                steps[:1] = self._await_attempt(refusal)
        return not steps

    def _note_refusal(self, step: Given) -> Refusal:
        with self._changed:
            if self._refusal is None:
                self._refusal = Refusal(self.queue, step)
            else:
                self._refusal.attempt += 1
            return self._refusal

    def _await_attempt(self, refusal: Refusal) -> list[Given]:
        """Waits until the refused step is to be given again; returns it, or the steps instead of it if it was skipped."""
        with self._changed:
            self._changed.wait_for(lambda: refusal.skip_to is not None or self._ending.is_set(), refusal.pause_s)
            if refusal.skip_to is None or self._ending.is_set():
                return [refusal.step]
            self._refusal = None
        return refusal.skipped()

    def _commit(self, step: Given) -> None:
        if isinstance(step, Skip):
            log.warning("receiver %s skips %d updates of %s that the listener refused, positions %s to %s", self._receiver, step.count, self.queue,
                        step.first, step.progress.position)  # fmt: skip
        with self._changed:
            self._progress, self._refusal = step.progress, None
            self.skipped = 0 if isinstance(step, Begin) else self.skipped + (step.count if isinstance(step, Skip) else 0)
            if isinstance(step, Apply):
                self._unproved |= (parse_id(update.replication_id) for update in step.updates if update.last_of_transaction)
            if step.progress.phase is Phase.NORMAL:
                self._numbers |= self._unproved
                self._unproved = {}
            self._changed.notify_all()
        self._on_change()
        self._enter(OF_PHASE[step.progress.phase], "")

    def _enter(self, state: State, reason: str) -> None:
        if state is self.state:
            self.reason = reason or self.reason
            return
        old = self.state
        require_legal(old, state)
        with self._changed:
            self.state, self.reason, self.since = state, reason, time.time()
            self._changed.notify_all()
        self._on_change()
        log.info("receiver %s of %s: %s%s", self._receiver, self.queue, state.value, f": {reason}" if reason else "")
        self._call("on_state", lambda: self._listener.on_state(self.source, old, state, reason))

    def _tell(self, error: ReceiverError) -> None:
        log.warning("receiver %s: %s", self._receiver, error)
        self._call("on_error", lambda: self._listener.on_error(self.source, error))

    def _call(self, method: str, call: Callable[[], None]) -> None:
        """Calls a listener's method whose errors change nothing."""
        try:
            with self.watch.watch_call(method):
                call()
        except Exception:
            log.exception("receiver %s: a method of the listener failed", self._receiver)


def before_snapshot(state: pb.ReceiveState) -> Position | None:
    """A position before the start of the newest whole snapshot, or else of the one under way; None: the door knows no such queue."""
    if not state.queue:
        return None
    begun = position_of(state.whole if state.whole.sequence else state.begun)
    return Position(begun.epoch, begun.sequence - 1) if begun != START else START  # not known: reading begins at the head
