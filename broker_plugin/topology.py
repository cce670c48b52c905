"""Declarations, deletions, bindings and purges: which are replicated, and in what form they enter the log.

Rules: the tables below are the whole dispatch. What is this node's own (queues that are server-named, exclusive or auto-delete) is passed on and
not replicated, as are passive declarations, and those of the exchanges that every broker has (`amq.*`), whose bindings are replicated all the same.
What of other queues is replicated says their level (`replication/levels.py`): it is settled by the first declaration, whose entry names it. What is
declared of a queue with the level `none` by its argument is in the log, too, as nothing else remembers it, and carried out by no other node; of what
has that level by its name, the log knows nothing. An auto-delete queue that is to be replicated is none to the brokers, where it would go with its
clients' connections, or when a sweeper looks into it: the census deletes it. A name is what RabbitMQ makes of it (`as_named`).

An entry holds the method as the client sent it, to the octet, but for its names and arguments resolved (the last declared queue, the queue's type
and level), and without `if_unused` and `if_empty`: whether they held was decided on the primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lrq_ha.replication import levels
from lrq_ha.replication.levels import Level

from . import building, endpoints, frames
from .channels import Channel, QueueKey
from .definitions import is_durable
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
from .parking import ALONE

if TYPE_CHECKING:
    from .relay import Relay

DELETES = frozenset({EXCHANGE_DELETE, EXCHANGE_UNBIND, QUEUE_DELETE, QUEUE_UNBIND})
CLASSIC = b"classic"
AUTO_DELETE = "x-lrq-auto-delete"  # of a replicated queue that goes with its last consumer
_AUTO_DELETE = field(AUTO_DELETE.encode(), b"true")
_AUTO_DELETE_FLAG = 8
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
_NAMED = {  # names of queues and exchanges at the beginning
    EXCHANGE_BIND: 2,
    EXCHANGE_DECLARE: 1,
    EXCHANGE_DELETE: 1,
    EXCHANGE_UNBIND: 2,
    QUEUE_BIND: 2,
    QUEUE_DECLARE: 1,
    QUEUE_DELETE: 1,
    QUEUE_PURGE: 0,
    QUEUE_UNBIND: 2,
}
_SHORTENED = frozenset({QUEUE_BIND, QUEUE_DELETE, QUEUE_UNBIND})  # where no name stands for the last declared queue
_AT_RANDOM = "routes differently on every node"
NOT_REPLICATED = {  # types of exchanges, and why
    **dict.fromkeys(("x-random", "x-local-random", "x-consistent-hash", "x-modulus-hash", "x-recent-history"), _AT_RANDOM),
    "x-delayed-message": "keeps messages in no queue until their time has come, where nobody sees them",
}
REJECT_PUBLISH_DLX = "reject-publish-dlx"
REPEATED_EXCHANGES_MAX = 256  # with one binding


@dataclass(frozen=True)
class PassOn:
    """Not replicated, or replicated already.

    `queue`: what it declares; `local`: that is this node's own from then on; `known`: it is in the log; `asked`: what the broker is asked then;
    `waited_for`: what else the client sends may concern it, and is taken when the broker has said that it is there, or how it is called.
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
    """What type of queue the vhost has by default; then it is looked at again."""


@dataclass(frozen=True)
class Refuse:
    """The channel is closed with this error."""

    code: int
    text: str


@dataclass(frozen=True)
class Replicate:
    """To the broker between two barriers, then into the log.

    `asked`: what the broker is asked; `before`, if any, and `entry`: what stands in the log; `level`: of the queue that `entry` is about;
    `may_have_gone`: what is declared again may have gone by itself, and with it bindings to it that the log has.
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
        """The methods as they stand in the log, and of what level the queue is that each is about."""
        return [*((method, Level.ALL) for method in self.before), (self.entry, self.level)]


def _replicate(
    relay: Relay, kind: int, payload: bytes, queue: str = "", level: Level = Level.ALL, *, resolved: bytes = b"", without: int = 0
) -> Replicate:
    """`resolved`: arguments that are added; `without`: flags that go."""
    names, nowait, kept = _LAYOUT[kind]
    at = frames.behind_names(payload, names)
    head, flags, tail = payload[:at], payload[at : at + 1], payload[at + 1 :]
    if queue:
        name, others = building.short_string(queue), payload[7 + payload[6] : at]
        if kind in (QUEUE_BIND, QUEUE_UNBIND) and not payload[6] and len(others) == others[0] + 2:
            others = others[:-1] + name  # where neither queue nor key is named, the last declared queue stands for both
        head = payload[:6] + name + others
    if resolved:
        tail = b"".join(((len(tail) - 4 + len(resolved)).to_bytes(4, "big"), tail[4:], resolved))
    if not nowait:  # queue.unbind has no flags
        whole = head + flags + tail
        return Replicate(queue, asked=whole, entry=whole, level=level)
    asked, entry = flags[0] & ~nowait & ~without, flags[0] & kept & ~without
    return Replicate(queue, kind == QUEUE_PURGE, b"%b%c%b" % (head, asked, tail), b"%b%c%b" % (head, entry, tail), level=level)


def _binds(relay: Relay, kind: int, payload: bytes, action: Replicate) -> Action:
    """With what must be there before it is bound.

    An auto-delete exchange goes with its last binding; here the last may be that of a queue which the other nodes do not have. It takes with it what
    it is bound to, which is repeated where something was deleted since. How much that may be is limited, as every node carries it out.
    """
    ends = (source_of(payload), first_name(payload)) if kind == EXCHANGE_BIND else (source_of(payload),)
    declared = relay.replica.declared
    declares, binds = declared.keeping(relay.vhost, ends)
    if len(declares) > REPEATED_EXCHANGES_MAX:
        return Refuse(
            406,
            f"PRECONDITION_FAILED - {len(declares)} auto-delete exchanges lead to this binding, and would be declared again on every node with it; "
            f"at most {REPEATED_EXCHANGES_MAX} may: bind fewer, or declare some of them without auto_delete",
        )
    return replace(action, before=(*declares, *(method for method in binds if (relay.vhost, method) not in declared.known_topology)))


Action = PassOn | Answer | FindOut | Refuse | Replicate


def check_depth(arguments: Any, depth_max: int) -> None:
    """What one node has decoded, each must be able to decode, wherever it does: how deep that goes depends on what has been called before.

    Raises:
        FrameError: The arguments of a declaration are nested deeper than that.
    """
    layer = [arguments]
    for _ in range(depth_max + 1):
        inner = (value for outer in layer if outer for value in (outer.values() if isinstance(outer, dict) else outer))
        layer = [value for value in inner if isinstance(value, dict | list)]
        if not layer:
            return
    raise frames.FrameError(f"arguments nested deeper than {depth_max}: door.header_depth_max")


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


def as_named(kind: int, payload: bytes) -> bytes:
    """A declaration, deletion or binding as RabbitMQ understands it: without CR and LF in the names of queues and exchanges (measured, 3.10 and 4.3).

    It leaves those of basic.publish, basic.consume, basic.get and queue.purge as they are. A queue's name that is nothing else is none to it, and not
    the last declared one; but a queue that is declared so is one that the broker names.
    """
    if b"\n" not in payload and b"\r" not in payload:
        return payload
    at, names = 6, []
    for _ in range(_NAMED[kind]):
        end = at + 1 + int.from_bytes(payload[at : at + 1])
        if end > len(payload):
            return payload  # it is malformed, and whoever decodes it says so
        name = payload[at + 1 : end]
        kept = name.translate(None, b"\r\n")
        if not kept and kind in _SHORTENED:
            kept = name
        names.append(b"%c%b" % (len(kept), kept))
        at = end
    return b"%b%b%b" % (payload[:6], b"".join(names), payload[at:])


def deletion(kind: int, name: str) -> bytes:
    """The queue.delete or exchange.delete of what has this name, without conditions."""
    return b"%b\0\0%b\0" % (kind.to_bytes(4, "big"), building.short_string(name))


def source_of(payload: bytes) -> str:
    """The exchange that a binding comes from."""
    at = 7 + payload[6]
    return payload[at + 1 : at + 1 + payload[at]].decode("utf-8", "surrogateescape")


@lru_cache(1 << 14)
def queue_arguments(payload: bytes) -> Mapping[str, Any]:
    """The arguments of a queue.declare; none of an empty payload."""
    method: Any = frames.decode_method(payload) if payload else None
    return MappingProxyType(method.arguments if method is not None and method.arguments else {})


def has_argument(payload: bytes, argument: str) -> bool:
    """Whether a queue.declare has it. Of a hundred thousand queues, those that cannot have it are not decoded."""
    return argument.encode() in payload and argument in queue_arguments(payload)


def level_of(payload: bytes) -> Level:
    """The level of a queue, by a queue.declare of the log."""
    return levels.parse(queue_arguments(payload)[levels.ARGUMENT]) if has_argument(payload, levels.ARGUMENT) else Level.ALL


def goes_unused(payload: bytes) -> bool:
    """Whether a queue so declared goes with its last consumer, and it is the census that deletes it. Not if nobody knows (empty)."""
    return has_argument(payload, AUTO_DELETE)


def is_stream(payload: bytes) -> bool:
    """Whether a queue so declared is a stream. Not if nobody knows (empty)."""
    return has_argument(payload, "x-queue-type") and queue_arguments(payload)["x-queue-type"] == "stream"


def may_dead_letter(payload: bytes) -> bool:
    """Whether a queue so declared may dead-letter, as far as its arguments say (a policy is not seen). It may if nobody knows (empty)."""
    return not payload or has_argument(payload, "x-dead-letter-exchange")


def may_vanish(payload: bytes) -> bool:
    """Whether a queue so declared may go by itself while nobody looks: when it expires, or with its broker. Not if nobody knows (empty)."""
    return bool(payload) and (has_argument(payload, "x-expires") or not is_durable(payload))


def classify(relay: Relay, channel: Channel, kind: int, payload: bytes, method: Any) -> Action:
    """What becomes of a declaration. `method` is what `payload` says."""
    if endpoints.is_routing(relay.vhost):
        return _routing(relay, kind, method)
    if kind == QUEUE_DECLARE:
        return _queue_declare(relay, payload, method)
    if kind == EXCHANGE_DECLARE:
        return _exchange_declare(relay, payload, method)
    exchanges = [getattr(method, name) for name in ("exchange", "source", "destination") if hasattr(method, name)]
    if not all(map(relay.replica.declared.replicates_exchange, exchanges)):
        return PassOn()
    if kind in (QUEUE_DELETE, QUEUE_PURGE, QUEUE_BIND, QUEUE_UNBIND):
        method.queue = method.queue or channel.last_queue
        key = (relay.vhost, method.queue)
        level = relay.replica.declared.level(key)
        if not relay.replica.declared.knows(key) or (kind == QUEUE_PURGE and level is not Level.ALL):
            return PassOn()
        action = _replicate(relay, kind, payload, method.queue, level)
    else:
        action = _replicate(relay, kind, payload)
    if kind in DELETES:
        return action
    if _is_known(relay, action):
        return PassOn()
    return _binds(relay, kind, payload, action) if kind in (QUEUE_BIND, EXCHANGE_BIND) else action


def _is_known(relay: Relay, action: Replicate) -> bool:
    """Whether the log holds the very same declaration, with no deletion since: applications declare at every start."""
    return not action.purge and (relay.vhost, action.entry) in relay.replica.declared.known_topology


def _queue_declare(relay: Relay, payload: bytes, method: Any) -> Action:
    queue, arguments, replica = method.queue, method.arguments or {}, relay.replica
    if method.passive:
        return _passive(relay, queue)
    if queue.startswith("amq."):
        return PassOn(queue)
    try:
        asked = levels.parse(arguments[levels.ARGUMENT]) if levels.ARGUMENT in arguments else None
    except levels.BadLevel as error:
        return _bad_level(relay, queue, error.what)
    wanted = asked not in (None, Level.NONE)
    if wanted and (method.exclusive or not queue):
        kind = "an exclusive" if method.exclusive else "a server-named"
        return _bad_level(relay, queue, f"'{arguments[levels.ARGUMENT]}' is not for {kind} queue, which no other node can have; allowed: none")
    if not queue:
        return PassOn(waited_for=True)
    key = (relay.vhost, queue)
    known = replica.declared.definitions.queue(key) or b""
    unused = (method.auto_delete and wanted) or AUTO_DELETE in arguments or (method.auto_delete and goes_unused(known))
    if method.exclusive or (method.auto_delete and not unused):
        return PassOn(queue, local=key, waited_for=True)
    if known and (refusal := _otherwise(relay, queue, known, asked, unused)):
        return refusal
    # A queue of this node alone may be gone by now; where it is not, the broker refuses this declaration.
    was_local = key in replica.declared.local_queues
    replica.declared.local_queues.discard(key)
    level = asked or replica.declared.level(key)
    if level is Level.NONE and asked is None and not known:
        return PassOn(queue)
    if was_local:
        replica.declared.local_queues.add(key)
    if level is not Level.NONE and arguments.get("x-overflow") == REJECT_PUBLISH_DLX:
        return Refuse(
            406,
            f"queue '{queue}' with x-overflow {REJECT_PUBLISH_DLX} cannot be replicated, as its dead letters are of messages that it has "
            f"refused; use reject-publish or drop-head, or {levels.ARGUMENT} = none",
        )
    resolved = b""
    if "x-queue-type" not in arguments:  # it would differ from node to node, where vhosts have other defaults; they hold for what lasts
        logged = str(queue_arguments(known).get("x-queue-type", "")).encode()
        queue_type = relay.door.default_types.of(relay.vhost, logged) if method.durable and not unused else CLASSIC
        if queue_type is None:
            return FindOut()
        resolved += field(b"x-queue-type", queue_type)
    if asked is None and level is not Level.ALL:
        resolved += field(levels.ARGUMENT.encode(), level.value.encode())
    if unused and AUTO_DELETE not in arguments:
        resolved += _AUTO_DELETE
    action = _replicate(relay, QUEUE_DECLARE, payload, queue, level, resolved=resolved, without=_AUTO_DELETE_FLAG)
    return PassOn(queue, known=key, asked=action.asked) if _is_known(relay, action) else action


def _bad_level(relay: Relay, queue: str, text: str) -> Refuse:
    return Refuse(406, f"PRECONDITION_FAILED - invalid arg '{levels.ARGUMENT}' for queue '{queue}' in vhost '{relay.vhost}': {text}")


def _otherwise(relay: Relay, queue: str, known: bytes, asked: Level | None, unused: bool) -> Refuse | None:
    """The refusal of a declaration that differs, in what only the door knows, from the one that the log has; in the broker's words for the like."""
    current = level_of(known)
    told = ""
    if asked not in (None, current):
        told = f"'{levels.ARGUMENT}' for queue '{queue}' in vhost '{relay.vhost}': received '{asked.value}' but current is '{current.value}'"
    elif unused is not goes_unused(known):
        flags = [str(flag).lower() for flag in (unused, not unused)]
        told = f"'auto_delete' for queue '{queue}' in vhost '{relay.vhost}': received '{flags[0]}' but current is '{flags[1]}'"
    return Refuse(406, f"PRECONDITION_FAILED - inequivalent arg {told}") if told else None


def _exchange_declare(relay: Relay, payload: bytes, method: Any) -> Action:
    if method.exchange.startswith(ALONE) and not method.passive:
        return Refuse(403, f"ACCESS_REFUSED - exchanges whose names begin with '{ALONE}' are each node's own")
    if method.passive or method.exchange.startswith("amq.") or not relay.replica.declared.replicates_exchange(method.exchange):
        return PassOn()
    if why := NOT_REPLICATED.get(method.exchange_type):
        return Refuse(
            406,
            f"exchange '{method.exchange}' of type {method.exchange_type} {why}, and cannot be replicated; "
            "give it a name for which replication.replicate says none",
        )
    action = _replicate(relay, EXCHANGE_DECLARE, payload)
    if method.auto_delete and relay.replica.declared.definitions.bound_to_exchange(relay.vhost, method.exchange):
        return replace(action, may_have_gone=True)
    return PassOn() if _is_known(relay, action) else action


def _routing(relay: Relay, kind: int, method: Any) -> Action:
    """In the vhost of the routing queues clients declare nothing."""
    if kind == QUEUE_DECLARE and method.passive:
        return _passive(relay, method.queue)
    return Refuse(403, f"vhost '{relay.vhost}' holds routing queues, which only lrq-ha declares")


def _passive(relay: Relay, queue: str) -> Action:
    """A passive declaration of a queue may be a question."""
    answer = endpoints.answer(relay, queue)
    return PassOn(queue) if answer is None else Answer(*answer)
