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
from collections.abc import Sequence
from dataclasses import dataclass

import pika

from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import names
from lrq_ha.streams.node_connection import NodeConnection, address_of

from .errors import ReceiverError
from .group_positions import GroupPositions
from .listener import Importer, Listener, ListenerImporter, PositionStore
from .source_reader import CONNECT_S, SourceReader, parse_id
from .states import State

log = logging.getLogger("lrq_ha.receiver")

DISCOVER_FIRST_S = 1.0  # until the first queue is there
DISCOVER_S = 10.0
REASON_CHARS_MAX = 250


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of one source.

    Attributes:
        state: Of the receiver for this source.
        reason: Text for operators.
        since: When the state began, in seconds since 1970.
        position: The committed position; (0, 0): none.
        consistent: Whether the application's tables equal the source's at that position.
    """

    state: State
    reason: str
    since: float
    position: Position
    consistent: bool


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

    def run(self) -> None:
        """Receives until `stop` is called from another thread, or from the listener.

        Raises:
            Fenced: Another process uses the name.
            Stop: The listener has raised it.
        """
        self.start()
        while not self._ending.wait(0.1):
            failures = [reader.failure for reader in self._list_readers()]
            fenced = self._group_positions.fenced if self._group_positions else None
            if failure := next(filter(None, (*failures, fenced)), None):
                self.stop()
                raise failure

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends after the lists under way; returns whether every thread has ended, and every position is written, within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:  # no reader starts from now on
            self._ending.set()
        threads: list[threading.Thread] = [*self._list_readers(), *([self._finder] if self._finder else [])]
        for reader in self._list_readers():
            reader.end()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())
        written = self._group_positions is None or self._group_positions.close(max(0.0, deadline - time.monotonic()))
        return ended and written

    def status(self) -> dict[str, SourceStatus]:
        """The status of each source, by remote id."""
        return {
            reader.source: SourceStatus(reader.state, reader.reason, reader.since, reader.committed, reader.state is State.NORMAL)
            for reader in self._list_readers()
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
            Whether it is committed.

        Raises:
            MalformedInput: Neither or both of `position` and `replication_id` are given, or it is malformed.
        """
        if (position is None) == (replication_id is None):
            raise MalformedInput("wait_for needs a position or a replication_id")
        transaction = parse_id(replication_id) if replication_id is not None else None
        deadline = time.monotonic() + timeout_s
        while (reader := next((each for each in self._list_readers() if each.source == source), None)) is None:
            if time.monotonic() > deadline or self._ending.wait(0.05):
                return False

        def has_come(each: SourceReader) -> bool:
            return (position is None or each.has_position(position)) and (transaction is None or each.has(transaction))

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
        if len(reason) > REASON_CHARS_MAX:
            raise MalformedInput(f"A reason of {len(reason)} characters, of {REASON_CHARS_MAX} at most")
        readers = [reader for reader in self._list_readers() if source in (None, reader.source)]
        if not readers:
            raise MalformedInput(f"No queue of source {source!r} has been found" if source else "No queue has been found", todo="Wait for its state")
        with NodeConnection.open(self._nodes, f"lrq receiver {self.name}", producer=self.name) as node:
            for reader in readers:
                node.publish(names.DEMAND, pb.Demand(queue=reader.queue, reason=reason).SerializeToString())

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
                reader = SourceReader(self.name, parts, state.queue, self._nodes, self._importer, self._listener)
                with self._lock:
                    if not self._ending.is_set():
                        self._readers[state.queue] = reader
                        reader.start()

    def _list_readers(self) -> list[SourceReader]:
        with self._lock:
            return list(self._readers.values())


def _importer(listener: Listener, positions: PositionStore | None) -> Importer:
    if isinstance(listener, Importer):
        if positions is not None:
            raise MalformedInput(f"{type(listener).__name__} keeps its own position", todo="Leave out `positions`")
        return listener
    assert positions is not None
    return ListenerImporter(listener, positions)
