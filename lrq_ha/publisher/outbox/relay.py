"""The relay of an outbox: transmits each transaction once, in the order of commits.

For each batch: commit that its numbers may be sent, send it, wait for the confirms, commit that it is transmitted. A relay that ends in between
sends the transactions again under their numbers, which the log has already.

Rules:

- One relay for each outbox: a second one takes over, and the first one ends with RelayFenced. Even two relays at once would send nothing twice.
- Nothing behind a refused transaction is sent before the relay has tried that one again.
- Whatever may pass (the database, the nodes) is tried again: after 0.1 s, doubling to 30 s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from lrq_ha.database import Connection
from lrq_ha.errors import LrqError
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.errors import (
    FencedError,
    InvalidArgument,
    MessageTooLarge,
    NackedError,
    NoPrimary,
    PublisherClosed,
    Unconfirmed,
    WaitTimeout,
    anew,
)
from lrq_ha.publisher.numbered import NumberedProducer
from lrq_ha.publisher.outbox.batch import Stored, split_batch
from lrq_ha.publisher.outbox.errors import OutboxError, OutboxRestored
from lrq_ha.publisher.outbox.ledger import Ledger, Progress
from lrq_ha.publisher.outbox.states import RelayState, require_legal
from lrq_ha.publisher.outbox.table import Outbox
from lrq_ha.publisher.sync import Publisher

log = logging.getLogger("lrq_ha.publisher.outbox")

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 30.0
LOOK_S: Final = 0.2  # between two looks at `stop` while a confirm is waited for
CHECK_S: Final = 0.02  # between two looks for the login of a connection
PATIENCE_S: Final = 1.0  # a login and a confirm take less
CLOSE_S: Final = 2.0  # for what is on its way when the relay stops


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """The status of a relay.

    Attributes:
        state: Of the relay.
        problem: Why it does not go on, for operators; empty if it does.
        since: When the state began, in seconds since 1970.
        transmitted: Number of the last transaction that is confirmed.
        waiting: Transactions that are committed and not yet confirmed, at the last look.
    """

    state: RelayState
    problem: str
    since: float
    transmitted: int
    waiting: int


class _Stopped(Exception):
    """`stop` was called."""


class _Refused(Exception):
    """A transaction was refused, or can never be sent."""

    def __init__(self, number: int, error: LrqError) -> None:
        super().__init__(f"transaction {number} was refused: {error}")
        self.number = number


class OutboxRelay:
    """Transmits what applications write to an outbox. Use it as a context manager, then call `run`; or call `start` and `stop`.

    Args:
        connect: Opens a DB-API connection, such as `lambda: sqlite3.connect("orders.db", timeout=30)`.
        open_publisher: Makes the `Publisher` that the relay transmits with, with its `client_name`. The relay closes it.
        outbox: As the application has it.
        keep: How many transmitted transactions stay in the table, >= 0.
        poll_s: Seconds between two looks at an empty outbox, > 0. `wake` looks at once.

    Raises:
        InvalidArgument: `keep` or `poll_s`.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        open_publisher: Callable[[], Publisher],
        outbox: Outbox | None = None,
        *,
        keep: int = 0,
        poll_s: float = 0.2,
    ) -> None:
        if keep < 0 or poll_s <= 0:
            raise InvalidArgument(f"keep is {keep} and poll_s is {poll_s}", todo="keep is at least 0, and poll_s greater than 0")
        self._connect = connect
        self._open_publisher = open_publisher
        self._table = (outbox or Outbox()).table
        self._keep = keep
        self._poll_s = poll_s
        self._lock = threading.Lock()  # around start and stop
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._awake = threading.Event()
        self._failure: Exception | None = None
        self._state, self._since, self._problem = RelayState.STOPPED, time.time(), ""
        self._progress = Progress(0, 0)  # as committed
        self._confirmed = 0  # everything up to this number is confirmed
        self._last = 0
        self._retry_s = RETRY_MIN_S
        self._proven: set[str] = set()
        self._publisher: Publisher | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to transmit, in a thread. A relay that was stopped, or has failed, begins again. Otherwise a second call changes nothing."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._ending.clear()
            self._failure = None
            self._thread = threading.Thread(target=self._work, name=f"lrq-outbox-{self._table}", daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Transmits until `stop` is called from another thread.

        Raises:
            RelayFenced: Another relay has taken over.
            OutboxRestored: The log has transactions that the database does not know.
            NoOutbox: The tables are not complete.
            FencedError: Another process uses the producer name of the publisher.
            InvalidArgument: From `open_publisher`, or the publisher has no `client_name`, or the database is not supported.
        """
        self.start()
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(0.2)
        if self._failure is not None:
            raise anew(self._failure) if isinstance(self._failure, LrqError) else self._failure

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends. A transaction that is on its way is transmitted again at the next start, and is in the log once.

        Args:
            timeout_s: Seconds to wait for the end.

        Returns:
            Whether the relay has ended.
        """
        with self._lock:
            self._ending.set()
            self._awake.set()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(timeout_s)
        return not thread.is_alive()

    def wake(self) -> None:
        """Has the relay look at the outbox now: for an application that has just committed in this process."""
        self._awake.set()

    def status(self) -> RelayStatus:
        """The status, as of the last look at the outbox."""
        progress = self._progress
        return RelayStatus(self._state, self._problem, self._since, progress.transmitted, max(0, self._last - progress.transmitted))

    # ---- on the relay's thread

    def _work(self) -> None:
        ledger, end = Ledger(self._connect, self._table, self._keep), RelayState.STOPPED
        self._enter(RelayState.STARTING)
        try:
            self._relay(ledger)
        except _Stopped:
            pass
        except Exception as error:
            self._failure, end = error, RelayState.FAILED
            log.error("outbox %s: %s", self._table, error)
        finally:
            self._close_publisher()
            ledger.close()
            self._enter(end, str(self._failure or ""))

    def _relay(self, ledger: Ledger) -> None:
        """Goes on until it is stopped, or fails for good."""
        producer_name = ""
        self._retry_s = RETRY_MIN_S
        while True:
            try:
                if not producer_name:
                    producer_name, self._progress = ledger.take_over()
                    self._confirmed = self._progress.transmitted
                self._progress, self._last = ledger.load()
                self._follow(ledger, producer_name)
            except _Refused as refused:
                self._proven.clear()
                self._enter(RelayState.REFUSED, str(refused))
            except (_Stopped, OutboxError, FencedError, InvalidArgument):
                raise
            except Exception as error:
                if isinstance(error, PublisherClosed | Unconfirmed):
                    self._close_publisher()
                self._enter(RelayState.WAITING, error.what if isinstance(error, LrqError) else f"{type(error).__name__}: {error}")
            self._check_stop(self._ending.wait(self._retry_s))
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _follow(self, ledger: Ledger, producer_name: str) -> None:
        """Transmits what is in the outbox, and what comes."""
        if self._publisher is None:
            self._publisher = self._open_publisher()
        producer = self._publisher.open_producer(producer_name, self._progress.sent)
        try:
            self._wait_until_checked(producer)
            while True:
                step = ledger.advance(self._progress, self._confirmed)
                self._progress, self._last = step.progress, step.last
                if self._state is not RelayState.REFUSED or not step.batch:
                    self._enter(RelayState.TRANSMITTING)
                if step.batch:
                    self._transmit(ledger, producer, step.batch)
                else:
                    self._awake.wait(self._poll_s)
                    self._awake.clear()
                self._check_stop(self._ending.is_set())
                if producer.failure is not None:
                    raise producer.failure
        except _Stopped:
            if self._confirmed > self._progress.transmitted:
                ledger.advance(self._progress, self._confirmed)
            raise
        except FencedError as error:
            if not producer.fenced:
                raise
            ledger.load()  # raises RelayFenced if another relay has sent them
            raise OutboxRestored(self._table, producer_name, error.known, self._progress.sent) from error

    def _wait_until_checked(self, producer: NumberedProducer) -> None:
        """The log is compared with what this database has sent, before the database says that more may have been sent."""
        begun_s = time.monotonic()
        while producer.failure is None and not producer.checked:
            if self._ending.wait(CHECK_S):
                raise _Stopped
            error = producer.no_primary()
            if error is not None and time.monotonic() - begun_s > PATIENCE_S:
                self._enter(RelayState.WAITING, error.what)
        if producer.failure is not None:
            raise producer.failure

    def _transmit(self, ledger: Ledger, producer: NumberedProducer, batch: list[Stored]) -> None:
        """Sends a batch, and waits for its confirms. Raises _Refused, _Stopped."""
        for run in split_batch(batch, self._proven):
            for each, confirm in [(each, self._send(producer, each)) for each in run]:
                self._wait_for(ledger, each.number, confirm)
                self._confirmed = each.number
                self._proven |= each.destinations
            self._retry_s = RETRY_MIN_S
            self._enter(RelayState.TRANSMITTING)

    def _send(self, producer: NumberedProducer, transaction: Stored) -> Confirm:
        try:
            return producer.transmit(transaction.number, transaction.entries)
        except MessageTooLarge as error:
            raise _Refused(transaction.number, error) from error

    def _wait_for(self, ledger: Ledger, number: int, confirm: Confirm) -> None:
        """Waits for a confirm, however long that takes, while this is the relay of the outbox. Raises _Refused, _Stopped, RelayFenced."""
        looked_s = time.monotonic()
        while True:
            try:
                confirm.result(LOOK_S)
                return
            except WaitTimeout as error:
                if isinstance(error, NoPrimary):
                    self._enter(RelayState.WAITING, error.what)
                self._check_stop(self._ending.is_set())
                if time.monotonic() - looked_s > PATIENCE_S:
                    _, self._last = ledger.load()
                    looked_s = time.monotonic()
            except NackedError as error:
                raise _Refused(number, error) from error

    def _check_stop(self, ending: bool) -> None:
        if ending:
            raise _Stopped

    def _close_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            try:
                publisher.close(CLOSE_S)
            except LrqError as error:  # the transactions are transmitted again
                log.info("outbox %s: %s", self._table, error)

    def _enter(self, state: RelayState, problem: str = "") -> None:
        if problem and problem != self._problem:
            log.warning("outbox %s is %s: %s", self._table, state.value, problem)
        self._problem = problem
        if state is not self._state:
            require_legal(self._state, state)
            self._state, self._since = state, time.time()
