"""The events of an interceptor: one immutable type per point. docs/interceptors.md gives the moment of each.

Rules: events come in the order in which they happened on a connection; no change to an event affects the message. Names that are
not UTF-8 hold surrogate escapes. Times are seconds since 1970, UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from pamqp import commands, decode
from pamqp.header import ContentHeader

from lrq_ha.replication.positions import Position


class Point(Enum):
    """The intercept points; each value is the name of an interceptor's method (Qpid: BrokerObserver, QueueObserver, MessageInterceptor)."""

    ROUTING = "routing"
    ENQUEUE = "enqueue"
    ROUTED = "routed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACCEPT = "accept"
    REJECT = "reject"
    REJECTED = "rejected"
    DEQUEUE = "dequeue"
    CONSUME = "consume"
    CANCEL = "cancel"
    TOPOLOGY = "topology"
    TRANSACTION = "transaction"


class Client(NamedTuple):
    """A connection.

    Args:
        user: The user that logged in.
        vhost: The vhost of the connection.
        address: host:port of the other end of its socket.
        producer: The name in its client property lrq_producer; empty if none.
        number: Counts the connections of this sidecar process.
    """

    user: str
    vhost: str
    address: str
    producer: str
    number: int


class Message(NamedTuple):
    """A message without its body.

    Args:
        exchange: The exchange of its publish.
        routing_key: The routing key of its publish.
        replication_id: `<producer>/<number>`, if it has one that counts; else empty.
        position: Its place in the log; None if it has none (yet).
        size_bytes: Length of its body.
        header: Its properties and headers in wire form: the payload of an AMQP content header.
    """

    exchange: str
    routing_key: str
    replication_id: str
    position: Position | None
    size_bytes: int
    header: bytes

    @property
    def properties(self) -> dict[str, Any]:
        """Properties by name (`content_header` among them), decoded with each call; empty if they cannot be decoded. Raises nothing."""
        try:
            content = ContentHeader()
            content.unmarshal(self.header)
            found = content.properties
            return {name: value for name in found.__slots__ if (value := getattr(found, name)) is not None and name != "cluster_id"}  # a relic
        except Exception:  # a client may send anything, and must not be able to get an interceptor switched off
            return {}


class Routing(NamedTuple):
    """`routing`: a publish has arrived, and is not processed yet. `body`: to interceptors that refuse only; else None."""

    time: float
    client: Client
    channel: int
    message: Message
    body: bytes | None


class Enqueue(NamedTuple):
    """`enqueue`: a publish has its place in the log (`message.position`), or goes to the broker past the log (None there).

    `queue`: its target queue, if that is plain: the default exchange's routing key. Else empty: only the broker knows.
    """

    time: float
    client: Client
    channel: int
    message: Message
    queue: str


class Outcome(Enum):
    """The outcomes of a publish."""

    ACCEPTED = "it is in the queues that it was routed to; or, in vhost lrq, in the log for other sites, and safe"
    UNROUTABLE = "it was mandatory and there is no queue for it: it went back to the publisher"
    REPEAT = "its replication ID was in the log already: nothing was done"
    REFUSED = "the door or an interceptor refused it, before the log"
    NACKED = "the broker refused it, as a full queue does"
    UNANSWERED = "its channel or this node's part ended before the broker's answer: whether it is done, the log says"
    PASSED = "it is not replicated: it went to the broker, whose answer is not followed"
    UNFOLLOWED = "it is in the log; too many publishes were under way to follow this one any further"


class Routed(NamedTuple):
    """`routed`: the final outcome of a publish. `reason`: of a refusal, for people."""

    time: float
    client: Client
    channel: int
    message: Message
    queue: str
    outcome: Outcome
    reason: str


class Delivery(NamedTuple):
    """A delivery to a client. `consumer_tag`: empty for basic.get."""

    client: Client
    channel: int
    message: Message
    queue: str
    consumer_tag: str
    delivery_tag: int
    redelivered: bool


class Acquire(NamedTuple):
    """`acquire`: a message is delivered to a client."""

    time: float
    delivery: Delivery


class Cause(Enum):
    """Why a message was released, or a consumer cancelled."""

    CLIENT = "the client said so"
    RECOVER = "basic.recover"
    BROKER = "the broker said so: the queue is gone"
    CHANNEL = "the channel ended"
    CONNECTION = "the connection ended"


class Release(NamedTuple):
    """`release`: a message goes back to its queue."""

    time: float
    delivery: Delivery
    cause: Cause


class Accept(NamedTuple):
    """`accept`: a client acked a message. `automatic`: it consumes without acks."""

    time: float
    delivery: Delivery
    automatic: bool


class Reject(NamedTuple):
    """`reject`: a client rejected a message for good."""

    time: float
    delivery: Delivery


class Rejected(NamedTuple):
    """`rejected`: the rejection is safe in the log, and the broker has been told; a dead-letter exchange may have the message next."""

    time: float
    delivery: Delivery


class Dequeue(NamedTuple):
    """`dequeue`: the message's removal from its queue is safe in the log: after `accept`, and after `rejected`."""

    time: float
    delivery: Delivery


class Consume(NamedTuple):
    """`consume`: a consumer has begun."""

    time: float
    client: Client
    channel: int
    queue: str
    consumer_tag: str
    no_ack: bool


class Cancel(NamedTuple):
    """`cancel`: a consumer has ended."""

    time: float
    client: Client
    channel: int
    queue: str
    consumer_tag: str
    cause: Cause


class Topology(NamedTuple):
    """`topology`: the broker has done a declaration, deletion, binding or purge.

    Args:
        operation: As `queue.declare`.
        method: The method's arguments in wire form, after class and method number.
        replicated: It is an entry of the log. Else it is the node's own, or the log holds an equal entry already.
    """

    time: float
    client: Client
    channel: int
    operation: str
    method: bytes
    replicated: bool

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The method's arguments by name, decoded with each call; empty if they cannot be decoded. Raises nothing."""
        try:
            kind = commands.INDEX_MAPPING[decode.long_uint(self.method)[1]]
            found: Any = kind()
            found.unmarshal(self.method[4:])
            return {name: getattr(found, name) for name in found.__slots__}
        except Exception:  # as for properties
            return {}


class Step(Enum):
    """The steps of a transaction."""

    SELECT = "the channel is transactional from now on"
    COMMIT = "the client commits: what follows is carried out, in one batch of the log"
    COMMITTED = "all of it is done"
    ROLLED_BACK = "nothing of it is done"


class Transaction(NamedTuple):
    """`transaction`: tx.select, tx.commit, tx.commit-ok, tx.rollback-ok of a channel."""

    time: float
    client: Client
    channel: int
    step: Step


Event = (
    Routing | Enqueue | Routed | Acquire | Release | Accept | Reject | Rejected | Dequeue | Consume | Cancel | Topology | Transaction
)


class Interceptor:
    """The methods of an interceptor, all optional. A class need not inherit from this one: having the methods is enough.

    A method that is not overridden costs nothing. `routing` returns the reason of a refusal, or None to accept the publish. Its result counts only
    if the attribute `refuses` is true, and then it is called on the door's own thread, before any other step of the publish: it must be
    quick and wait for nothing. Every other method is called on a thread of the interceptor's own, one event after the other.

    The constructor gets the options of the configuration as keyword arguments. It checks them (TypeError, ValueError or LrqError names the
    fault) and does nothing else: it is called by `lrq-ha sidecar --check`, too.
    """

    refuses: bool = False
    priority: int = 100

    def start(self) -> None:
        """Opens the interceptor's resources. Called once, before the door listens. An exception ends the sidecar's start."""

    def routing(self, event: Routing) -> str | None:
        """See Routing."""
        return None

    def enqueue(self, event: Enqueue) -> None:
        """See Enqueue."""

    def routed(self, event: Routed) -> None:
        """See Routed."""

    def acquire(self, event: Acquire) -> None:
        """See Acquire."""

    def release(self, event: Release) -> None:
        """See Release."""

    def accept(self, event: Accept) -> None:
        """See Accept."""

    def reject(self, event: Reject) -> None:
        """See Reject."""

    def rejected(self, event: Rejected) -> None:
        """See Rejected."""

    def dequeue(self, event: Dequeue) -> None:
        """See Dequeue."""

    def consume(self, event: Consume) -> None:
        """See Consume."""

    def cancel(self, event: Cancel) -> None:
        """See Cancel."""

    def topology(self, event: Topology) -> None:
        """See Topology."""

    def transaction(self, event: Transaction) -> None:
        """See Transaction."""

    def flush(self) -> None:
        """No event waits for now: buffered output should be written."""

    def reload(self) -> None:
        """The sidecar got SIGHUP: files should be opened again."""

    def close(self) -> None:
        """The sidecar ends, or has switched this interceptor off: no event follows."""
