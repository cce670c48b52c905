"""A session: sends one client's entries to one destination. It runs at the source's primary; another primary starts a new one.

Rules:

  - The order of transactions, the markers, and the rule for readers: the package's docstring ("The chain").
  - States, steps and the meaning of the sink's report are tables in tables.py; the driver's duties are in messages.py.
  - Full sync requests are entries of the group's log, so they outlive this session. A request counts at its position in the log,
    not at the time of its arrival: an older request's data is left out from there on.
  - reading.py reads the views ahead; merge.py puts their transactions in log order.
  - Bounded: bytes sent and not acked (`in_flight_bytes_max`; one transaction may exceed it, alone), remembered requests (`marks_max`).
  - An illegal event raises IllegalEvent and changes nothing. An event that comes too late for its state is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lrq_ha.errors import IllegalEvent
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.batches import Batches
from lrq_ha.routing.chain import START, marker
from lrq_ha.routing.merge import Item, Merge
from lrq_ha.routing.messages import Effect, Event, Stream
from lrq_ha.routing.reading import Reading
from lrq_ha.routing.requests import CANCELLED, COMPLETED, REQUESTED, Mark, Requests, RequestWriter
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.shares import Packing, Share, pack_share
from lrq_ha.routing.snapshot_progress import SnapshotProgress
from lrq_ha.routing.tables import NEGOTIATION, SENDING, TRANSITIONS, Reason, State, Step
from lrq_ha.routing.upcoming import Upcoming

_NO_REQUEST = ""


class Session:
    """One (client, destination) at the source's primary.

    Args:
        route: The source, client and destination.
        log_end: The end of the group's log as known now; request ids are made from positions.
        now: Seconds, as in Tick.
        limits: Bounds and times.
        packing: Makes the batches; sessions of one group share it.
    """

    def __init__(self, route: Route, log_end: Position, now: float, limits: Limits | None = None, packing: Packing | None = None) -> None:
        self.route = route
        self.limits = limits or Limits()
        self.state = State.WAITING_FOR_CONNECTION
        self.reason = Reason.DISCONNECTED
        self.acked = START  # the sink has everything of the chain up to here
        self.provider: bool | None = None  # whether the client has one; None: no status of it has come
        self.sent = START  # acked <= sent while sending; the `previous` of the next batch, (0, 0) before a restart
        self._queue = route.queue
        self._effects: list[Effect] = []
        self._now = now
        self._known = log_end  # greatest position heard of
        # The chain.
        self._merge = Merge()
        self._reading = Reading(route, self._merge, self.limits.read_ahead_bytes_max, self._emit)
        self._left_at = START  # `taken` before the chain was to start at a request
        self._passed = START, START  # the last position sent when the chain was dropped, and the position up to which nothing else was to be sent
        self._reached = START  # `reached` when the chain was dropped
        self.batches = Batches(route, self.limits, packing or Packing())
        # Full syncs.
        self._requests = Requests(self.limits.marks_max)
        self._upcoming = Upcoming(self._merge, self._requests)
        self._writer = RequestWriter(route, self.limits, self._emit)
        self._active = _NO_REQUEST  # the request whose data is sent: its marker went last and it has not ended
        self._begun = False  # the sink may have rows of it
        self._restarting: Reason | None = None  # why the chain is to start at a mark or an empty snapshot that is not there yet
        self._grounded = False  # the sink has, or is being sent, a whole snapshot and everything since its base
        self._first_available = dict.fromkeys(Stream, 0)  # sequences below were trimmed
        self._cancelling = _NO_REQUEST
        self._demand: m.Demand | None = None  # waits for a provider
        self._end_marker = START
        self.snapshot = SnapshotProgress()  # asked for, under way, or cancelled last
        self._snapshots_trimmed = 0  # in a row without a whole snapshot
        self._refusals = self._overdue = 0  # in a row without an ack
        # Times.
        self._since = now  # time of the last progress that the state waits for
        self._known_then = log_end  # `_known` at `_since`

    def handle(self, event: Event) -> list[Effect]:
        """Takes an event. Returns the effects in order.

        Raises:
            IllegalEvent: The event cannot come in this state.
        """
        if isinstance(event, m.Connected) and self.state is not State.WAITING_FOR_CONNECTION:
            raise IllegalEvent(f"{type(event).__name__} in {self.state.name}, session of {self._queue} to {self.route.destination}")
        self._effects = []
        states, handler = _HANDLERS[type(event)]
        if self.state in states:
            handler(self, event)
            if self.state in SENDING:
                self._pump()
        return self._effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    @property
    def trouble(self) -> str:
        """A fault that only an operator can mend; empty if there is none."""
        return Reason.SNAPSHOT_TRIMMED_AGAIN.value if self._snapshots_trimmed > 1 else ""

    @property
    def reached(self) -> Position:
        """The sink has everything that is for it up to here, as far as is known; (0, 0): nothing is known."""
        if self.state not in SENDING:
            return self._reached
        has_all_sent = not self.batches and self._restarting is None and self._merge.is_open(Stream.LOG_ENTRIES)
        return self._upcoming.passed_to() if has_all_sent else self.acked

    @property
    def views(self) -> list[Stream]:
        """The views that must not lose what is behind `reached`; none if a snapshot is to start the chain."""
        return [stream for stream in Stream if self._restarting is None and (self._active or stream is Stream.LOG_ENTRIES)]

    # ---- the link ---------------------------------------------------------------------------------------------------

    def _connected(self, _: m.Connected) -> None:
        self._go(Step.LINK_UP, Reason.CONNECTED)
        self._ask_sink()

    def _disconnected(self, _: m.Disconnected) -> None:
        self._drop_chain()
        self._go(Step.LINK_LOST, Reason.DISCONNECTED)

    def _refused(self, _: m.Refused) -> None:
        if self.batches:
            self._refusals += 1
            self._negotiate_again(Reason.BATCH_REFUSED)
            if self._refusals > 1:  # it may be permanent
                self._since += min(self.limits.backoff_first_s * 2.0 ** min(self._refusals - 2, 30), self.limits.answer_timeout_s)

    def _acked(self, event: m.Acked) -> None:
        if event.upto <= self.acked:
            return
        self.acked = event.upto
        self._refusals = self._overdue = 0
        self.batches.ack(event.upto, self._now)
        if self.state is State.WAIT_SNAPSHOT_APPLY and event.upto >= self._end_marker:
            self._writer.asks = self._snapshots_trimmed = 0
            self._go(Step.SNAPSHOT_ACKED, Reason.SNAPSHOT_DONE)

    # ---- negotiation ------------------------------------------------------------------------------------------------

    def _reported(self, event: m.SinkReport) -> None:
        step, reason = NEGOTIATION[event.holds(self.route.log_id, self._known)]
        self._go(step, reason)
        if step is Step.REFUSE:
            return
        self.acked = event.last if event.in_history else START
        self.sent = self._upcoming.taken = event.last
        self._wait()
        if step is Step.RESTART:
            self._restart(reason)
            return
        self._grounded = not event.bare
        if step is Step.RESUME_LOG and self._passed[0] == event.last:
            self._upcoming.taken = self._passed[1]
        self._reading.start(Stream.LOG_ENTRIES, self._upcoming.taken, self._upcoming.taken.sequence + 1)
        if step is Step.RESUME_LOG:
            self._writer.ask_at = None
            self._writer.asks = self._snapshots_trimmed = 0
        else:
            self._resume_snapshot(event.snapshot_request)

    def _resume_snapshot(self, request_id: str) -> None:
        """The chain goes on inside snapshot `request_id`, unless that was given up, or (it is not known any more) overtaken by a newer one."""
        if self._requests.goes_on(request_id, self._upcoming.taken):
            self._active, self._begun = request_id, True
            self.snapshot.begin(request_id, self._now, self._writer.asks)
            self._reading.start(Stream.SNAP_SYNC, self._upcoming.taken, self._upcoming.taken.sequence + 1)
        elif not self._writer.asked and not self._requests.is_ahead(self._upcoming.taken):
            self._ask(Reason.SNAPSHOT_UNFINISHED)

    def _negotiate_again(self, reason: Reason) -> None:
        """The sink is asked at the next tick: refusals cannot cause a busy loop."""
        self._drop_chain()
        self._go(Step.TRACK_LOST, reason)
        self._since = self._now - self.limits.answer_timeout_s

    def _ask_sink(self) -> None:
        self._since = self._now
        self._emit(m.AskSink(self._queue))

    # ---- where a chain restarts --------------------------------------------------------------------------------------

    def _restart(self, reason: Reason) -> None:
        """Starts the chain at a request that is in the log or at an empty snapshot, or asks for a request."""
        self._drop_chain()
        self._restarting, self._grounded, self.sent = reason, False, START
        request = self._requests.usable(self._upcoming.taken, max(self._first_available.values()), self.provider is not False)
        if request is not None:
            self._left_at = self._upcoming.taken
            self._upcoming.taken = Position(request.position.epoch, request.position.sequence - 1)  # so that the mark is taken next
            self._reading.start(Stream.LOG_ENTRIES, request.position, request.position.sequence + 1)
            if self.provider is False:  # no provider would supply it again: the mark waits until it is known whether its rows are left
                self._reading.start(Stream.SNAP_SYNC, self._upcoming.taken, request.position.sequence + 1)
        elif self.provider is False:
            self._begin_empty()
        elif self.provider is None:
            self._report(Reason.CLIENT_UNKNOWN)
        elif not self._writer.asked and self._writer.ask_at is None:
            self._ask(reason)

    @property
    def _waits_for_start(self) -> bool:
        return self._restarting is not None and not self._merge.is_open(Stream.LOG_ENTRIES)

    def _begin_empty(self) -> None:
        self._upcoming.empty = self._writer.new_id(self._known)
        self._writer.ask_at = None
        self._report(Reason.EMPTY_SNAPSHOT)
        first = 1 if self._restarting is Reason.OTHER_HISTORY else self._upcoming.taken.sequence + 1
        self._reading.start(Stream.LOG_ENTRIES, self._upcoming.taken, max(first, self._first_available[Stream.LOG_ENTRIES]))

    def _trimmed(self, event: m.Trimmed) -> None:
        stream = self._reading.trimmed(event)
        if stream is None:
            return
        self._first_available[stream] = event.first_available
        if self._upcoming.empty:
            self._reading.start(stream, self._upcoming.taken, event.first_available)
        elif self._restarting is not None:  # the mark has not gone
            self._upcoming.taken = self._left_at
            self._restart(self._restarting)
        elif stream is Stream.LOG_ENTRIES:
            self._go(Step.RESTART, Reason.TRIMMED)
            self._restart(Reason.TRIMMED)
        elif self._active != self._cancelling:  # the deltas are all there: only this snapshot is lost
            self._snapshots_trimmed += 1
            self._give_up(Reason.SNAPSHOT_TRIMMED_AGAIN if self.trouble else Reason.TRIMMED)

    # ---- full sync requests -----------------------------------------------------------------------------------------

    def _status(self, event: m.StatusEntry) -> None:
        self._known = max(self._known, event.position)
        status = event.status
        if status.HasField("client") and status.client.client_name == self.route.client_name:
            self.provider = status.client.full_sync_provider
            if self.provider:
                self._writer.provider_begins(self._now)
                if self._demand is not None:
                    self._demanded(self._demand)
            if self._waits_for_start and self._restarting is not None:
                self._restart(self._restarting)
        elif status.HasField("full_sync"):
            request = status.full_sync
            if (request.client_name, request.destination) == (self.route.client_name, self.route.destination):
                self._full_sync(Mark(event.position, request.request_id, request.state))

    def _full_sync(self, mark: Mark) -> None:
        if not self._requests.add(mark) or mark.state != REQUESTED:
            return
        self._writer.ask_at = None
        self._writer.asked = _NO_REQUEST  # also at another session's request: if both became safe at once, only the newer one arrives
        if self.state not in SENDING:
            return
        if self._waits_for_start and self._restarting is not None:
            self._restart(self._restarting)
        elif mark.position <= self._upcoming.taken:
            self._ask(Reason.LATE_REQUEST)

    def _demanded(self, event: m.Demand) -> None:
        """A snapshot that is under way may lack the wanted data, too."""
        reading = self._merge.is_open(Stream.LOG_ENTRIES)
        if self.state in SENDING and not reading:  # the chain is about to restart with a snapshot
            return
        waits = self._requests.is_ahead(self._merge.through(Stream.LOG_ENTRIES)) if reading else self._requests.is_unsent(self._upcoming.taken)
        self._demand = None
        if not self._writer.asked and not waits:
            self._ask(event.reason, event.note)

    def _ask(self, reason: Reason, note: str = "") -> None:
        """Writes a full sync request into the log. Without a provider: only for a sink without a snapshot, which gets an empty one
        if the request is not answered; for another, the next provider is asked.
        """
        self._writer.ask_at = self._demand = None
        self._writer.asks += 1
        if self.provider is False and self._grounded:
            self._demand = m.Demand(reason, note)
            if self.state is State.IN_SNAPSHOT_SYNC and not self._active:
                self._go(Step.SNAPSHOT_DROPPED, Reason.NO_PROVIDER)
            else:
                self._report(Reason.NO_PROVIDER)
            return
        self._writer.ask(self._known, reason, note)
        if not self._active:
            self.snapshot.begin(self._writer.asked, self._now, self._writer.asks)

    def _give_up(self, reason: Reason) -> None:
        """Cancels the active request; the session asks for another when the chain has reached the cancellation."""
        self._cancelling = self._active
        self._report(reason)
        self._writer.write(self._active, reason, CANCELLED)

    # ---- time -------------------------------------------------------------------------------------------------------

    def _ticked(self, event: m.Tick) -> None:
        self._now = max(self._now, event.now)
        limits = self.limits
        waited_s = self._now - self._since
        if self.state is State.NEGOTIATING and waited_s >= limits.answer_timeout_s:
            self._ask_sink()
        if self.state not in SENDING:
            return
        if self.batches.is_overdue(self._now):
            self._overdue += 1
            self._negotiate_again(Reason.ACK_OVERDUE)
            if self._overdue > 1:
                self._overdue = 0
                self._emit(m.LeaveDoor())
        elif self._writer.ask_at is not None and self._now >= self._writer.ask_at:
            self._ask(Reason.SNAPSHOT_UNFINISHED)
        elif waited_s >= limits.snapshot_timeout_s:
            self._waited_too_long()

    def _wait(self) -> None:
        """The state has made progress, or begins to wait now."""
        self._since, self._known_then = self._now, self._known

    def _waited_too_long(self) -> None:
        if self._waits_for_start and self.provider is None:
            self._begin_empty()
        elif self._active and self._active != self._cancelling:
            # Deltas may wait, and always do while they flow: the end of a quiet view is reported later than they come.
            if not self._merge.waiting_bytes(Stream.SNAP_SYNC) and self._merge.through(Stream.SNAP_SYNC) >= self._known_then:
                self._give_up(Reason.SNAPSHOT_SILENT)
            else:  # this side or the sink is slow
                self._wait()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _read(self, event: m.Read | m.ReadEnd) -> None:
        through = self._reading.read(event) if isinstance(event, m.Read) else self._reading.read_end(event)
        if through is not None:
            self._known = max(self._known, through)

    def _note_passed(self) -> None:
        """A sink that has everything sent need not be sent later entries that were not for it, also if these are trimmed when the link is back."""
        if self._active or not self._merge.is_open(Stream.LOG_ENTRIES):
            return
        self._passed = self.sent, self._upcoming.passed_to()

    def _drop_chain(self) -> None:
        self._reached = self.reached
        self._note_passed()
        for stream in Stream:
            self._reading.stop(stream)
        self.batches.drop()
        self._active = self._upcoming.empty = _NO_REQUEST
        self._restarting = None

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Sends transactions that may go, then regulates the readers."""
        while batch := self._pack():
            send = self.batches.send(self.sent, batch, self._now)
            self.sent = send.last
            self._emit(send)
        self._reading.regulate()

    def _pack(self) -> list[Share]:
        batch: list[Share] = []
        size = self.batches.envelope_bytes
        while (candidate := self._upcoming.next()) is not None:
            size += candidate.size
            if not self.batches.has_room(size, first=not batch):
                break
            share = self._take(candidate)
            if share is not None:
                batch.append(share)
        return batch

    def _take(self, candidate: Item | Mark) -> Share | None:
        """Passes `candidate`; returns its transaction for the chain, if there is one."""
        if isinstance(candidate, Item):
            return self._take_item(candidate)
        self._upcoming.taken = candidate.position
        if candidate.state == CANCELLED:
            return self._snapshot_cancelled(candidate) if self._active and candidate.request_id == self._active else None
        self._restarting = None
        if candidate.state == COMPLETED:
            self._upcoming.empty = _NO_REQUEST
            self._snapshot_ended(candidate.position)
            return pack_share(marker(candidate.position, pb.LAST_FULL_SYNC_ENTRY, candidate.request_id))
        if candidate.request_id == self._active:
            return None
        self._active, self._begun = candidate.request_id, False
        self.snapshot.begin(candidate.request_id, self._now, self._writer.asks)
        self._wait()
        if not self._merge.is_open(Stream.SNAP_SYNC):
            self._reading.start(Stream.SNAP_SYNC, candidate.position, candidate.position.sequence + 1)
        self._go(Step.SNAPSHOT_BEGINS, Reason.SNAPSHOT_BEGUN)
        return pack_share(marker(candidate.position, pb.SNAPSHOT_SYNC, candidate.request_id))

    def _take_item(self, item: Item) -> Share | None:
        self._merge.pop()
        self._upcoming.taken = item.position
        if item.stream is Stream.SNAP_SYNC:
            if item.share.request_id != self._active:
                return None
            self._begun = True
            self.snapshot.add_rows(item.share.rows, item.size)
            self._wait()
            if item.share.type == pb.LAST_FULL_SYNC_ENTRY:
                self._snapshot_ended(item.position)
        return item.share

    def _snapshot_ended(self, position: Position) -> None:
        self._reading.stop(Stream.SNAP_SYNC)
        self._active = _NO_REQUEST
        self._grounded = True
        self._end_marker = position
        self._go(Step.SNAPSHOT_ENDS, Reason.SNAPSHOT_SENT)

    def _snapshot_cancelled(self, mark: Mark) -> Share | None:
        """The chain's transaction at a cancellation: an end marker, which makes an empty snapshot, without a provider and a whole one."""
        self._reading.stop(Stream.SNAP_SYNC)
        self._active = _NO_REQUEST
        if self._requests.is_ahead(self._upcoming.taken) or self._writer.asked:
            return None
        if self.provider is False and self._grounded:
            self._demand = m.Demand(Reason.SNAPSHOT_UNFINISHED)
            self._go(Step.SNAPSHOT_DROPPED, Reason.NO_PROVIDER)
            return None
        if self.provider is False and not self._begun:
            self._report(Reason.SNAPSHOT_UNSUPPLIED)
            self._snapshot_ended(mark.position)
            return pack_share(marker(mark.position, pb.LAST_FULL_SYNC_ENTRY, mark.request_id))
        self._report(Reason.SNAPSHOT_CANCELLED)
        self._writer.ask_later(self._now)
        return None

    # ---- states -----------------------------------------------------------------------------------------------------

    def _go(self, step: Step, reason: Reason) -> None:
        state = TRANSITIONS[self.state].get(step)
        if state is None:
            raise IllegalEvent(f"{step.name} in {self.state.name}, session of {self._queue} to {self.route.destination}")
        self.state = state
        if state not in (State.IN_SNAPSHOT_SYNC, State.WAIT_SNAPSHOT_APPLY):
            self.snapshot = SnapshotProgress()
        self._report(reason)

    def _report(self, reason: Reason) -> None:
        self.reason = reason
        self._emit(m.Report(self.state, reason))


#: For each event, the states in which it counts. In any other the event is merely late: the link, a reader or the sink had it under way.
_HANDLERS: dict[type[Any], tuple[frozenset[State], Callable[[Session, Any], None]]] = {
    m.Connected: (frozenset({State.WAITING_FOR_CONNECTION}), Session._connected),
    m.Disconnected: (frozenset(State) - {State.WAITING_FOR_CONNECTION}, Session._disconnected),
    m.SinkReport: (frozenset({State.NEGOTIATING}), Session._reported),
    m.Read: (SENDING, Session._read),
    m.ReadEnd: (SENDING, Session._read),
    m.Trimmed: (SENDING, Session._trimmed),
    m.StatusEntry: (frozenset(State), Session._status),
    m.Acked: (SENDING, Session._acked),
    m.Refused: (SENDING, Session._refused),
    m.Demand: (frozenset(State), Session._demanded),
    m.Tick: (frozenset(State), Session._ticked),
}
