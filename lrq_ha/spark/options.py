"""The options of a read, as one checked value. `sink_options` has those of a write.

Rules: names are those of Spark's Kafka source for equal options, case does not matter; an unknown option or a bad value is refused with
the allowed values; no option has two spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lrq_ha.replication.positions import Position
from lrq_ha.routing.names import RECV_PREFIX, ROUTING_VHOST, parse_recv_queue
from lrq_ha.spark.access import ALLOWED as ACCESS_ALLOWED
from lrq_ha.spark.access import Access, checked_addresses, parse_access, words
from lrq_ha.spark.errors import OptionError

ALLOWED = {
    **ACCESS_ALLOWED,
    "subscribe": "receive queues, comma separated: LRQ_Recv_<client_name>_<remote_id>,…",
    "subscribePattern": "a regular expression that the whole queue name must match; needs option `http`",
    "http": "HTTP addresses of the sidecars, comma separated: http://HOST:PORT,…",
    "startingOffsets": '"earliest", for streaming also "latest", or JSON {queue: the least source sequence to read} for every queue; -2 means '
    'earliest; for streaming also -1, latest, and {"epoch": E, "sequence": N}, the last position not to read',
    "endingOffsets": '"latest", or JSON {queue: the source sequence before which to stop} for every queue; -1 means latest',
    "startingTimestamp": "a whole number >= 1, ms since 1970, in place of startingOffsets: the read begins with the first transaction whose column "
    "timestamp is not before",
    "startingOffsetsByTimestampStrategy": '"error" or "latest": the begin in a queue whose last transaction is before startingTimestamp',
    "endingTimestamp": "for batch reads: a whole number >= 1, ms since 1970, in place of endingOffsets: the read ends before the first transaction "
    "whose column timestamp is not before",
    "minPartitions": "a whole number >= 1",
    "maxEntriesPerPartition": "a whole number >= 1: rows of a partition, about; partitions are added until none has more",
    "maxEntriesPerTrigger": "a whole number >= 1: rows of a micro-batch (for streaming; a batch read takes all)",
    "queueDiscoveryInterval": "a whole number of seconds >= 1 between two looks for queues of subscribePattern (for streaming)",
    "columns": "names of the columns wanted, comma separated, in their order",
    "failOnDataLoss": "true or false",
    "includeChain": "true or false: adds the columns request_id and restart",
}
#: The values that options have if they are left out, of those that have such a value.
DEFAULTS = {
    "startingOffsets": "earliest",
    "endingOffsets": "latest",
    "startingOffsetsByTimestampStrategy": "error",
    "minPartitions": "1",
    "queueDiscoveryInterval": "30",
    "failOnDataLoss": "true",
    "includeChain": "false",
}
#: The columns of a read without option `columns`, in their order.
_PLAIN = ("queue", "source", "client_name", "type", "epoch", "sequence", "transaction", "index", "replication_id", "timestamp", "payload")
_CHAIN = ("request_id", "restart")  # with `includeChain`
COLUMNS = (*_PLAIN, *_CHAIN)
DISCOVERY_INTERVAL_S = 30
_HTTP = r"https?://[^/?#@]+/?"
#: Names of other sources' options, and ours for the purpose.
COUNTERPARTS = {
    "kafka.bootstrap.servers": "nodes",
    "maxOffsetsPerTrigger": "maxEntriesPerTrigger",
    "topic": "subscribe",
    "assign": "subscribe",
    "includeHeaders": "includeChain",
}
EARLIEST = -2
LATEST = -1


class Moment(NamedTuple):
    """A place in a queue by time.

    Attributes:
        ms: Time since 1970 in ms: of the first transaction whose timestamp is not before.
        or_latest: Whether a queue without such a transaction is read from its end on; else that is an error.
    """

    ms: int
    or_latest: bool = False


Bound = int | Position | Moment  # a sequence, EARLIEST, LATEST, the position before the first transaction, or a time
Bounds = Mapping[str, Bound] | int | Moment  # per queue; or EARLIEST, LATEST or a time for every queue


@dataclass(frozen=True)
class ReadOptions:
    """What to read and how.

    Attributes:
        access: The way to the nodes.
        subscribe: Queues to read, without repeats; empty if `pattern` is set.
        pattern: Regular expression for whole queue names; None if `subscribe` is set.
        http: Sidecars to ask for the list of queues.
        starting: Where to begin: a bound per queue, EARLIEST, LATEST or a time.
        ending: Source sequence per queue before which to stop, LATEST or a time.
        max_entries: Rows of a micro-batch; None: no limit.
        discovery_interval_s: Seconds between two looks for queues that match `pattern`.
        columns: Names of the columns wanted; empty: all.
        min_partitions: Partitions wanted; there is at least one for each queue with something to read.
        max_entries_per_partition: Rows of a partition, about; None: no limit.
        fail_on_data_loss: Whether a retention gap is an error.
        include_chain: Whether the columns `request_id` and `restart` are wanted.
    """

    access: Access
    subscribe: tuple[str, ...]
    pattern: str | None
    http: tuple[str, ...]
    starting: Bounds
    ending: Bounds
    max_entries: int | None
    discovery_interval_s: int
    columns: tuple[str, ...]
    min_partitions: int
    max_entries_per_partition: int | None
    fail_on_data_loss: bool
    include_chain: bool

    @property
    def wanted_columns(self) -> tuple[str, ...]:
        """The names of the columns of each row, in their order."""
        return self.columns or (COLUMNS if self.include_chain else _PLAIN)


def parse_options(given: Mapping[str, str]) -> ReadOptions:
    """Checks the user's options. Raises OptionError."""
    values = known_options(given, ALLOWED, COUNTERPARTS)
    text = values.get
    access = parse_access(values, ROUTING_VHOST)
    subscribe, pattern = words(text("subscribe")), text("subscribePattern")
    http = checked_addresses("http", ALLOWED["http"], text("http"), _HTTP)
    if bool(subscribe) == (pattern is not None):
        raise OptionError(
            "Exactly one of the options subscribe and subscribePattern is needed",
            todo=f"subscribe: {ALLOWED['subscribe']}; subscribePattern: {ALLOWED['subscribePattern']}",
        )
    for queue in subscribe:
        if parse_recv_queue(queue) is None:
            raise _bad("subscribe", queue)
    if pattern is not None:
        _check_pattern(pattern, http)
    or_latest = _or_latest(text("startingOffsetsByTimestampStrategy"))
    starting = _moment(values, "startingTimestamp", "startingOffsets", or_latest) or _starting(text("startingOffsets"))
    ending = _moment(values, "endingTimestamp", "endingOffsets") or _ending(text("endingOffsets"))
    for name, bounds in (("startingOffsets", starting), ("endingOffsets", ending)):
        if subscribe and not isinstance(bounds, int | Moment) and set(bounds) != set(subscribe):
            raise OptionError(f"{name} names {sorted(bounds)}, subscribe names {sorted(subscribe)}", todo=f"Allowed: {ALLOWED[name]}")
    columns = words(text("columns"))
    for column in columns:
        if column not in COLUMNS:
            raise OptionError(f"columns names {column!r}, which is no column of format lrq", todo=f"Allowed: {', '.join(COLUMNS)}")
    return ReadOptions(
        access=access,
        subscribe=subscribe,
        pattern=pattern,
        http=http,
        starting=starting,
        ending=ending,
        max_entries=parse_number(ALLOWED, "maxEntriesPerTrigger", text("maxEntriesPerTrigger")),
        discovery_interval_s=parse_number(ALLOWED, "queueDiscoveryInterval", text("queueDiscoveryInterval")) or DISCOVERY_INTERVAL_S,
        columns=columns,
        min_partitions=parse_number(ALLOWED, "minPartitions", text("minPartitions")) or 1,
        max_entries_per_partition=parse_number(ALLOWED, "maxEntriesPerPartition", text("maxEntriesPerPartition")),
        fail_on_data_loss=_flag("failOnDataLoss", text("failOnDataLoss"), True),
        include_chain=_flag("includeChain", text("includeChain"), False),
    )


def known_options(given: Mapping[str, str], allowed: Mapping[str, str], counterparts: Mapping[str, str]) -> dict[str, str]:
    """The given options by their names as they stand in `allowed`, which says what each may be.

    Args:
        counterparts: Names of other sources' options, and ours for the purpose.

    Raises:
        OptionError: There is no such option.
    """
    known, others = ({name.lower(): name for name in names} for names in (allowed, counterparts))
    for key in map(str.lower, given):
        if key in others:
            name = counterparts[others[key]]
            raise OptionError(f"Unknown option {others[key]} of format lrq", todo=f"The option for it is {name}: {allowed[name]}")
        if key not in known:
            raise OptionError(f"Unknown option {key!r} of format lrq", todo=f"Allowed: {', '.join(allowed)}")
    return {known[key.lower()]: value for key, value in given.items()}


def matching(pattern: str, queues: list[str]) -> tuple[str, ...]:
    """The receive queues among `queues` whose whole name matches, in order of name."""
    return tuple(sorted({name for name in queues if name.startswith(RECV_PREFIX) and re.fullmatch(pattern, name)}))


def _check_pattern(pattern: str, http: tuple[str, ...]) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"subscribePattern = {pattern!r} is no regular expression: {error}") from error
    if not http:
        raise OptionError(
            "subscribePattern needs option http, because AMQP cannot list queues",
            todo=f"http: {ALLOWED['http']}; or name the queues with subscribe",
        )


def _moment(values: Mapping[str, str], name: str, offsets: str, or_latest: bool = False) -> Moment | None:
    ms = parse_number(ALLOWED, name, values.get(name), digits_max=13)
    if ms is None:
        return None
    if offsets in values:
        raise OptionError(f"Options {name} and {offsets} are given", todo="Leave out one of the two")
    return Moment(ms, or_latest)


def _or_latest(strategy: str | None) -> bool:
    word = "error" if strategy is None else strategy.strip().lower()
    if word not in ("error", "latest"):
        raise _bad("startingOffsetsByTimestampStrategy", strategy or "")
    return word == "latest"


def _starting(value: str | None) -> Bounds:
    if value is None or (word := value.strip().lower()) == "earliest":
        return EARLIEST
    if word == "latest":
        return LATEST
    return {queue: _start("startingOffsets", value, bound) for queue, bound in _object("startingOffsets", value).items()}


def _start(name: str, value: str, bound: object) -> Bound:
    if isinstance(bound, dict) and set(bound) == {"epoch", "sequence"} and all(type(n) is int and n >= 0 for n in bound.values()):
        return Position(bound["epoch"], bound["sequence"])
    if type(bound) is not int or bound < EARLIEST:
        raise _bad(name, value)
    return bound


def _ending(value: str | None) -> Bounds:
    if value is None or value.strip().lower() == "latest":
        return LATEST
    bounds = _object("endingOffsets", value)
    if not all(type(bound) is int and bound >= LATEST for bound in bounds.values()):
        raise _bad("endingOffsets", value)
    return bounds


def _object(name: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError:
        raise _bad(name, value) from None
    if not isinstance(parsed, dict):
        raise _bad(name, value)
    return parsed


def parse_number(allowed: Mapping[str, str], name: str, value: str | None, digits_max: int = 9) -> int | None:
    """A whole number >= 1, or None if the option is missing. Raises OptionError with the allowed values."""
    if value is None:
        return None
    if not re.fullmatch(rf"0*[1-9][0-9]{{0,{digits_max - 1}}}", value.strip(), re.ASCII):
        raise OptionError(f"{name} = {value!r} is not allowed", todo=f"Allowed: {allowed[name]}")
    return int(value)


def _flag(name: str, value: str | None, default: bool) -> bool:
    if value is None:
        return default
    if value.strip().lower() not in ("true", "false"):
        raise _bad(name, value)
    return value.strip().lower() == "true"


def _bad(name: str, value: str) -> OptionError:
    return OptionError(f"{name} = {value!r} is not allowed", todo=f"Allowed: {ALLOWED[name]}")
