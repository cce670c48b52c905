"""The names of the routing queues, and their parts.

Rules:

- Client names and remote ids hold no underscore, so `LRQ_Recv_<client_name>_<remote_id>` parses in one way only and the
  prefix `LRQ_Recv_<client_name>_` finds the queues of that client and no other's.
- A producer name holds no slash, so `<producer>/<sequence>` parses in one way only.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lrq_ha.errors import MalformedInput

SEND_LOG_ENTRIES = "LRQ_Send_LogEntries"
SEND_SNAP_SYNC = "LRQ_Send_SnapSync"
STATUS = "LRQ_Status"
RECV_PREFIX = "LRQ_Recv_"
PRODUCER_PREFIX = "LRQ_Producer_"
ASCENDING = "ascending"  # value of the client property lrq_ids

NAME_CHARS_MAX = 64
PRODUCER_CHARS_MAX = 128
NUMBERS_MAX = 1_000  # that are asked for at once
REASON_CHARS_MAX = 250  # of a demand

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-]{0,%d}" % (NAME_CHARS_MAX - 1))
_PRODUCER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@\-]{0,%d}" % (PRODUCER_CHARS_MAX - 1))
_NUMBERS = re.compile(r"(.+)/(\d{1,19})-(\d{1,19})")
NAME_RULE = "1 to %d letters, digits, dots or hyphens, a letter or digit first" % NAME_CHARS_MAX
_PRODUCER_RULE = "1 to %d of letters, digits and ._:@-, a letter or digit first" % PRODUCER_CHARS_MAX


class RecvQueue(NamedTuple):
    """The parts of a receive queue's name."""

    client_name: str
    remote_id: str


def is_name(text: str) -> bool:
    """Whether `text` may be a client name or a remote id."""
    return _NAME.fullmatch(text) is not None


def is_producer(text: str) -> bool:
    return _PRODUCER.fullmatch(text) is not None


def check_client_name(text: str) -> str:
    """`text` itself. Raises MalformedInput if it cannot be a client name."""
    return _checked(text, is_name(text), "client name", NAME_RULE)


def check_remote_id(text: str) -> str:
    """`text` itself. Raises MalformedInput if it cannot be a remote id."""
    return _checked(text, is_name(text), "remote id", NAME_RULE)


def check_producer(text: str) -> str:
    """`text` itself. Raises MalformedInput if it cannot be a producer name."""
    return _checked(text, is_producer(text), "producer name", _PRODUCER_RULE)


def recv_queue(client_name: str, remote_id: str) -> str:
    """The receive queue at the sink for the transactions of `client_name` at the source `remote_id`."""
    return f"{RECV_PREFIX}{check_client_name(client_name)}_{check_remote_id(remote_id)}"


def parse_recv_queue(queue: str) -> RecvQueue | None:
    """The parts of a receive queue's name; None if it is no such name."""
    if not queue.startswith(RECV_PREFIX):
        return None
    parts = queue.removeprefix(RECV_PREFIX).split("_")
    return RecvQueue(*parts) if len(parts) == 2 and all(map(is_name, parts)) else None


def receivers_question(client_name: str) -> str:
    """The name that a receiver gets from (basic.get) to learn its client's receive queues: the body is a ReceiveQueues."""
    return RECEIVERS_QUESTION + check_client_name(client_name)


def position_question(receiver: str, queue: str) -> str:
    """The name that a receiver gets from (basic.get) to learn its position in a receive queue: the body is a Commit."""
    return f"{POSITION_QUESTION}{check_producer(receiver)}/{queue}"


def client_key(client_name: str) -> str:
    """Key of a client's status in LRQ_Status."""
    return f"client/{check_client_name(client_name)}"


def full_sync_key(client_name: str, destination: str) -> str:
    """Key of the last full sync request in LRQ_Status. Not checked: a request has both names as they are in the log."""
    return f"fullsync/{client_name}/{destination}"


def producer_queue(producer: str) -> str:
    """The name that a producer declares passively to learn its last sequence."""
    return f"{PRODUCER_PREFIX}{check_producer(producer)}"


def last_sequence(message_count: int, consumer_count: int) -> int:
    """The door's answer to such a declaration: the last sequence, in the two counts of declare-ok (low and high 32 bits)."""
    return message_count | consumer_count << 32


def parse_producer_queue(queue: str) -> str | None:
    """The producer that asks; None if the text is no such name."""
    producer = queue.removeprefix(PRODUCER_PREFIX)
    return producer if producer != queue and is_producer(producer) else None


def numbers_queue(producer: str, first: int, last: int) -> str:
    """The name that a producer declares passively to learn how many of its numbers first .. last the log has: the message count of declare-ok."""
    return f"{producer_queue(producer)}/{first}-{last}"


def parse_numbers_queue(queue: str) -> tuple[str, int, int] | None:
    """Producer, first and last number; None if the text is no such name."""
    found = _NUMBERS.fullmatch(queue)
    if found is None or (producer := parse_producer_queue(found[1])) is None:
        return None
    first, last = int(found[2]), int(found[3])
    return (producer, first, last) if 0 <= last - first < NUMBERS_MAX else None


def _checked(text: str, valid: bool, what: str, rule: str) -> str:
    if not valid:
        raise MalformedInput(f"{text!r} is no {what}", todo=f"Use {rule}.")
    return text


ROUTING_VHOST = "lrq"
LOG_PREFIX = "LRQ_HA_"
DEMAND = "LRQ_Demand"
COMMIT = "LRQ_Commit"
TAKEN_OVER = "another process has taken over receiver"  # begins the refusal of a commit
SINK_QUESTION = "LRQ_Sink_"
DEMANDS_QUESTION = "LRQ_Demands"
RECEIVERS_QUESTION = "LRQ_Ask_queues/"
POSITION_QUESTION = "LRQ_Ask_position/"


def is_routing(vhost: str) -> bool:
    return vhost == ROUTING_VHOST
