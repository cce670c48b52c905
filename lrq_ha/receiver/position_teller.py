"""Tells the sink group how far a receiver has come whose position is kept elsewhere: in the application's database. For operators only.

Rules:

- What is told has no value, so no receiver ever begins there. A queue for which the group itself keeps a position of this name is left alone.
- A queue whose position the group refuses, for want of a right or of room, is not told of again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

import pika

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing import names
from lrq_ha.routing.chain import position_message
from lrq_ha.streams.errors import MessageRefused, QueueRefused
from lrq_ha.streams.node_connection import NodeConnection

from .progress import Progress

log = logging.getLogger("lrq_ha.receiver")

TELL_EVERY_S = 5.0
CONNECT_S = 5.0


class PositionTeller(threading.Thread):
    """Tells what has changed, every TELL_EVERY_S.

    Args:
        nodes: Addresses of the group's doors.
        name: The receiver's name.
        positions: Returns the committed progress of each queue.
        ending: Set when the receiver ends.
    """

    def __init__(
        self, nodes: Sequence[pika.ConnectionParameters], name: str, positions: Callable[[], Mapping[str, Progress]], ending: threading.Event
    ) -> None:
        super().__init__(name=f"lrq receiver {name} positions", daemon=True)
        self._receiver = name
        self._nodes = list(nodes)
        self._positions = positions
        self._ending = ending
        self._token = uuid4().hex
        self._told: dict[str, Progress] = {}
        self._left_alone: set[str] = set()

    def run(self) -> None:
        """Tells until the receiver ends."""
        while not self._ending.wait(TELL_EVERY_S):
            try:
                self._tell_changes()
            except LrqError as error:
                log.info("receiver %s: the group is told of its position later: %s", self._receiver, error.what)
            except Exception:
                log.exception("receiver %s: the group is told of its position later", self._receiver)

    def _tell_changes(self) -> None:
        positions = self._positions().items()
        changed = {queue: progress for queue, progress in positions if self._told.get(queue) != progress and queue not in self._left_alone}
        if not changed:
            return
        with NodeConnection.open(self._nodes, f"lrq receiver {self._receiver}", CONNECT_S, producer=self._receiver) as node:
            for queue, progress in changed.items():
                try:
                    self._tell(node, queue, progress)
                    self._told[queue] = progress
                except (MessageRefused, QueueRefused) as error:
                    if names.TAKEN_OVER not in str(error):  # else another process has told its own since the question
                        self._leave_alone(queue, error.what)

    def _tell(self, node: NodeConnection, queue: str, progress: Progress) -> None:
        known = pb.Commit.FromString(node.get(names.position_question(self._receiver, queue)) or b"")
        if known.value:
            self._leave_alone(queue, "the group keeps a position of this name: Receiver.forget, without a database, frees it")
            return
        commit = pb.Commit(
            receiver=self._receiver,
            queue=queue,
            position=position_message(progress.position),
            phase=progress.phase.value,
            token=self._token,
            expected=known.token,
        )
        node.publish(names.COMMIT, commit.SerializeToString())

    def _leave_alone(self, queue: str, why: str) -> None:
        self._left_alone.add(queue)
        log.warning("receiver %s: operators are not told of its position in %s: %s", self._receiver, queue, why)


def free_told(nodes: Sequence[pika.ConnectionParameters], name: str, queue: str) -> None:
    """Frees what was told of a queue. Without success, a line in the log says so."""
    try:
        with NodeConnection.open(list(nodes), f"lrq receiver {name}", CONNECT_S, producer=name) as node:
            known = pb.Commit.FromString(node.get(names.position_question(name, queue)) or b"")
            if known.token and not known.value:
                node.publish(names.COMMIT, pb.Commit(receiver=name, queue=queue, expected=known.token).SerializeToString())
    except LrqError as error:
        log.warning("receiver %s: operators may still see its position in %s: %s", name, queue, error.what)
