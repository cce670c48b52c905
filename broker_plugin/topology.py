"""Declarations, deletions, bindings and purges: which are replicated, and in what form they enter the log.

Rules: the tables below are the whole dispatch. What is this node's own (queues that are server-named, exclusive or auto-delete, and `amq.*`) is
passed on and not replicated, as are passive declarations. An entry holds the method as the client sent it, to the octet, but for its names and
arguments resolved (the last declared queue, the queue's type), and without `if_unused` and `if_empty`: whether they held was decided on the
primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import endpoints, frames
from .channels import Channel, QueueKey
from .frames import (
    EXCHANGE_BIND,
    EXCHANGE_DECLARE,
    EXCHANGE_DELETE,
    EXCHANGE_UNBIND,
    QUEUE_BIND,
    QUEUE_DECLARE,
    QUEUE_DELETE,
    QUEUE_PURGE,
    QUEUE_UNBIND,
)
from .headers import field

if TYPE_CHECKING:
    from .relay import Relay

DELETES = frozenset({EXCHANGE_DELETE, EXCHANGE_UNBIND, QUEUE_DELETE, QUEUE_UNBIND})
_CLASSIC = field(b"x-queue-type", b"classic")
_DECLARED = 0b1110  # neither passive nor no-wait
_LAYOUT = {  # names at the beginning; of the flags behind them, no-wait, and those that stand in the log
    EXCHANGE_BIND: (3, 1, 0),
    EXCHANGE_DECLARE: (2, 16, _DECLARED),
    EXCHANGE_DELETE: (1, 2, 0),
    EXCHANGE_UNBIND: (3, 1, 0),
    QUEUE_BIND: (3, 1, 0),
    QUEUE_DECLARE: (1, 16, _DECLARED),
    QUEUE_DELETE: (1, 4, 0),
    QUEUE_PURGE: (1, 1, 0),
    QUEUE_UNBIND: (3, 0, 0),
}
RANDOM_EXCHANGES = frozenset({"x-random", "x-consistent-hash", "x-modulus-hash", "x-recent-history"})
REJECT_PUBLISH_DLX = "reject-publish-dlx"


@dataclass(frozen=True)
class PassOn:
    """Not replicated, or replicated already. `queue`: what it declares; `local`: that is this node's own from then on; `known`: it is in the log."""

    queue: str = ""
    local: QueueKey | None = None
    known: QueueKey | None = None


@dataclass(frozen=True)
class Answer:
    """The door answers by itself: a declare-ok with this queue name, and a number in its two counts (low and high 32 bits)."""

    queue: str
    number: int = 0


@dataclass(frozen=True)
class Refuse:
    """The channel is closed with this error."""

    code: int
    text: str


@dataclass(frozen=True)
class Replicate:
    """To the broker between two barriers, then into the log.

    `asked`: what the broker is asked; `before`, if any, and `entry`: what stands in the log.
    """

    queue: str = ""
    purge: bool = False
    asked: bytes = b""
    entry: bytes = b""
    before: bytes = b""

    @property
    def entries(self) -> list[bytes]:
        """The methods as they stand in the log."""
        return [self.before, self.entry] if self.before else [self.entry]


def _replicate(relay: Relay, kind: int, payload: bytes, method: Any, queue: str = "") -> Replicate:
    names, nowait, kept = _LAYOUT[kind]
    at = 6
    for _ in range(names):
        at += 1 + payload[at]
    head, flags, tail = payload[:at], payload[at : at + 1], payload[at + 1 :]
    if queue:
        head = b"".join((payload[:6], frames.short_string(queue), payload[7 + payload[6] : at]))
    if kind == QUEUE_DECLARE and "x-queue-type" not in (method.arguments or {}):
        # With a default queue type on the vhost an untyped declaration would differ from node to node.
        tail = b"".join(((len(tail) - 4 + len(_CLASSIC)).to_bytes(4, "big"), tail[4:], _CLASSIC))
    if not nowait:  # queue.unbind has no flags
        whole = head + flags + tail
        return Replicate(queue, asked=whole, entry=whole)
    before = b""
    if kind in (QUEUE_BIND, EXCHANGE_BIND):
        # An auto-delete exchange goes with its last binding; here the last may be that of a queue which the other nodes do not have.
        source = method.exchange if kind == QUEUE_BIND else method.source
        before = relay.replica.auto_delete_exchanges.get((relay.vhost, source), b"")
    asked, entry = flags[0] & ~nowait, flags[0] & kept
    return Replicate(queue, kind == QUEUE_PURGE, b"%b%c%b" % (head, asked, tail), b"%b%c%b" % (head, entry, tail), before)


Action = PassOn | Answer | Refuse | Replicate


def exchange_of(payload: bytes) -> tuple[str, bool]:
    """Name and auto-delete of an exchange.declare; only the name counts of an exchange.delete."""
    end = 7 + payload[6]
    name = payload[7:end].decode("utf-8", "surrogateescape")
    flags = payload[end + 1 + payload[end]] if payload[:4] == EXCHANGE_DECLARE.to_bytes(4, "big") else 0
    return name, bool(flags & 4)


def answered(payload: bytes) -> bytes:
    """A queue.declare without no-wait."""
    at = 7 + payload[6]
    return b"%b%c%b" % (payload[:at], payload[at] & 0b1111, payload[at + 1 :])


def first_name(payload: bytes) -> str:
    """The queue or exchange that a declaration, deletion or binding names first."""
    return payload[7 : 7 + payload[6]].decode("utf-8", "surrogateescape")


@lru_cache(1 << 14)
def queue_arguments(payload: bytes) -> Mapping[str, Any]:
    """The arguments of a queue.declare; none of an empty payload."""
    method: Any = frames.decode_method(payload) if payload else None
    return MappingProxyType(method.arguments if method is not None and method.arguments else {})


def may_vanish(payload: bytes) -> bool:
    """Whether a queue so declared may go by itself while nobody looks: when it expires, or with its broker. Not if nobody knows (empty)."""
    return bool(payload) and ("x-expires" in queue_arguments(payload) or not _durable(payload))


def _durable(payload: bytes) -> bool:
    return bool(payload[7 + payload[6]] & 2)


def classify(relay: Relay, channel: Channel, kind: int, payload: bytes, method: Any) -> Action:
    """What becomes of a declaration. `method` is what `payload` says."""
    if endpoints.is_routing(relay.vhost):
        return _routing(relay, kind, method)
    if kind == QUEUE_DECLARE:
        return _queue_declare(relay, payload, method)
    if kind == EXCHANGE_DECLARE:
        return _exchange_declare(relay, payload, method)
    if kind in (QUEUE_DELETE, QUEUE_PURGE, QUEUE_BIND, QUEUE_UNBIND):
        method.queue = method.queue or channel.last_queue
        if not relay.replica.replicates((relay.vhost, method.queue)):
            return PassOn()
        action = _replicate(relay, kind, payload, method, method.queue)
    else:
        names = [method.source, method.destination] if hasattr(method, "source") else [method.exchange]
        if not all(relay.replica.replicates((relay.vhost, name)) for name in names):
            return PassOn()
        action = _replicate(relay, kind, payload, method)
    return PassOn() if kind not in DELETES and _is_known(relay, action) else action


def _is_known(relay: Relay, action: Replicate) -> bool:
    """Whether the log holds the very same declaration, with no deletion since: applications declare at every start."""
    return not action.purge and (relay.vhost, action.entry) in relay.replica.known_topology


def _queue_declare(relay: Relay, payload: bytes, method: Any) -> Action:
    if method.passive or not method.queue:
        return PassOn(method.queue)
    key = (relay.vhost, method.queue)
    if method.exclusive or method.auto_delete:
        return PassOn(method.queue, local=key)
    # A queue of this node alone may be gone by now; where it is not, the broker refuses this declaration.
    was_local = key in relay.replica.local_queues
    relay.replica.local_queues.discard(key)
    if not relay.replica.replicates(key):
        return PassOn(method.queue)
    if was_local:
        relay.replica.local_queues.add(key)
    if (method.arguments or {}).get("x-overflow") == REJECT_PUBLISH_DLX:
        return Refuse(
            406,
            f"queue '{method.queue}' with x-overflow {REJECT_PUBLISH_DLX} cannot be replicated, as its dead letters are of messages that it has "
            "refused; use reject-publish or drop-head, or give it a name outside the replicated patterns",
        )
    action = _replicate(relay, QUEUE_DECLARE, payload, method, method.queue)
    return PassOn(method.queue, known=key) if _is_known(relay, action) else action


def _exchange_declare(relay: Relay, payload: bytes, method: Any) -> Action:
    if method.passive or not relay.replica.replicates((relay.vhost, method.exchange)):
        return PassOn()
    if method.exchange_type in RANDOM_EXCHANGES:
        return Refuse(
            406,
            f"exchange '{method.exchange}' of type {method.exchange_type} routes differently on every node and cannot be replicated; "
            "give it a name outside the replicated patterns",
        )
    action = _replicate(relay, EXCHANGE_DECLARE, payload, method)
    return PassOn() if _is_known(relay, action) else action


def _routing(relay: Relay, kind: int, method: Any) -> Action:
    """In the vhost of the routing queues clients declare nothing; a passive declaration may be a question (endpoints.py)."""
    if kind == QUEUE_DECLARE and method.passive:
        answer = endpoints.answer(relay, method.queue)
        if answer is not None:
            return Answer(*answer)
        return PassOn(method.queue)
    return Refuse(403, f"vhost '{relay.vhost}' holds routing queues, which only lrq-ha declares")
