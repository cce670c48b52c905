"""The receiver of an application: finds the receive queues of its client at a sink, and reads each in a thread of its own.

Rules:

- One machine for each source: a slow or failing source holds up no other.
- `name` identifies the application permanently. One process at a time may use a name: an older one ends with Fenced.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pika

from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import names
from lrq_ha.streams.node_connection import NodeConnection, address_of

from .async_listener import AsyncListener
from .call_watch import LOOK_S
from .errors import ReceiverError
from .group_positions import GroupPositions
from .listener import Importer, Listener, ListenerImporter, PositionStore
from .position_teller import PositionTeller, free_told
from .progress import Progress
from .source_reader import CONNECT_S, SourceReader, parse_id
from .states import State

log = logging.getLogger("lrq_ha.receiver")

DISCOVER_FIRST_S = 1.0  # until the first queue is there
DISCOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of one source.

    Attributes:
        state: Of the receiver for this source.
        reason: Text for operators.
        since: When the state began, in seconds since 1970.
        position: The committed position; (0, 0): none.
        consistent: Whether the application's tables equal the source's at that position.
        skipped: How many updates were skipped since the receiver's start, or since the last snapshot began: the tables lack them.
    """

    state: State
    reason: str
    since: float
    position: Position
    consistent: bool
    skipped: int = 0


class Receiver:
    """Gives a listener everything that a client of other sites transmits to this site: a whole snapshot, then every delta, in order.

    Use it as a context manager, then call `run`.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        client_name: str,
        name: str,
        listener: Listener,
        *,
        sources: Sequence[str] | None = None,
        positions: PositionStore | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Makes a receiver; `start` or `run` connects.

        Args:
            nodes: Addresses of the sink group's doors: amqp:// or amqps:// URLs with credentials.
            client_name: The log replication client at the sources.
            name: Of the application, permanently: 1 to 128 letters, digits and ._:@-, a letter or digit first.
            listener: The application. A SqlListener keeps its own position.
            sources: Remote ids to receive from; None: every source, also those that appear later.
            positions: Where the position is kept, for any other listener; None: in the log of the sink group.
            tls: For amqps:// addresses; None: the system's trusted CAs.

        Raises:
            MalformedInput: A name, an address, or a second place for the position.
        """
        if isinstance(listener, AsyncListener):
            raise MalformedInput(f"{type(listener).__name__} is an AsyncListener", todo="Give it to an AsyncReceiver")
        if isinstance(nodes, str) or not nodes:
            raise MalformedInput(f"nodes is {nodes!r}", todo="It must be a non-empty list of amqp:// URLs")
        self.client_name = names.check_client_name(client_name)
        self.name = names.check_producer(name)
        self._nodes: list[pika.ConnectionParameters] = [address_of(node, tls) for node in nodes]
        self._sources = None if sources is None else {names.check_remote_id(source) for source in sources}
        self._listener = listener
        self._group_positions = None if positions or isinstance(listener, Importer) else GroupPositions(self._nodes, self.name)
        self._importer = _importer(listener, positions or self._group_positions)
        self._readers: dict[str, SourceReader] = {}
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._finder: threading.Thread | None = None
        self._watch: threading.Thread | None = None
        self._teller: PositionTeller | None = None
        self._problem = "not started"
        self._process = os.getpid()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to look for queues, and to read them, in threads. A second call changes nothing."""
        if os.getpid() != self._process:
            raise ReceiverError("The receiver was made in another process", todo="Make a receiver after the fork")
        if self._ending.is_set():
            raise ReceiverError("The receiver was stopped", todo="Make another one")
        if self._finder is None:
            self._finder = threading.Thread(target=self._discover, name=f"lrq receiver {self.name}", daemon=True)
            self._finder.start()
            self._watch = threading.Thread(target=self._watch_readers, name=f"lrq receiver {self.name} watch", daemon=True)
            self._watch.start()
            if self._group_positions is None:
                self._teller = PositionTeller(self._nodes, self.name, self._list_progress, self._ending)
                self._teller.start()

    def run(self) -> None:
        """Receives until `stop` is called from another thread, or from the listener.

        Raises:
            Fenced: Another process uses the name.
            OtherLog: A queue has another log than the one of the committed position.
            Stop: The listener has raised it.
        """
        self.start()
        while not self._ending.wait(0.1):
            if failure := self._failure():
                self.stop()
                raise failure

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends after the lists under way; returns whether every thread has ended, and every position is written, within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        threads = self._end_threads()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in threads)
        if threading.current_thread() in self._list_readers():  # the listener calls, and its list is still to be committed
            return ended
        return self._close_positions(max(0.0, deadline - time.monotonic())) and ended

    def _end_threads(self) -> list[threading.Thread]:
        """Tells every thread to end after the list under way; returns those that the caller may wait for."""
        with self._lock:  # no reader starts from now on
            self._ending.set()
        for reader in self._list_readers():
            reader.end()
        threads = (*self._list_readers(), self._finder, self._watch, self._teller)
        return [thread for thread in threads if thread is not None and thread is not threading.current_thread()]

    def _close_positions(self, timeout_s: float) -> bool:
        """Returns whether every position was written within `timeout_s`."""
        return self._group_positions is None or self._group_positions.close(timeout_s)

    def _failure(self) -> BaseException | None:
        """The error that ends the receiver, if there is one."""
        failures = [reader.failure for reader in self._list_readers()]
        fenced = self._group_positions.fenced if self._group_positions else None
        return next(filter(None, (*failures, fenced)), None)

    def status(self) -> dict[str, SourceStatus]:
        """The status of each source, by remote id."""
        return {
            each.source: SourceStatus(
                each.state, each.reason, each.since, each.committed, each.state is State.NORMAL and not each.skipped, each.skipped
            )
            for each in self._list_readers()
        }

    @property
    def problem(self) -> str:
        """Why no queue can be looked for; empty if none is in the way."""
        return self._problem

    def wait_for(
        self, source: str, position: Position | None = None, replication_id: str | None = None, timeout_s: float = 30.0
    ) -> bool:
        """Waits until the application has committed what a source transmitted: "my write has arrived".

        Args:
            source: Remote id.
            position: A position of the source's log.
            replication_id: Of a transaction (`Confirm.replication_id`) that arrives after the receiver's start.
            timeout_s: How long to wait.

        Returns:
            Whether it is committed. False also if the receiver ends before. Skipped updates count as committed.

        Raises:
            MalformedInput: Neither or both of `position` and `replication_id` are given, or it is malformed.
        """
        has_come = parse_goal(position, replication_id)
        deadline = time.monotonic() + timeout_s
        while (reader := self._reader_of(source)) is None:
            if time.monotonic() > deadline or self._ending.wait(0.05):
                return False
        return reader.wait_for(has_come, deadline - time.monotonic())

    def resync(self, source: str | None = None, reason: str = "") -> None:
        """Demands a full sync from a source, or from all that the receiver has found. Returns when the demand is in the sink group's log.

        Args:
            source: Remote id; None: all.
            reason: For operators, at most 250 characters.

        Raises:
            MalformedInput: No such source has been found, or the reason is too long.
            NoNode: No node of the sink group takes the demand.
            MessageRefused: The user lacks the right to write to amq.default.
        """
        if len(reason) > names.REASON_CHARS_MAX:
            raise MalformedInput(f"A reason of {len(reason)} characters, of {names.REASON_CHARS_MAX} at most")
        readers = [reader for reader in self._list_readers() if source in (None, reader.source)]
        if not readers:
            raise MalformedInput(f"No queue of source {source!r} has been found" if source else "No queue has been found", todo="Wait for its state")
        with NodeConnection.open(self._nodes, f"lrq receiver {self.name}", producer=self.name) as node:
            for reader in readers:
                node.publish(names.DEMAND, pb.Demand(queue=reader.queue, reason=reason).SerializeToString())

    def skip(self, source: str, position: Position) -> None:
        """Leaves out updates that the listener refuses: those of the list under way, up to a position. A warning names the queue and the positions.

        The tables lack what was skipped until the next snapshot; `resync` demands one. Returns at once, so `on_error` may call it; the rest of the
        list comes next. A list that the listener takes meanwhile is not skipped.

        Args:
            source: Remote id.
            position: `Redelivery.position` for the whole list, or the position of one of its updates.

        Raises:
            MalformedInput: No queue of this source has been found, its listener refuses no list, or the position is not in that list.
        """
        reader = self._reader_of(source)
        if reader is None:
            raise MalformedInput(f"No queue of source {source!r} has been found", todo="Give the remote id that Update.source names")
        reader.skip(position)

    def forget(self, source: str) -> bool:
        """Removes the committed position of a source: the next receiver of this name begins there with a whole snapshot.

        The application's data stays until that snapshot begins. Another process of this name ends with Fenced.

        Args:
            source: Remote id. The source must not be read: the receiver has not started, or has stopped, or `sources` leaves the source out.

        Returns:
            Whether a position was kept.

        Raises:
            ReceiverError: The receiver reads the source, or may begin to.
            MalformedInput: It is no remote id.
        """
        queue = names.recv_queue(self.client_name, source)
        with self._lock:  # no reader starts meanwhile
            reader = self._readers.get(queue)
            excluded = self._sources is not None and source not in self._sources
            idle = self._finder is None or self._ending.is_set() or excluded
            if reader.is_alive() if reader is not None else not idle:
                raise ReceiverError(
                    f"Receiver {self.name!r} reads {queue}: its position cannot be removed meanwhile",
                    todo="Stop the receiver, see that stop returns True, and call forget then; or leave the source out of `sources`",
                )
        forgotten = self._importer.forget(self.name, queue)
        if self._group_positions is None:
            free_told(self._nodes, self.name, queue)
        return forgotten

    # ---- threads ---------------------------------------------------------------------------------------------------------

    def _watch_readers(self) -> None:
        while not self._ending.wait(LOOK_S):
            self._look_at_readers()

    def _look_at_readers(self) -> None:
        for reader in self._list_readers():
            reader.watch.warn_of_hang()

    def _notify_change(self) -> None:
        """A reader has committed, or its state has changed. Called in the reader's thread."""

    # ---- discovery ---------------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        while not self._ending.is_set():
            try:
                with NodeConnection.open(self._nodes, f"lrq receiver {self.name}", CONNECT_S) as node:
                    while not self._ending.is_set():
                        body = node.get(names.receivers_question(self.client_name))
                        self._problem = ""
                        self._add_queues(pb.ReceiveQueues.FromString(body or b""))
                        self._ending.wait(DISCOVER_S if self._readers else DISCOVER_FIRST_S)
            except Exception as error:
                problem = error.what if isinstance(error, LrqError) else f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    log.warning("receiver %s: %s", self.name, problem)
                self._problem = problem
                self._ending.wait(DISCOVER_FIRST_S)

    def _add_queues(self, found: pb.ReceiveQueues) -> None:
        for state in found.queues:
            parts = names.parse_recv_queue(state.queue)
            wanted = parts is not None and (self._sources is None or parts.remote_id in self._sources)
            if parts is not None and wanted and state.queue not in self._readers:
                reader = SourceReader(self.name, parts, state.queue, self._nodes, self._importer, self._listener, self._notify_change)
                with self._lock:
                    if not self._ending.is_set():
                        self._readers[state.queue] = reader
                        reader.start()

    def _list_readers(self) -> list[SourceReader]:
        with self._lock:
            return list(self._readers.values())

    def _list_progress(self) -> dict[str, Progress]:
        return {reader.queue: reader.progress for reader in self._list_readers() if reader.progress is not None}

    def _reader_of(self, source: str) -> SourceReader | None:
        with self._lock:
            return self._readers.get(names.recv_queue(self.client_name, source))


def parse_goal(position: Position | None, replication_id: str | None) -> Callable[[SourceReader], bool]:
    """A function that says whether a reader has committed a position or a transaction. Raises MalformedInput."""
    if (position is None) == (replication_id is None):
        raise MalformedInput("wait_for needs a position or a replication_id")
    if position is not None:
        where = position
        return lambda reader: reader.has_position(where)
    transaction = parse_id(replication_id or "")
    return lambda reader: reader.has(transaction)


def _importer(listener: Listener, positions: PositionStore | None) -> Importer:
    if isinstance(listener, Importer):
        if positions is not None:
            raise MalformedInput(f"{type(listener).__name__} keeps its own position", todo="Leave out `positions`")
        return listener
    assert positions is not None
    return ListenerImporter(listener, positions)
