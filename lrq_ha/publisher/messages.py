"""The publisher's messages on the wire, and the checks of the caller's arguments: pure. The names are those of lrq.proto."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.errors import InvalidArgument, MessageTooLarge
from lrq_ha.routing import names
from lrq_ha.routing.chain import check_shares

VHOST: Final = "lrq"
ID_HEADER: Final = "x-lrq-id"
ID_SEPARATOR: Final = "/"
LOG_PRODUCER_SUFFIX: Final = ".lrq"

PRODUCER_CHARACTERS_MAX: Final = 64
SHORT_STRING_BYTES_MAX: Final = 255
SHORT_STRING_RULE: Final = f"It must be a str of at most {SHORT_STRING_BYTES_MAX} bytes in UTF-8, without lone surrogates"
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024

_PRODUCER = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.\-]{{0,{PRODUCER_CHARACTERS_MAX - 1}}}")
_NAME_RULE = f"1 to {names.NAME_CHARS_MAX} of A-Z a-z 0-9 . - beginning with a letter or digit"

Addressed = tuple[bytes, Sequence[str]]
"""A payload and the remote_ids of its destination sites."""


def checked_client_name(name: object) -> str:
    if not isinstance(name, str) or not names.is_name(name):
        raise InvalidArgument(f"client_name is {name!r:.80}", todo=f"It must be {_NAME_RULE}")
    return name


def checked_producer(name: object) -> str:
    """A producer name; a name with the suffix that this library adds for vhost lrq would share IDs with a derived name."""
    rule = f"It must be 1 to {PRODUCER_CHARACTERS_MAX} of A-Z a-z 0-9 _ . - beginning with a letter or digit"
    if not isinstance(name, str) or not _PRODUCER.fullmatch(name):
        raise InvalidArgument(f"producer is {name!r:.80}", todo=rule)
    if name.endswith(LOG_PRODUCER_SUFFIX):
        raise InvalidArgument(f"producer is {name!r}", todo=f"Names ending in {LOG_PRODUCER_SUFFIX} are taken for log entries")
    return name


def checked_short_string(what: str, value: object) -> str:
    """An AMQP short string: at most 255 bytes of UTF-8."""
    with suppress(UnicodeEncodeError):
        if isinstance(value, str) and len(value.encode()) <= SHORT_STRING_BYTES_MAX:
            return value
    raise InvalidArgument(f"{what} is {value!r:.80}", todo=SHORT_STRING_RULE)


def checked_reason(reason: object) -> str:
    """The words of a full sync's request."""
    if isinstance(reason, str) and len(reason) <= names.REASON_CHARS_MAX:
        return reason
    raise InvalidArgument(f"reason is {reason!r:.80}", todo=f"It must be a str of at most {names.REASON_CHARS_MAX} characters")


def checked_bytes(what: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)  # a copy: the caller may change it while it waits in the window
    raise InvalidArgument(f"{what} is a {type(value).__name__}", todo="It must be bytes; encode text yourself")


def checked_size(what: str, size_bytes: int, bytes_max: int) -> None:
    if size_bytes > bytes_max:
        raise MessageTooLarge(f"{what} has {size_bytes} bytes, the limit is {bytes_max}", todo="Split it into several messages")


def checked_shares(entries: LogEntries) -> None:
    """Each destination gets its share in one message, in which a payload stands as often as entries name it."""
    try:
        check_shares([([len(payload) for payload, _ in run], to) for to, run in groupby(entries.entries, itemgetter(1))])
    except MalformedInput as error:
        raise MessageTooLarge(error.what, todo=error.todo) from None


def checked_destinations(destinations: object) -> tuple[str, ...]:
    """Destinations without repeats, in their order. A bare str is refused: it would be taken for a list of one-letter sites."""
    todo = f"It must be a non-empty list of remote_ids of sites, each {_NAME_RULE}"
    if isinstance(destinations, str | bytes) or not isinstance(destinations, Iterable):
        raise InvalidArgument(f"destinations is {destinations!r:.80}", todo=todo)
    found = tuple(dict.fromkeys(destinations))
    if not found or not all(isinstance(each, str) and names.is_name(each) for each in found):
        raise InvalidArgument(f"destinations is {found!r:.80}", todo=todo)
    return found


@dataclass(frozen=True, slots=True)
class LogEntries:
    """The content of one Transaction: payloads with their destinations, and the full sync that they belong to, if any."""

    entries: tuple[tuple[bytes, tuple[str, ...]], ...]
    type: pb.ReplicationType = pb.LOG_ENTRY_SYNC
    request_id: str = ""
    path: tuple[str, ...] = ()

    @classmethod
    def checked(cls, entries: Iterable[Addressed], path: Sequence[str] = ()) -> LogEntries:
        """From a caller's arguments; InvalidArgument if a payload is not bytes, a destination or a name in `path` is none, or there is no entry."""
        found = tuple((checked_bytes("payload", payload), checked_destinations(to)) for payload, to in entries)
        if not found:
            raise InvalidArgument("The transaction has no entries")
        return cls(found, path=checked_destinations(path) if path else ())

    def to_bytes(self, client_name: str, replication_id: str, timestamp_us: int) -> bytes:
        """The Transaction's bytes: equal payloads stand in it once, and equal destinations of entries behind each other."""
        index: dict[bytes, int] = {}
        table: list[pb.RoutingTableEntryMsg] = []
        for to, run in groupby(self.entries, itemgetter(1)):
            expected = -1
            for payload, _ in run:
                number = index.setdefault(payload, len(index))
                if number == expected:
                    table[-1].more += 1
                else:
                    table.append(pb.RoutingTableEntryMsg(destinations=to, payload=number))
                expected = number + 1
        return pb.Transaction(
            client_name=client_name,
            replication_id=replication_id,
            timestamp_us=timestamp_us,
            type=self.type,
            request_id=self.request_id,
            payloads=list(index),
            entries=table,
            path=self.path,
        ).SerializeToString()


def client_status(client_name: str, full_sync_provider: bool) -> bytes:
    """The announcement of a client: whether it can supply full syncs."""
    value = pb.ClientStatus(client_name=client_name, full_sync_provider=full_sync_provider)
    return pb.Status(key=names.client_key(client_name), client=value).SerializeToString()


def full_sync_status(client_name: str, destination: str, request_id: str, reason: str, state: pb.FullSyncRequest.State) -> bytes:
    """The end of a full sync."""
    value = pb.FullSyncRequest(client_name=client_name, destination=destination, request_id=request_id, reason=reason, state=state)
    return pb.Status(key=names.full_sync_key(client_name, destination), full_sync=value).SerializeToString()
