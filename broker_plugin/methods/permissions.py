"""Has the client's broker check each publish before it enters the log: a backup applies the log with the sidecar's own rights.

Rules:
- The client's broker checks with the client's own login: it gets the publish without its body, on a channel of the door's own on that connection, in
  a transaction that is rolled back. So the publish has no effect, and a refusal has the broker's own text.
- The broker is asked what it has not allowed this connection before: a publish to an exchange once; where the exchange checks routing keys (topic),
  once with each key; once with each user-id; and any expiration, CC and BCC that is not plainly right. No more frames are taken from the client until
  the broker has answered, so order is kept. An answer to a direct reply-to is shown without its addressee: RabbitMQ 3 delivers answers at once.
- A transaction of the client needs no such question: it has a dry run at the broker (`transactions`).
- Rights are forgotten when the broker refuses this connection something (403), when the client renews its secret, and when the exchange is
  declared or deleted.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

from pamqp import commands

from ..amqp import content_header, direct_reply, encode, frames
from ..amqp.frames import BASIC_PUBLISH, CHANNEL_CLOSE, CHANNEL_CLOSE_OK, HEADER, METHOD, TX_ROLLBACK_OK, FrameError, Item, Route, publish_route
from ..amqp.reply_codes import ACCESS_REFUSED, NOT_IMPLEMENTED
from ..session import decisions
from ..session.channel import ClientChannel
from ..session.rights import Right
from ..session.session import ClientSession
from . import closing, routes

SHOWN_MAX = 256  # publishes that are shown to the broker at once
EXPIRATION_MAX_MS = 0xFFFF_FFFF  # every RabbitMQ accepts that; a higher value is shown to the broker
_NO_TOPICS = frozenset({"", "amq.direct", "amq.fanout", "amq.headers", "amq.match"})


def of_route(session: ClientSession, route: Route) -> Right:
    """The right that every publish on this route needs."""
    return Right(route.exchange, route.routing_key if _judges_keys(session, route.exchange) else "", route.immediate)


def missing(session: ClientSession, method: bytes, header: bytes) -> Right | None:
    """The right that the broker has to be asked for before a publish may enter the log; None: none, or the publish does not enter the log.

    Raises:
        FrameError: The publish is malformed.
    """
    route = publish_route(method)
    decision = routes.decide(session, route)
    if decision not in decisions.IN_LOG and not routes.names_more(decision, header):
        return None
    right = of_route(session, route)
    if content_header.is_judged(header):
        content_header.check_header(header, session.door.config.header_depth_max)
        right = right._replace(properties=_judged(header, _judges_keys(session, route.exchange)))
    return None if right in session.rights else right


def _judges_keys(session: ClientSession, exchange: str) -> bool:
    """Whether topic permissions hold for an exchange; True in doubt."""
    if exchange in _NO_TOPICS:
        return False
    method = session.replica.declared.definitions.exchange(session.vhost, exchange)
    if method is None:
        return True
    at = 7 + method[6]
    return method[at + 1 : at + 1 + method[at]] == b"topic"


def _judged(header: bytes, topic: bool) -> bytes:
    """The properties of a content header (its payload) that the broker may refuse."""
    copies, expiration, user_id = content_header.judged(header)
    if expiration is not None and expiration.isdigit() and int(expiration) <= EXPIRATION_MAX_MS:
        expiration = None
    if not topic and all(content_header.is_array(field) for field in copies):
        copies = []
    return content_header.properties(b"".join(copies), persistent=False, expiration=expiration, user_id=user_id)


# ---- asking ----------------------------------------------------------------------------------------------------------------


class PermissionProbe:
    """Publishes that are shown to the broker, each followed by a rollback, whose answers tell how far the broker got.

    Args:
        channel: The client's channel that waits for the first publish.
        rights: The rights that the publishes need, in order.
        first: Method and content header of the first publish.

    Attributes:
        over: Set when the broker has closed the channel of the question.
    """

    def __init__(self, channel: ClientChannel, rights: list[Right], first: tuple[bytes, bytes]) -> None:
        self.over = asyncio.Event()
        self._channel = channel
        self._rights = rights
        self._first = first
        self._allowed = 0

    def hear(self, session: ClientSession, number: int, data: bytes, item: Item) -> bytes:
        """Handles the broker's answers. The client sees only a refusal of the publish that it waits for."""
        kind = item[0]
        if kind == TX_ROLLBACK_OK:
            session.rights.add(self._rights[self._allowed])
            self._allowed += 1
        elif kind == CHANNEL_CLOSE:
            session.outbox.write(encode.method_frame(number, commands.Channel.CloseOk()))
            if not self._allowed:  # else the refused publish is asked for again when its turn comes
                refused(session, data[item[2] : item[3]])
                self._refused(session, data[item[2] - 7 : item[3] + 1])
        elif kind == CHANNEL_CLOSE_OK:  # the broker answers the door's close in any case
            del session.internal_channels[number]
            session.flow.asks(False)
            self.over.set()
        return b""

    def _refused(self, session: ClientSession, close: bytes) -> None:
        channel = self._channel
        if channel.closing:
            return
        session.door.counters["refused_publishes"] += 1
        if session.watch is not None:
            said: Any = frames.decode_method(close[7:-1])
            session.watch.not_allowed(channel.number, *self._first, said.reply_text)
        closing.refuse_as(session, channel, encode.rechannel(close, channel.number))


def ask(session: ClientSession, data: bytes, items: list[Item], at: int) -> asyncio.Event:
    """Shows the broker the publish items[at], and those behind it on its channel that need a right. Returns an event that is set after its answer.

    The question overtakes frames that wait for the log: none of them changes what the broker checks by.

    Raises:
        FrameError: The publish is malformed.
    """
    session.permission_needed = False
    channel = session.channel(items[at][1])
    shown: dict[Right, bytes] = {}
    for kind, same, start, end, header, header_end, stop in islice(items, at, None):
        if kind != BASIC_PUBLISH or not stop or same != channel.number or len(shown) == SHOWN_MAX:
            break
        method = bytes(data[start:end])
        try:
            right = missing(session, method, data[header:header_end])
        except FrameError:  # reported when its turn comes
            if not shown:
                raise
            break
        if right is not None:
            shown.setdefault(right, direct_reply.answer_to_nobody(method) if direct_reply.is_answer(method) else method)
    _, _, start, end, header, header_end, _ = items[at]
    question = PermissionProbe(channel, list(shown), (bytes(data[start:end]), data[header:header_end]))
    number = session.number_apart()
    if not number:
        text = f"all {session.channels_max} channels of this connection are in use, and its first publish to an exchange takes another"
        closing.refuse(session, channel, NOT_IMPLEMENTED, text, BASIC_PUBLISH)
        question.over.set()
        return question.over
    session.internal_channels[number] = question.hear
    session.flow.asks(True)
    parts = [encode.method_frame(number, commands.Channel.Open()), encode.method_frame(number, commands.Tx.Select())]
    rollback = encode.method_frame(number, commands.Tx.Rollback())
    for right, method in shown.items():
        parts += (encode.frame(METHOD, number, method), encode.frame(HEADER, number, content_header.header_payload(0, right.properties)), rollback)
    parts.append(encode.method_frame(number, commands.Channel.Close(200, "", 0, 0)))
    session.outbox.write(b"".join(parts))
    return question.over


def refused(session: ClientSession, close: bytes) -> None:
    """The broker has closed a channel of the client's, or that of a question; `close`: the method's payload."""
    if int.from_bytes(close[4:6], "big") == ACCESS_REFUSED:
        session.forget_permissions()
