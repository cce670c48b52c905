"""Carries out the log's declarations, deletions and purges on the broker of one vhost.

Rules:
- These commands have a channel of their own, so their failures concern no message. Commands for which a broker may
  close the connection have a connection of their own: declarations of exchanges (503 of RabbitMQ before 4 for an
  unknown type, where the primary's broker has a plugin that this one lacks), and of queues that use what RabbitMQ 4
  calls deprecated (541, where its configuration forbids that): those that are not durable, and `DEPRECATED_ARGUMENTS`.
- A declaration that this broker refuses counts as done for now, as a refusal must not end one incarnation after the
  other. The refusal is kept, told as a gap and tried again (`try_again`) while the log declares it. Messages
  published meanwhile to the missing queue or exchange are not here, so the gap stays, with another text.
- Missing rights are different: nothing is passed over for them (`BrokerRefuses`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..amqp import frames
from ..amqp.address import Address
from ..amqp.connection import Channel, Connection
from ..amqp.declarations import DECLARED, LAYOUT, NAMED, is_durable
from ..amqp.errors import BrokerRefuses, ChannelClosed, ConnectionClosed, grant
from ..amqp.reply_codes import COMMAND_INVALID, INTERNAL_ERROR, PRECONDITION_FAILED
from ..log.shortfall import Refusal, Shortfall, reinit

log = logging.getLogger("lrq_ha.applier")
UNKNOWN_TYPE = "exchange type '"  # unknown or invalid: a broker that has heard of the name says the latter
DEPRECATED = "Feature `"  # … is deprecated, or removed
DEPRECATED_ARGUMENTS = (b"\x16x-queue-master-locator",)
TODO = {
    UNKNOWN_TYPE: "enable these plugins on every node's broker",
    DEPRECATED: "permit it on every node's broker (deprecated_features.permit.* in rabbitmq.conf), or declare it without that",
}
LACKS_RIGHTS = "access to "  # of a user's rights; RabbitMQ answers 403 for reserved names and internal exchanges too
PASSED_OVER = frozenset({403, 404, 405, 406})  # a declaration refused with one of these counts as done for now


class Declarer:
    """Declares in one vhost. `connection`: the VhostWriter's, to `address`; `me`: this node's name; `shortfall`:
    where gaps are noted.
    """

    def __init__(self, address: Address, connection: Connection, me: str, shortfall: Shortfall) -> None:
        self._vhost = address.vhost
        self._me = me
        self._shortfall = shortfall
        self._address = address
        self._connection = connection
        self._apart: Channel | None = None
        self._open: Channel | None = None
        self._exchanges: set[str] = set()  # known to exist; any declaration may delete one, for example with its last binding
        self._leading: set[str] = set()  # own exchanges that lead to their queue; these may go in that way too

    async def _channel(self) -> Channel:
        if self._open is None or self._open.error is not None:
            self._open = await self._connection.channel()
        return self._open

    async def _channel_apart(self) -> Channel:
        """A channel on a connection that the broker may close."""
        if self._apart is None or self._apart.error is not None:
            known = self._apart.connection if self._apart is not None and self._apart.connection.error is None else None
            self._apart = await (known or await Connection.open(self._address)).channel()
        return self._apart

    def abort(self) -> None:
        """Closes the separate connection at once, if it is open."""
        if self._apart is not None:
            self._apart.connection.abort()

    async def execute(self, payload: bytes) -> None:
        """Carries out a declaration of the log; one that this broker refuses is noted and passed over.

        Raises:
            BrokerRefuses: The sidecar's user lacks a right.
        """
        refusals = self._shortfall.refusals
        if await self._execute(payload) and not refusals.knows(self._vhost, payload):
            refusals.add(self._vhost, payload, Refusal(self._told(payload)))

    async def try_again(self, declares: Callable[[str, bytes], bool]) -> None:
        """Tries refused declarations again that the log still declares (`declares`), and notes the gaps that
        remain. Raises as `execute`.
        """
        vhost, shortfall = self._vhost, self._shortfall
        for payload, refusal in shortfall.refusals.of(vhost):
            what, text = refusal.what, ""
            if not declares(vhost, payload):
                shortfall.refusals.remove(vhost, payload)
            elif not refusal.late and (said := await self._execute(payload)):
                text = f"{what} is refused here ({said}): {_todo(said)}, then {reinit(self._me)}"
            else:
                shortfall.refusals.add(vhost, payload, Refusal(what, late=True))
                text = f"{what} was missing here, and so may be what was published to it: {reinit(self._me)}"
            if shortfall.note_gap(("declaration", vhost, payload), text) and text:
                log.error("%s", text)

    async def _execute(self, payload: bytes) -> str:
        """The broker's reason to refuse a declaration; empty: carried out."""
        method, _, arguments = unconditional(payload)
        self._exchanges.clear()
        self._leading.clear()
        apart = method == frames.EXCHANGE_DECLARE or (method == frames.QUEUE_DECLARE and _may_be_deprecated(payload))
        try:
            await (await (self._channel_apart() if apart else self._channel()))._call(method, arguments)
        except ChannelClosed as error:
            if LACKS_RIGHTS in error.text:
                raise self._lacks_rights(error) from error
            if error.code not in PASSED_OVER:
                raise
            return " ".join(error.text.split())  # some texts have several lines
        except ConnectionClosed as error:
            if not apart or not _is_refusal(error):
                raise
            return " ".join(error.text.split())  # some texts have several lines
        return ""

    def _told(self, payload: bytes) -> str:
        method, named, _ = unconditional(payload)
        return f"{_WHAT[method]} {' from '.join(map(repr, named[: NAMED[method]]))} in vhost '{self._vhost}'"

    def _lacks_rights(self, error: ChannelClosed) -> BrokerRefuses:
        user = self._address.user
        return BrokerRefuses(f"user '{user}' lacks permissions in vhost '{self._vhost}': {error.text}", todo=grant(self._vhost, user))

    async def purge(self, queue: str) -> None:
        """Empties a queue."""
        try:
            await (await self._channel()).queue_purge(queue)
        except ChannelClosed as error:
            if LACKS_RIGHTS in error.text:
                raise self._lacks_rights(error) from error
            if error.code not in PASSED_OVER:
                raise
            log.warning("queue '%s' in vhost '%s' cannot be purged here as on the primary: %s", queue, self._vhost, error.text)

    async def ready(self, queue: str) -> int:
        """How many messages are ready in a queue; 0 if the queue does not exist."""
        try:
            return (await (await self._channel()).queue_declare(queue, passive=True))[1]
        except ChannelClosed as error:
            if not error.no_such_queue:
                raise
            return 0

    async def lead_to(self, queue: str, exchange: str) -> bool:
        """Declares an exchange of this node's own that leads by any key to this queue alone, if the queue exists.

        False: an exchange of that name exists that is not this node's own.
        """
        if exchange in self._leading:
            return True
        try:
            await (await self._channel()).exchange_declare(exchange, "fanout", durable=False)
        except ChannelClosed as error:
            if error.code != PRECONDITION_FAILED:
                raise
            return False
        try:
            await (await self._channel()).queue_bind(queue, exchange)
        except ChannelClosed as error:
            if not error.no_such_queue:
                raise
        else:
            self._leading.add(exchange)
        return True

    async def remove_exchange(self, exchange: str) -> None:
        """Deletes an exchange of this node's own."""
        self._leading.discard(exchange)
        await (await self._channel()).exchange_delete(exchange)

    async def has_exchange(self, exchange: str) -> bool:
        """Whether the broker has the exchange. The answer is cached: an exchange that vanishes later is not noticed."""
        if exchange not in self._exchanges:
            try:
                await (await self._channel()).exchange_declare(exchange, passive=True)
            except ChannelClosed as error:
                if error.code == 404:
                    return False
                raise
            self._exchanges.add(exchange)
        return True


def _todo(text: str) -> str:
    """The operator's remedy for a refusal."""
    return next((todo for said, todo in TODO.items() if said in text), "let this broker have it as the primary's has it")


def _may_be_deprecated(payload: bytes) -> bool:
    """Whether a broker may close the connection over a queue.declare."""
    return not is_durable(payload) or any(argument in payload for argument in DEPRECATED_ARGUMENTS)


def _is_refusal(error: ConnectionClosed) -> bool:
    """Whether a broker closed the connection over a declaration. (541 may have other causes too.)"""
    return error.code == COMMAND_INVALID or (error.code == INTERNAL_ERROR and DEPRECATED in error.text)


_WHAT = {
    frames.EXCHANGE_DECLARE: "exchange",
    frames.EXCHANGE_DELETE: "the deletion of exchange",
    frames.EXCHANGE_BIND: "the binding of exchange",
    frames.EXCHANGE_UNBIND: "the unbinding of exchange",
    frames.QUEUE_DECLARE: "queue",
    frames.QUEUE_BIND: "the binding of queue",
    frames.QUEUE_DELETE: "the deletion of queue",
    frames.QUEUE_UNBIND: "the unbinding of queue",
}
_NAMES = {method: LAYOUT[method][0] for method in _WHAT}
_DECLARES = (frames.EXCHANGE_DECLARE, frames.QUEUE_DECLARE)


def unconditional(payload: bytes) -> tuple[int, list[str], bytes]:
    """(method, names, arguments) of a declaration, exact to the octet but for its flags: answered, and without
    if_unused and if_empty.

    Raises:
        FrameError: The payload is no declaration, or malformed.
    """
    method = frames.method_id(payload)
    names = []
    at = 6
    try:
        for _ in range(_NAMES[method]):
            end = at + 1 + payload[at]
            names.append(payload[at + 1 : end].decode("utf-8", "replace"))
            at = end
        if method == frames.QUEUE_UNBIND:
            return method, names, payload[4:]
        bits = payload[at] & DECLARED if method in _DECLARES else 0
    except (IndexError, KeyError) as error:
        raise frames.FrameError(f"entry with method {method:#010x} is no declaration that can be carried out") from error
    return method, names, b"%b%c%b" % (payload[4:at], bits, payload[at + 1 :])
