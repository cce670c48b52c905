"""Declarations, deletions, bindings and purges: which are replicated, and in what form they enter the log.

Rules: the tables below are the whole dispatch. What is this node's own (server-named, exclusive, auto-delete, `amq.*`) is passed on and not
replicated, as are passive declarations. An entry holds the method with its arguments resolved (the queue's type), and without
`if_unused` and `if_empty`: whether they held was decided on the primary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pamqp import commands

from . import endpoints, frames
from .channels import Channel, QueueKey
from .frames import (
    EXCHANGE_BIND,
    EXCHANGE_BIND_OK,
    EXCHANGE_DECLARE,
    EXCHANGE_DECLARE_OK,
    EXCHANGE_DELETE,
    EXCHANGE_DELETE_OK,
    EXCHANGE_UNBIND,
    EXCHANGE_UNBIND_OK,
    QUEUE_BIND,
    QUEUE_BIND_OK,
    QUEUE_DECLARE,
    QUEUE_DELETE,
    QUEUE_DELETE_OK,
    QUEUE_PURGE,
    QUEUE_PURGE_OK,
    QUEUE_UNBIND,
    QUEUE_UNBIND_OK,
)

if TYPE_CHECKING:
    from .relay import Relay

METHODS = frozenset(
    {EXCHANGE_BIND, EXCHANGE_DECLARE, EXCHANGE_DELETE, EXCHANGE_UNBIND, QUEUE_BIND, QUEUE_DECLARE, QUEUE_DELETE, QUEUE_PURGE, QUEUE_UNBIND}
)
DELETES = frozenset({EXCHANGE_DELETE, EXCHANGE_UNBIND, QUEUE_DELETE, QUEUE_UNBIND})
REPLIES = frozenset(
    {EXCHANGE_BIND_OK, EXCHANGE_DECLARE_OK, EXCHANGE_DELETE_OK, EXCHANGE_UNBIND_OK, QUEUE_BIND_OK, QUEUE_DELETE_OK, QUEUE_PURGE_OK, QUEUE_UNBIND_OK}
)
RANDOM_EXCHANGES = frozenset({"x-random", "x-consistent-hash", "x-modulus-hash", "x-recent-history"})


@dataclass(frozen=True)
class PassOn:
    """Not replicated, or replicated already. `queue`: what it declares; `local`: that is this node's own from then on."""

    queue: str = ""
    local: QueueKey | None = None


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
    """To the broker between two barriers, then into the log."""

    queue: str = ""
    purge: bool = False

    def payload(self, method: Any) -> bytes:
        """The method as it stands in the log."""
        for flag in ("if_unused", "if_empty", "nowait"):
            if hasattr(method, flag):
                setattr(method, flag, False)
        if isinstance(method, commands.Queue.Declare):
            method.arguments = {"x-queue-type": "classic", **(method.arguments or {})}
        return bytes(frames.method_frame(0, method)[7:-1])


Action = PassOn | Answer | Refuse | Replicate


def classify(relay: Relay, channel: Channel, kind: int, method: Any) -> Action:
    """What becomes of a declaration."""
    if endpoints.is_routing(relay.vhost):
        return _routing(relay, kind, method)
    if kind == QUEUE_DECLARE:
        return _queue_declare(relay, channel, method)
    if kind == EXCHANGE_DECLARE:
        return _exchange_declare(relay, method)
    if kind in (QUEUE_DELETE, QUEUE_PURGE, QUEUE_BIND, QUEUE_UNBIND):
        method.queue = method.queue or channel.last_queue
        if not relay.replica.replicates((relay.vhost, method.queue)):
            return PassOn()
        action = Replicate(method.queue, purge=kind == QUEUE_PURGE)
    else:
        names = [method.source, method.destination] if hasattr(method, "source") else [method.exchange]
        if not all(relay.replica.replicates((relay.vhost, name)) for name in names):
            return PassOn()
        action = Replicate()
    return PassOn() if kind not in DELETES and _is_known(relay, action, method) else action


def _is_known(relay: Relay, action: Replicate, method: Any) -> bool:
    """Whether the log holds the very same declaration, with no deletion since: applications declare at every start."""
    if action.purge:
        return False
    nowait = getattr(method, "nowait", False)
    known = (relay.vhost, action.payload(method)) in relay.replica.known_topology
    if nowait:
        method.nowait = True
    return known


def _queue_declare(relay: Relay, channel: Channel, method: Any) -> Action:
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
    action = Replicate(method.queue)
    # With a default queue type on the vhost an untyped declaration would differ from node to node.
    if "x-queue-type" not in (method.arguments or {}):
        method.arguments = {"x-queue-type": "classic", **(method.arguments or {})}
    return PassOn(method.queue) if _is_known(relay, action, method) else action


def _exchange_declare(relay: Relay, method: Any) -> Action:
    if method.passive or method.auto_delete or not relay.replica.replicates((relay.vhost, method.exchange)):
        return PassOn()
    if method.exchange_type in RANDOM_EXCHANGES:
        return Refuse(
            406,
            f"exchange '{method.exchange}' of type {method.exchange_type} routes differently on every node and cannot be replicated; "
            "give it a name outside the replicated patterns",
        )
    action = Replicate()
    return PassOn() if _is_known(relay, action, method) else action


def _routing(relay: Relay, kind: int, method: Any) -> Action:
    """In the vhost of the routing queues clients declare nothing; a passive declaration may be a question (endpoints.py)."""
    if kind == QUEUE_DECLARE and method.passive:
        answer = endpoints.answer(relay, method.queue)
        if answer is not None:
            return Answer(*answer)
        return PassOn(method.queue)
    return Refuse(403, f"vhost '{relay.vhost}' holds routing queues, which only lrq-ha declares")
