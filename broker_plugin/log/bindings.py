"""Which queues a publish may reach, as far as the log's definitions tell. No I/O.

Rules:
- One queue too many is better than one too few. Every binding counts where the exchange type is unknown, a header
  names further routing keys, or a key is unknown; an alternate exchange always counts.
- Settings by policies, and bindings made around the door, are not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..amqp import declarations, frames
from .definitions import Definitions

_PREDECLARED = {"amq.direct": "direct", "amq.fanout": "fanout", "amq.topic": "topic"}
_BINDS = {frames.QUEUE_BIND: True, frames.EXCHANGE_BIND: False}
KNOWN_MAX = 10_000


class BindingTable:
    """The exchanges and bindings of one vhost, as they are now.

    Args:
        definitions: The declarations of the log.
        vhost: The vhost.
    """

    def __init__(self, definitions: Definitions, vhost: str) -> None:
        self._types = dict(_PREDECLARED)
        self._alternates: dict[str, str] = {}
        self._bindings: defaultdict[str, list[tuple[bool, str, str]]] = defaultdict(list)  # by source: to a queue?, destination, key
        self._keyed: dict[str, defaultdict[str, list[tuple[bool, str, str]]]] = {}  # bindings of direct exchanges, by key
        self._known: dict[tuple[str, str | None], frozenset[str]] = {}
        for of, payload in definitions.rows():
            if of != vhost:
                continue
            kind = frames.method_id(payload)
            if kind == frames.EXCHANGE_DECLARE:
                method: Any = frames.decode_method(payload)
                self._types[method.exchange] = method.exchange_type
                alternate = (method.arguments or {}).get("alternate-exchange")
                if alternate:
                    self._alternates[method.exchange] = alternate
            elif kind in _BINDS:
                destination, source, key = _names(payload)
                self._bindings[source].append((_BINDS[kind], destination, key))

    def queues(self, exchange: str, key: str | None) -> frozenset[str]:
        """The queues that a publish with this routing key may reach; None: any key. The default exchange reaches
        no queue by "any key".
        """
        if not exchange:
            return frozenset(() if key is None else (key,))
        known = self._known.get((exchange, key))
        if known is None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            known = self._known[exchange, key] = self._search(exchange, key)
        return known

    def _search(self, exchange: str, key: str | None) -> frozenset[str]:
        found: set[str] = set()
        seen: set[str] = set()
        left = [exchange]
        while left:
            source = left.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self._alternates:
                left.append(self._alternates[source])
            kind = self._types.get(source, "")
            for to_queue, destination, pattern in self._bound(source, kind, key):
                if key is None or _matches(kind, pattern, key):
                    if to_queue:
                        found.add(destination)
                    else:
                        left.append(destination)
        return frozenset(found)

    def _bound(self, source: str, kind: str, key: str | None) -> Sequence[tuple[bool, str, str]]:
        """The bindings that may match. A direct exchange may have ten thousand, and be asked for each of their keys."""
        bindings = self._bindings.get(source, [])
        if kind != "direct" or key is None:
            return bindings
        keyed = self._keyed.get(source)
        if keyed is None:
            keyed = self._keyed[source] = defaultdict(list)
            for binding in bindings:
                keyed[binding[2]].append(binding)
        return keyed.get(key, ())


_tables: WeakKeyDictionary[Definitions, tuple[int, dict[str, BindingTable]]] = WeakKeyDictionary()


def binding_table(definitions: Definitions, vhost: str) -> BindingTable:
    """The table of a vhost, made at the first call, and again after any declaration."""
    version, known = _tables.get(definitions, (-1, {}))
    if version != definitions.version:
        known = {}
        _tables[definitions] = definitions.version, known
    if vhost not in known:
        known[vhost] = BindingTable(definitions, vhost)
    return known[vhost]


def _names(payload: bytes) -> list[str]:
    """Destination, source and key of a binding."""
    names, at = [], 6
    for _ in range(3):
        end = at + 1 + payload[at]
        names.append(payload[at + 1 : end].decode("utf-8", "surrogateescape"))
        at = end
    return names


def _matches(kind: str, pattern: str, key: str) -> bool:
    if kind == "direct":
        return pattern == key
    if kind == "topic":
        return _topic(pattern.split("."), key.split(".") if key else [""])
    return True


def _topic(pattern: list[str], words: list[str]) -> bool:
    """Whether words match: `*` is one word, `#` any number."""
    at = {0}  # positions in the pattern
    for word in words:
        at = _skip(pattern, at)
        at = {p if pattern[p] == "#" else p + 1 for p in at if p < len(pattern) and pattern[p] in ("#", "*", word)}
    return len(pattern) in _skip(pattern, at)


def _skip(pattern: list[str], at: set[int]) -> set[int]:
    """Adds the positions after `#`, which also stands for no word."""
    found = set(at)
    left = list(at)
    while left:
        p = left.pop()
        if p < len(pattern) and pattern[p] == "#" and p + 1 not in found:
            found.add(p + 1)
            left.append(p + 1)
    return found


def downstream_last(definitions: Definitions, queues: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Orders queues so that each comes before the targets of its dead letters, unless these form a cycle."""
    methods = definitions.queues()
    known = set(queues)
    order: list[tuple[str, str]] = []
    done: set[tuple[str, str]] = set()
    shared: dict[tuple[str, str, str | None], Iterator[tuple[str, str]]] = {}

    def targets(key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """The targets of its dead letters. Of thousands of queues with one shared way, the rest of that way is walked once."""
        arguments = declarations.queue_arguments(methods.get(key, b""))
        if "x-dead-letter-exchange" not in arguments:
            return iter(())
        way = key[0], arguments["x-dead-letter-exchange"], arguments.get("x-dead-letter-routing-key")
        if way not in shared:
            shared[way] = iter(reached_by(*way))
        return shared[way]

    def reached_by(vhost: str, exchange: str, routing_key: str | None) -> list[tuple[str, str]]:
        return sorted((vhost, name) for name in binding_table(definitions, vhost).queues(exchange, routing_key) if (vhost, name) in known)

    for start in queues:
        path = [(start, targets(start))] if start not in done else []
        done.add(start)
        while path:
            key, left = path[-1]
            following = next((target for target in left if target not in done), None)
            if following is None:
                order.append(key)
                path.pop()
            else:
                done.add(following)
                path.append((following, targets(following)))
    return order[::-1]
