"""A position store in the log of the sink group: it needs no database, survives failovers, and operators see how far a receiver has come.

Rules:

- A list is applied at least once: a commit comes after the list. Commits are written a few times a second, the newest for each queue, so a receiver
  that is killed gets the lists of the last moment again, in order.
- A commit names the token of the process that keeps the position. A process that was replaced is told at its next commit (`Fenced`).
- One thread writes. A commit whose answer was lost is written again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from uuid import uuid4

import pika

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing import names
from lrq_ha.routing.chain import position_message
from lrq_ha.streams.errors import MessageRefused
from lrq_ha.streams.node_connection import NodeConnection

from .errors import Fenced, ReceiverError
from .progress import Progress

log = logging.getLogger("lrq_ha.receiver")

WRITE_EVERY_S = 0.2
RETRY_S = 0.5
CONNECT_S = 5.0


class GroupPositions:
    """A PositionStore in the log of the sink group.

    Args:
        nodes: Addresses of the group's doors.
        name: The receiver's name: the producer that commits.
    """

    def __init__(self, nodes: Sequence[pika.ConnectionParameters], name: str) -> None:
        self._nodes = list(nodes)
        self._name = name
        self._token = uuid4().hex
        self._changed = threading.Condition()
        self._waiting: dict[str, Progress] = {}  # the newest progress of each queue that is not written
        self._refused: dict[str, ReceiverError] = {}  # by queue
        self._ending = self._given_up = False
        self._writer: threading.Thread | None = None

    def load(self, name: str, queue: str) -> Progress | None:
        """Takes the queue over: from now on this process keeps the position, and no other process.

        Raises:
            LrqError: No node answers, the user lacks the right to write to amq.default, or the name belongs to another user.
        """
        with NodeConnection.open(self._nodes, f"lrq receiver {name}", CONNECT_S, producer=name) as node:
            known = pb.Commit.FromString(node.get(names.position_question(name, queue)) or b"")
            taken = pb.Commit(receiver=name, queue=queue, token=self._token, expected=known.token)
            taken.MergeFrom(pb.Commit(value=known.value, position=known.position, phase=known.phase))
            if known.token != self._token:
                node.publish(names.COMMIT, taken.SerializeToString())
        return Progress.from_text(known.value) if known.value else None

    def commit(self, name: str, queue: str, before: Progress | None, after: Progress) -> None:
        """Leaves the progress to the writer.

        Raises:
            Fenced: Another process has taken the queue over.
            ReceiverError: The group has refused the progress before this one.
        """
        with self._changed:
            if queue in self._refused:
                raise self._refused.pop(queue)
            self._waiting[queue] = after
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name=f"lrq receiver {name} positions", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def forget(self, name: str, queue: str) -> bool:
        """Frees the position, with a commit that has no token. Returns whether a position was kept.

        Raises:
            NoNode: No node answers.
            QueueRefused: The position belongs to another user.
            MessageRefused: The user lacks the right to write to amq.default, or another process has taken the queue over meanwhile.
        """
        with NodeConnection.open(self._nodes, f"lrq receiver {name}", CONNECT_S, producer=name) as node:
            known = pb.Commit.FromString(node.get(names.position_question(name, queue)) or b"")
            if known.token:
                node.publish(names.COMMIT, pb.Commit(receiver=name, queue=queue, expected=known.token).SerializeToString())
        return bool(known.value)

    @property
    def fenced(self) -> Fenced | None:
        """The refusal, if another process has taken a queue over."""
        return next((error for error in list(self._refused.values()) if isinstance(error, Fenced)), None)

    def close(self, timeout_s: float) -> bool:
        """Writes what waits, and ends; returns whether all was written within `timeout_s`."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)
        self._given_up = True
        return not self._waiting

    # ---- the writer's thread -------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while self._wait():
            try:
                with NodeConnection.open(self._nodes, f"lrq receiver {self._name}", CONNECT_S, producer=self._name) as node:
                    while self._wait():
                        for queue, progress in list(self._waiting.items()):
                            self._write_one(node, queue, progress)
                        self._pause(WRITE_EVERY_S)
            except LrqError as error:
                log.info("receiver %s: positions are written later: %s", self._name, error.what)
                self._pause(RETRY_S)
            except Exception:
                log.exception("receiver %s: positions are written later", self._name)
                self._pause(RETRY_S)

    def _write_one(self, node: NodeConnection, queue: str, progress: Progress) -> None:
        commit = pb.Commit(
            receiver=self._name,
            queue=queue,
            value=progress.to_text(),
            position=position_message(progress.position),
            phase=progress.phase.value,
            token=self._token,
            expected=self._token,
        )
        try:
            node.publish(names.COMMIT, commit.SerializeToString())
        except MessageRefused as error:
            fenced = names.TAKEN_OVER in error.said
            with self._changed:
                self._refused[queue] = Fenced(self._name, queue) if fenced else ReceiverError(error.what, todo=error.todo)
                self._waiting.pop(queue, None)
            return
        with self._changed:
            if self._waiting.get(queue) is progress:
                del self._waiting[queue]

    def _wait(self) -> bool:
        """Whether something is to be written; False: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return bool(self._waiting) and not self._given_up

    def _pause(self, seconds: float) -> None:
        """Waits, but not before the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending, seconds)
