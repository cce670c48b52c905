"""The queues and exchanges that a node knows: the log's declarations, how much of each is replicated, and this
node's own queues.

Rules:
- A declaration counts when it is noted, in log order; a cut reverts the changes of entries that fell out of the log.
- The log says how much of a queue is replicated; for a queue that the log does not know, its name does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Level, Levels
from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations, frames
from .definitions import Definitions, rows_of

LEVELS_KEPT_MAX = 100_000
LOCAL_QUEUES_MAX = 100_000


class LocalQueues:
    """This node's own queues, exclusive or auto-delete: the last LOCAL_QUEUES_MAX declared, as the broker does not
    tell when one goes.

    A live queue that is forgotten counts as any other queue of its name: its publishes enter the log, and find no
    queue elsewhere.
    """

    def __init__(self) -> None:
        self._keys: dict[QueueKey, None] = {}

    def __contains__(self, key: QueueKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: QueueKey) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > LOCAL_QUEUES_MAX:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: QueueKey) -> None:
        self._keys.pop(key, None)


class Catalog:
    """Declarations of the log and of this node's clients. `levels`: how much of queues and exchanges is
    replicated, by their names.

    Attributes:
        queues: Queues that the log declares, and the entry that deletes each again; 0: none.
        declarations: The method of each queue's last declaration.
        definitions: Everything that the log declares and has not deleted again.
        auto_delete_exchanges: Auto-delete exchanges and their declarations.
        known_topology: Declarations that need not be appended again, and their entries.
        partial: Queues that the log declares, or has declared, with another level than `all`.
        here: Queues that clients of this node have declared in this epoch.
        local_queues: This node's own.
        consumed: Queues that go with their last consumer, and have had one on this node.
    """

    def __init__(self, levels: Levels) -> None:
        self.queues: dict[QueueKey, int] = {}
        self.declarations: dict[QueueKey, bytes] = {}
        self.definitions = Definitions()
        self.auto_delete_exchanges: dict[tuple[str, str], bytes] = {}
        self.known_topology: dict[tuple[str, bytes], int] = {}
        self.partial: set[QueueKey] = set()
        self.here: set[QueueKey] = set()
        self.local_queues = LocalQueues()
        self.consumed: set[QueueKey] = set()
        self._levels = levels
        self._known_levels: dict[QueueKey, Level] = {}
        self._safe = 0
        self._before: deque[tuple[int, dict[Any, Any], Any, Any]] = deque()  # former values, for entries that are not safe

    # ---- levels ------------------------------------------------------------------------------------------------------

    def level(self, key: QueueKey) -> Level:
        """How much of a queue the other nodes get: by the log; for a queue that the log does not know, by its name."""
        if key in self.local_queues:
            return Level.NONE
        known = self._known_levels.get(key)
        if known is None:
            if len(self._known_levels) > LEVELS_KEPT_MAX:
                self._known_levels.clear()
            method = self.definitions.queue(key)
            known = self._levels.of(key[1]) if method is None else declarations.level_of(method)
            self._known_levels[key] = known
        return known

    def replicates(self, key: QueueKey) -> bool:
        """Whether a queue's messages, and the operations on them, go into the log."""
        return self.level(key) is Level.ALL

    def is_stream(self, key: QueueKey) -> bool:
        """Whether a queue is a stream, as far as the log tells."""
        return declarations.is_stream(self.definitions.queue(key) or b"")

    def knows(self, key: QueueKey) -> bool:
        """Whether a queue's declarations go, or have gone, into the log."""
        return self.level(key) is not Level.NONE or self.definitions.queue(key) is not None

    def replicates_exchange(self, name: str) -> bool:
        """Whether an exchange's declaration, its bindings, and the publishes to it go into the log.

        RabbitMQ's predeclared exchanges are on every node, but each broker has its own `amq.rabbitmq.*`, by which it
        tells of itself.
        """
        if name.startswith("amq."):
            return not name.startswith("amq.rabbitmq.")
        return self._levels.of(name) is not Level.NONE

    def consumes(self, key: QueueKey) -> None:
        """Notes a consumer: a queue that goes with its last consumer may go from now on."""
        if declarations.goes_unused(self.definitions.queue(key) or b""):
            self.consumed.add(key)

    def keeping(self, vhost: str, exchanges: Iterable[str]) -> tuple[list[bytes], list[bytes]]:
        """(declarations, bindings) that bring auto-delete exchanges back to the log's state. Empty for other
        exchanges.

        An auto-delete exchange goes with the last binding that comes from it, and takes the bindings with it by which
        other exchanges reach it. An auto-delete exchange that reaches it by its last binding goes then too: however
        long that chain is, and even if it is a cycle.
        """
        declares: dict[str, bytes] = {}
        binds: list[bytes] = []
        left = list(exchanges)
        while left:
            exchange = left.pop()
            method = self.auto_delete_exchanges.get((vhost, exchange))
            if method is not None and exchange not in declares:
                declares[exchange] = method
                for source, binding in self.definitions.bound_to_exchange(vhost, exchange):
                    left.append(source)
                    binds.append(binding)
        return list(declares.values()), binds

    # ---- declarations of the log -------------------------------------------------------------------------------------

    def existing(self) -> list[QueueKey]:
        """The queues that the log declares and does not delete again."""
        return [key for key, gone in self.queues.items() if not gone]

    def has(self, key: QueueKey) -> bool:
        """Whether the log declares a queue and does not delete it again."""
        return self.queues.get(key, -1) == 0

    def noted(self, sequence: int, entry: pb.Topology) -> QueueKey | None:
        """Notes a declaration or deletion at entry `sequence`. Returns the queue that the entry deletes, if any."""
        kind = frames.method_id(entry.method)
        deleted = None
        if kind in (frames.QUEUE_DECLARE, frames.QUEUE_DELETE):
            key = (entry.vhost, declarations.first_name(entry.method))
            self._change(sequence, self.queues, key, sequence if kind == frames.QUEUE_DELETE else 0)
            self._known_levels.pop(key, None)
            if kind == frames.QUEUE_DECLARE:
                self._change(sequence, self.declarations, key, entry.method)
                if declarations.level_of(entry.method) is not Level.ALL:
                    self.partial.add(key)
            else:
                deleted = key
                self.here.discard(key)
                self.partial.discard(key)
                self.consumed.discard(key)
        self.definitions.noted(sequence, entry.vhost, entry.method)
        if kind in declarations.DELETES:
            self.known_topology.clear()
        else:
            self.known_topology[entry.vhost, entry.method] = sequence
        if kind in (frames.EXCHANGE_DECLARE, frames.EXCHANGE_DELETE):
            exchange, auto_delete = declarations.exchange_of(entry.method)
            self._change(sequence, self.auto_delete_exchanges, (entry.vhost, exchange), entry.method if auto_delete else None)
        return deleted

    def _change(self, sequence: int, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Entry `sequence` sets a value in a table (None: removes it); a cut reverts that."""
        if sequence > self._safe:
            self._before.append((sequence, table, key, table.get(key)))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def safe(self, upto: int, reached: int) -> None:
        """No entry up to `upto` will be cut off. `reached`: the entry that the node has come to."""
        self._safe = upto
        self.definitions.safe(upto, reached)
        while self._before and self._before[0][0] <= upto:
            self._before.popleft()

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.definitions.cut(first)
        self._known_levels.clear()
        self.partial |= self._partial()
        self.known_topology = {key: s for key, s in self.known_topology.items() if s < first}
        while self._before and self._before[-1][0] >= first:
            _, table, key, before = self._before.pop()
            if before is None:
                table.pop(key, None)
            else:
                table[key] = before

    def _partial(self) -> set[QueueKey]:
        return {key for key in self.definitions.queues() if not self.replicates(key)}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def forget(self, key: QueueKey, sequence: int) -> None:
        """Forgets a queue deleted by entry `sequence`, which is safe, unless the queue was declared again since."""
        if self.queues.get(key) == sequence:
            del self.queues[key]
            self.declarations.pop(key, None)

    def restore(self, sequence: int, entry: pb.Checkpoint) -> None:
        """Starts from the CHECKPOINT at `sequence`, which is safe."""
        self._known_levels.clear()
        self.definitions = Definitions(rows_of(entry))
        self.declarations = self.definitions.queues()
        self.queues = dict.fromkeys(self.declarations, 0)
        self.partial = self._partial()
        for each in entry.auto_delete_exchanges:
            self.noted(sequence, each)
