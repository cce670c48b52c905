"""What a node knows of queues and exchanges: what the log declares, how much of each is replicated, and which are this node's own.

Rules:
- A declaration counts when it is noted, in log order; a cut sets back what entries that fell out of the log have changed.
- How much of a queue is replicated says the log; of one that it does not know, its name.
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
    """This node's own queues, exclusive or auto-delete: the last LOCAL_QUEUES_MAX that were declared, as nobody tells when one goes.

    One that is forgotten while it is there is taken for any other of its name: what is published to it enters the log, and finds no queue elsewhere.
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
    """See above. `levels`: what of queues and exchanges is replicated, by their names.

    Attributes:
        queues: That the log declares, and the entry that deletes them again; 0: none.
        declarations: How: the method of the last declaration.
        definitions: All that the log declares and has not deleted again.
        auto_delete_exchanges: And their declarations.
        known_topology: Declarations that need not be appended again, and their entries.
        partial: Queues that the log declares with another level than `all`, or has declared so.
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
        self._before: deque[tuple[int, dict[Any, Any], Any, Any]] = deque()  # what entries that are not safe have changed in those: how it was

    # ---- levels ------------------------------------------------------------------------------------------------------

    def level(self, key: QueueKey) -> Level:
        """How much of a queue the other nodes get: what the log says of it; of one that it does not know, what its name says."""
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
        """Whether a queue's messages, and what becomes of them, go into the log."""
        return self.level(key) is Level.ALL

    def is_stream(self, key: QueueKey) -> bool:
        """Whether a queue is a stream, as far as the log tells."""
        return declarations.is_stream(self.definitions.queue(key) or b"")

    def knows(self, key: QueueKey) -> bool:
        """Whether a queue's declarations go into the log, or have."""
        return self.level(key) is not Level.NONE or self.definitions.queue(key) is not None

    def replicates_exchange(self, name: str) -> bool:
        """Whether an exchange's declaration and bindings, and what is published to it, go into the log.

        Those that RabbitMQ declares are on every node, but `amq.rabbitmq.*`, by which a broker tells of itself, is each one's own.
        """
        if name.startswith("amq."):
            return not name.startswith("amq.rabbitmq.")
        return self._levels.of(name) is not Level.NONE

    def consumes(self, key: QueueKey) -> None:
        """A client consumes from a queue: if it is one that goes with its last consumer, it may go from now on."""
        if declarations.goes_unused(self.definitions.queue(key) or b""):
            self.consumed.add(key)

    def keeping(self, vhost: str, exchanges: Iterable[str]) -> tuple[list[bytes], list[bytes]]:
        """What there must be again for auto-delete exchanges to be as the log has them: declarations, then bindings. Nothing for other exchanges.

        One goes with the last binding that comes from it, and takes those with it by which other exchanges reach it. One that reaches it by its last
        binding, and is auto-delete itself, goes then, too: however long the way is that clients have made, and be it a circle.
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

    # ---- what the log says -------------------------------------------------------------------------------------------

    def existing(self) -> list[QueueKey]:
        """The queues that the log declares and does not delete again."""
        return [key for key, gone in self.queues.items() if not gone]

    def has(self, key: QueueKey) -> bool:
        """Whether the log declares a queue and does not delete it again."""
        return self.queues.get(key, -1) == 0

    def noted(self, sequence: int, entry: pb.Topology) -> QueueKey | None:
        """The log says so at entry `sequence`. Returns the queue that it deletes, if it does."""
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
        """Entry `sequence` sets what a table says (None: nothing any more); a cut sets it back."""
        if sequence > self._safe:
            self._before.append((sequence, table, key, table.get(key)))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def safe(self, upto: int, reached: int) -> None:
        """Nothing up to this entry will be cut off. `reached`: the one that the node has come to."""
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
        """A queue was deleted by entry `sequence`, which is safe. Nothing is forgotten if it was declared anew since."""
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
