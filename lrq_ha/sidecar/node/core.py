"""The pure core of an incarnation, driven: one event after the other goes in, and its effects are carried out in order, at once.

Rules:

- No event comes while the effects of another one are carried out. A second event, an event that the core refuses, and effects that cannot be
  carried out, end the incarnation: a core that is left half changed would tell others of entries that the stream does not have.
- The core's own appends come after the sequences that the replica has assigned already.
- No event goes in before the incarnation is ready, or when it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from broker_plugin.log import codec
from broker_plugin.log.replica import Replica
from broker_plugin.log.shortfall import Shortfall
from lrq_ha.errors import IllegalEvent
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Append, Effect, Event, OwnConfirmed, PeerAcked
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node

from .task_scope import TaskScope


class Core:
    """The core with its driver.

    Args:
        node: The pure core.
        levels: How much of each queue is replicated.
        life: Of the incarnation.
        carry_out: Called with each effect.
        shortfall: Of the incarnation before.

    Attributes:
        replica: Its appends go into the core.
        ready: Whether events are taken.
    """

    def __init__(
        self, node: Node, levels: Levels, life: TaskScope, carry_out: Callable[[Effect], None], shortfall: Shortfall | None = None
    ) -> None:
        self.node = node
        self.replica = Replica(node, levels, self._emit, shortfall)
        self.replica.takes = self._takes
        self.ready = False
        self._life = life
        self._carry_out = carry_out
        self._feeding = False

    def feed(self, event: Event) -> None:
        """Gives an event to the core and carries out its effects. Never raises: a failure ends the incarnation."""
        if not self._takes():
            return
        try:
            if not isinstance(event, Append) and self._may_append(event):
                self.replica.flush()  # the core's own appends come after the sequences that were assigned already
            if self._feeding:
                raise IllegalEvent(f"{type(event).__name__} while the effects of another event are carried out")
            self._feeding = True
            for effect in self.node.handle(event, time.monotonic()):
                self._carry_out(effect)
        except Exception as error:
            self._life.fail(error)
        finally:
            self._feeding = False

    def _takes(self) -> bool:
        return self.ready and not self._life.over

    def _may_append(self, event: Event) -> bool:
        """Whether the core may append MEMBERS at this event; at acks and confirms, of which there are many, only if the set may change."""
        return not isinstance(event, OwnConfirmed | PeerAcked) or self.node.set_may_change

    def _emit(self, first: int, count: int, runs: list[pb.Run | codec.Publishes]) -> None:
        renewal, run = 0, runs[0]
        if count == 1 and isinstance(run, pb.Run):
            if run.checkpoint.renewal:
                renewal = first
            elif run.HasField("renewed"):
                renewal = -run.renewed.checkpoint if run.renewed.given_up else run.renewed.checkpoint
        self.feed(Append(count, (first, runs), renewal))
