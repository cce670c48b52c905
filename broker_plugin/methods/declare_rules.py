"""Declarations, deletions, bindings and purges: which are replicated, and in what form they enter the log.

Rules:
- The tables below are the whole dispatch.
- Node-local queues (server-named, exclusive or auto-delete) are passed on and not replicated. Passive declarations and those of the exchanges that
  every broker has (`amq.*`) are passed on too, but bindings to these exchanges are replicated.
- The level of any other queue decides what of it is replicated (`replication/levels.py`). The first declaration settles the level, and its entry
  names it. The declaration of a queue with the level `none` by its argument is in the log, too, as the only record of it, and no other node
  carries it out. A queue with that level by its name is unknown to the log.
- An auto-delete queue that is to be replicated is not auto-delete at the brokers, where it would go with its clients' connections, or when a
  sweeper looks into it: the LengthReconciler deletes it.
- A name is taken as RabbitMQ transforms it (`as_named`).
- An entry holds the method as the client sent it, to the octet, except that names and arguments are resolved (the last declared queue, the queue's
  type and level), and `if_unused` and `if_empty` are left out: the primary has decided whether they held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lrq_ha.replication import levels
from lrq_ha.replication.levels import Level
from lrq_ha.replication.queues import QueueKey
from lrq_ha.routing import names as routing_names

from ..amqp import declarations, encode, frames
from ..amqp.content_header import field
from ..amqp.declarations import AUTO_DELETE, AUTO_DELETE_FIELD, AUTO_DELETE_FLAG, CLASSIC, DELETES, LAYOUT, REJECT_PUBLISH_DLX
from ..amqp.frames import (
    EXCHANGE_BIND,
    EXCHANGE_DECLARE,
    QUEUE_BIND,
    QUEUE_DECLARE,
    QUEUE_DELETE,
    QUEUE_PURGE,
    QUEUE_UNBIND,
)
from ..amqp.reply_codes import ACCESS_REFUSED, PRECONDITION_FAILED
from ..log.definitions import ALONE
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from . import routing_queues

_AT_RANDOM = "routes differently on every node"
NOT_REPLICATED = {  # types of exchanges, and the reason
    **dict.fromkeys(("x-random", "x-local-random", "x-consistent-hash", "x-modulus-hash", "x-recent-history"), _AT_RANDOM),
    "x-delayed-message": "keeps messages in no queue until their time has come, where no tool shows them",
}
REPEATED_EXCHANGES_MAX = 256  # that one binding may repeat


@dataclass(frozen=True)
class PassOn:
    """Not replicated, or replicated already.

    `queue`: the queue that it declares; `local`: the queue, if it is this node's own from then on; `known`: the queue, if it is in the log; `asked`:
    the broker's version of the payload; `waited_for`: later frames may concern the queue, and wait until the broker has confirmed or named it.
    """

    queue: str = ""
    local: QueueKey | None = None
    known: QueueKey | None = None
    asked: bytes = b""
    waited_for: bool = False


@dataclass(frozen=True)
class Answer:
    """The door answers by itself: a declare-ok with this queue name, and a number in its two counts (low and high 32 bits)."""

    queue: str
    number: int = 0


@dataclass(frozen=True)
class FindOut:
    """The vhost's default type of queue must be found out; then the declaration is handled again."""


@dataclass(frozen=True)
class Refuse:
    """The channel is closed with this error."""

    code: int
    text: str


@dataclass(frozen=True)
class Replicate:
    """To the broker between two barriers, then into the log.

    `asked`: the broker's version; `before`, if any, and `entry`: the log's methods; `level`: of the queue that `entry` is about;
    `may_have_gone`: the exchange may have gone by itself, and with it bindings to it that the log has.
    """

    queue: str = ""
    purge: bool = False
    asked: bytes = b""
    entry: bytes = b""
    before: tuple[bytes, ...] = ()
    level: Level = Level.ALL
    may_have_gone: bool = False

    @property
    def entries(self) -> list[tuple[bytes, Level]]:
        """The methods as they stand in the log, each with the level of its queue."""
        return [*((method, Level.ALL) for method in self.before), (self.entry, self.level)]


def _replicate(
    session: ClientSession, kind: int, payload: bytes, queue: str = "", level: Level = Level.ALL, *, resolved: bytes = b"", without: int = 0
) -> Replicate:
    """`resolved`: arguments to add; `without`: flags to remove."""
    names, nowait, kept = LAYOUT[kind]
    at = frames.behind_names(payload, names)
    head, flags, tail = payload[:at], payload[at : at + 1], payload[at + 1 :]
    if queue:
        name, others = encode.short_string(queue), payload[7 + payload[6] : at]
        if kind in (QUEUE_BIND, QUEUE_UNBIND) and not payload[6] and len(others) == others[0] + 2:
            others = others[:-1] + name  # with neither queue nor key named, the last declared queue stands for both
        head = payload[:6] + name + others
    if resolved:
        tail = b"".join(((len(tail) - 4 + len(resolved)).to_bytes(4, "big"), tail[4:], resolved))
    if not nowait:  # queue.unbind has no flags
        whole = head + flags + tail
        return Replicate(queue, asked=whole, entry=whole, level=level)
    asked, entry = flags[0] & ~nowait & ~without, flags[0] & kept & ~without
    return Replicate(queue, kind == QUEUE_PURGE, b"%b%c%b" % (head, asked, tail), b"%b%c%b" % (head, entry, tail), level=level)


def _binds(session: ClientSession, kind: int, payload: bytes, action: Replicate) -> Action:
    """Adds the declarations and bindings that a binding depends on.

    An auto-delete exchange goes with its last binding, which here may be that of a queue that the other nodes do not have. Its own bindings go with
    it, and are repeated where a deletion has happened since. Their number is limited, as every node carries them out.
    """
    ends = (declarations.source_of(payload), declarations.first_name(payload)) if kind == EXCHANGE_BIND else (declarations.source_of(payload),)
    declared = session.replica.declared
    declares, binds = declared.keeping(session.vhost, ends)
    if len(declares) > REPEATED_EXCHANGES_MAX:
        return Refuse(
            PRECONDITION_FAILED,
            f"PRECONDITION_FAILED - {len(declares)} auto-delete exchanges lead to this binding, and would be declared again on every node with it; "
            f"at most {REPEATED_EXCHANGES_MAX} may: bind fewer, or declare some of them without auto_delete",
        )
    return replace(action, before=(*declares, *(method for method in binds if (session.vhost, method) not in declared.known_topology)))


Action = PassOn | Answer | FindOut | Refuse | Replicate


def classify(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes, method: Any) -> Action:
    """The action for a declaration. `method` is the decoded `payload`."""
    if routing_names.is_routing(session.vhost):
        return _routing(session, kind, method)
    if kind == QUEUE_DECLARE:
        return _queue_declare(session, payload, method)
    if kind == EXCHANGE_DECLARE:
        return _exchange_declare(session, payload, method)
    exchanges = [getattr(method, name) for name in ("exchange", "source", "destination") if hasattr(method, name)]
    if not all(map(session.replica.declared.replicates_exchange, exchanges)):
        return PassOn()
    if kind in (QUEUE_DELETE, QUEUE_PURGE, QUEUE_BIND, QUEUE_UNBIND):
        method.queue = method.queue or channel.last_queue
        key = (session.vhost, method.queue)
        level = session.replica.declared.level(key)
        if not session.replica.declared.knows(key) or (kind == QUEUE_PURGE and level is not Level.ALL):
            return PassOn()
        action = _replicate(session, kind, payload, method.queue, level)
    else:
        action = _replicate(session, kind, payload)
    if kind in DELETES:
        return action
    if _is_known(session, action):
        return PassOn()
    return _binds(session, kind, payload, action) if kind in (QUEUE_BIND, EXCHANGE_BIND) else action


def _is_known(session: ClientSession, action: Replicate) -> bool:
    """Whether the log holds an identical declaration, with no deletion since: applications declare at every start."""
    return not action.purge and (session.vhost, action.entry) in session.replica.declared.known_topology


def _queue_declare(session: ClientSession, payload: bytes, method: Any) -> Action:
    queue, arguments, replica = method.queue, method.arguments or {}, session.replica
    if method.passive:
        return _passive(session, queue)
    if queue.startswith("amq."):
        return PassOn(queue)
    try:
        asked = levels.parse(arguments[levels.ARGUMENT]) if levels.ARGUMENT in arguments else None
    except levels.BadLevel as error:
        return _bad_level(session, queue, error.what)
    wanted = asked not in (None, Level.NONE)
    if wanted and (method.exclusive or not queue):
        kind = "an exclusive" if method.exclusive else "a server-named"
        return _bad_level(session, queue, f"'{arguments[levels.ARGUMENT]}' is not for {kind} queue, which no other node can have; allowed: none")
    if not queue:
        return PassOn(waited_for=True)
    key = (session.vhost, queue)
    known = replica.declared.definitions.queue(key) or b""
    unused = (method.auto_delete and wanted) or AUTO_DELETE in arguments or (method.auto_delete and declarations.goes_unused(known))
    if method.exclusive or (method.auto_delete and not unused):
        return PassOn(queue, local=key, waited_for=True)
    if known and (refusal := _otherwise(session, queue, known, asked, unused)):
        return refusal
    # A node-local queue may be gone by now; if it is not, the broker refuses this declaration.
    was_local = key in replica.declared.local_queues
    replica.declared.local_queues.discard(key)
    level = asked or replica.declared.level(key)
    if level is Level.NONE and asked is None and not known:
        return PassOn(queue)
    if was_local:
        replica.declared.local_queues.add(key)
    if level is not Level.NONE and arguments.get("x-overflow") == REJECT_PUBLISH_DLX:
        return Refuse(
            PRECONDITION_FAILED,
            f"queue '{queue}' with x-overflow {REJECT_PUBLISH_DLX} cannot be replicated, as its dead letters are of messages that it has "
            f"refused; use reject-publish or drop-head, or {levels.ARGUMENT} = none",
        )
    resolved = b""
    if "x-queue-type" not in arguments:  # the type would differ between nodes whose vhosts have other defaults; defaults hold for durable queues
        logged = str(declarations.queue_arguments(known).get("x-queue-type", "")).encode()
        queue_type = logged or session.door.default_types.of(session.vhost) if method.durable and not unused else CLASSIC
        if queue_type is None:
            return FindOut()
        resolved += field(b"x-queue-type", queue_type)
    if asked is None and level is not Level.ALL:
        resolved += field(levels.ARGUMENT.encode(), level.value.encode())
    if unused and AUTO_DELETE not in arguments:
        resolved += AUTO_DELETE_FIELD
    action = _replicate(session, QUEUE_DECLARE, payload, queue, level, resolved=resolved, without=AUTO_DELETE_FLAG)
    return PassOn(queue, known=key, asked=action.asked) if _is_known(session, action) else action


def _bad_level(session: ClientSession, queue: str, text: str) -> Refuse:
    text = f"PRECONDITION_FAILED - invalid arg '{levels.ARGUMENT}' for queue '{queue}' in vhost '{session.vhost}': {text}"
    return Refuse(PRECONDITION_FAILED, text)


def _otherwise(session: ClientSession, queue: str, known: bytes, asked: Level | None, unused: bool) -> Refuse | None:
    """Refuses a declaration that differs from the log's in a property that only the door knows; with the broker's text for such a case."""
    current = declarations.level_of(known)
    told = ""
    if asked not in (None, current):
        told = f"'{levels.ARGUMENT}' for queue '{queue}' in vhost '{session.vhost}': received '{asked.value}' but current is '{current.value}'"
    elif unused is not declarations.goes_unused(known):
        flags = [str(flag).lower() for flag in (unused, not unused)]
        told = f"'auto_delete' for queue '{queue}' in vhost '{session.vhost}': received '{flags[0]}' but current is '{flags[1]}'"
    return Refuse(PRECONDITION_FAILED, f"PRECONDITION_FAILED - inequivalent arg {told}") if told else None


def _exchange_declare(session: ClientSession, payload: bytes, method: Any) -> Action:
    if method.exchange.startswith(ALONE) and not method.passive:
        return Refuse(ACCESS_REFUSED, f"ACCESS_REFUSED - exchanges whose names begin with '{ALONE}' are each node's own")
    if method.passive or method.exchange.startswith("amq.") or not session.replica.declared.replicates_exchange(method.exchange):
        return PassOn()
    if why := NOT_REPLICATED.get(method.exchange_type):
        return Refuse(
            PRECONDITION_FAILED,
            f"exchange '{method.exchange}' of type {method.exchange_type} {why}, and cannot be replicated; "
            "give it a name for which replication.replicate says none",
        )
    action = _replicate(session, EXCHANGE_DECLARE, payload)
    if method.auto_delete and session.replica.declared.definitions.bound_to_exchange(session.vhost, method.exchange):
        return replace(action, may_have_gone=True)
    return PassOn() if _is_known(session, action) else action


def _routing(session: ClientSession, kind: int, method: Any) -> Action:
    """In the vhost of the routing queues clients declare nothing."""
    if kind == QUEUE_DECLARE and method.passive:
        return _passive(session, method.queue)
    return Refuse(ACCESS_REFUSED, f"vhost '{session.vhost}' holds routing queues, which only lrq-ha declares")


def _passive(session: ClientSession, queue: str) -> Action:
    """Handles a passive declaration of a queue, which may be a question."""
    answer = routing_queues.answer(session, queue)
    return PassOn(queue) if answer is None else Answer(*answer)
