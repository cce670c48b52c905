"""Reads a client's bytes: splits them into frames, and handles each in its turn.

`method_table.FROM_CLIENT` has the handler of each method.

Rules:
- Frames are taken in the order of their arrival. Some operations may not be overtaken (a declaration, another connection's barrier, a queue that is
  being moved, a question to the broker): later frames wait in the backlog meanwhile.
- The beginning of an incomplete frame or content counts as a partial message. Bytes in the backlog that were parsed before also count, as a large
  message may.
- Wrong bytes end the connection, with RabbitMQ's text. A frame on a channel that the client has not opened ends it, too: the broker gets no channel
  that the door does not know, or it would take publishes from it that are in no log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from lrq_ha.errors import LrqError, NotPrimary, place

from ..amqp import content_assembly, encode
from ..amqp.frames import (
    BASIC_ACK,
    BASIC_PUBLISH,
    BODY,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_OPEN,
    CONNECTION_CLASS,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    FrameError,
    Item,
    end_of,
    scan,
)
from ..amqp.reply_codes import CONNECTION_FORCED, INTERNAL_ERROR
from ..methods import acknowledge, closing, permissions
from ..methods.holds import first_that_waits, waits_for
from ..session.session import ClientSession

log = logging.getLogger("lrq_ha.door")


class ClientReader:
    """Reads the client's side of one session.

    Attributes:
        parts: Contents that come in pieces.
        left: The beginning of an incomplete frame or content.
        share: The budget for those, for parsed frames that wait, and for uncommitted transactions.
        stalled: Whether no frame is taken from the client until a pending operation is done.
    """

    __slots__ = ("_backlog", "_deafened", "_put_back", "_session", "left", "parts", "share", "stalled")

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self.share = session.door.unfinished.share(session.user, self.cannot_take)
        self.parts = content_assembly.Assembly(session.door.config.message_bytes_max, self.share)
        self.left = b""
        self.stalled = False
        self._backlog: deque[bytes] = deque()  # bytes that came while the reader was stalled
        self._put_back = 0  # bytes at the beginning of the backlog that count against the share
        self._deafened = False  # later frames are ignored

    def data(self, data: bytes) -> None:
        """Takes bytes from the client."""
        session = self._session
        session.flow.client_heard_at = session.door.now()
        if self._deafened:
            return
        self._backlog.append(data)
        while self._backlog and not self.stalled and session.client is not None:
            if session.replica.barrier.holds_all:
                self.stall()
                session.spawn(self._await_barrier())
                return
            self.share.give(self._put_back)
            self._put_back = 0
            self._take(self._backlog.popleft())

    def _take(self, data: bytes) -> None:
        if self.left:
            data = self.left + data
        wrong: FrameError | None = None
        try:
            try:
                items, used = scan(data, 0, self._session.frame_max_bytes)
            except FrameError as error:  # as by a broker, the frames before it are taken
                (items, used), wrong = error.before, error
            self._keep(data[used:] if used < len(data) else b"")
            self.work(data, items)
            if wrong is not None and not (self.stalled or self._deafened):
                self._keep(b"")
                raise wrong
        except Exception as error:
            self.cannot_take(error)
            return
        self._session.flow.consider_pausing()

    def _keep(self, left: bytes) -> None:
        """Keeps the beginning of an incomplete frame or content, which counts as a partial message. Raises FrameError."""
        more = len(left) - len(self.left)
        if more > 0:
            self.share.take(more)
        elif more:
            self.share.give(-more)
        self.left = left

    def cannot_take(self, error: Exception) -> None:
        """Ends the connection: a frame of the client cannot be handled."""
        session = self._session
        try:
            acknowledge.flush(session)  # earlier acks count
        except NotPrimary as late:
            error = late
        if isinstance(error, NotPrimary):  # this node has just stepped down
            session.close_client(CONNECTION_FORCED, str(error))
        elif isinstance(error, LrqError):
            code, cause = (error.code, error.cause) if isinstance(error, FrameError) else (INTERNAL_ERROR, 0)
            session.door.counters["client_errors"] += 1
            session.close_client(code, str(error), cause)
        else:
            log.error("a client's frames could not be handled: %s", place(error))
            session.close_client(INTERNAL_ERROR, "the door could not handle this; its log says why")

    def work(self, data: bytes, items: list[Item]) -> None:
        """Handles these frames of the client, one after the other."""
        session = self._session
        at, count = 0, len(items)
        clear, moving, run = 0, None, items  # publishes before items[clear] do not wait; items[clear] may, for a queue that is being moved
        while at < count:
            item = items[at]
            kind, number = item[0], item[1]
            if kind not in (HEADER, BODY, HEARTBEAT) and self.parts.is_open(number):
                raise self.parts.unexpected(number)
            if kind not in (HEADER, BODY, HEARTBEAT, CHANNEL_OPEN) and (number or kind >> 16 != CONNECTION_CLASS):
                known = session.channels.get(number)
                if known is None or not known.opened:
                    raise closing.NotOpen(kind)
            if kind == BASIC_PUBLISH and item[6]:
                if at >= clear and session.replica.moving:
                    clear, moving = first_that_waits(session, data, items, at)
                    run = items if moving is None else items[:clear]
                if at < clear or moving is None:
                    at = session.take(session, data, run, at)
                if session.permission_needed:
                    self._wait_for(permissions.ask(session, data, items, at), _rest(data, items, at))
                    return
                if moving is not None and at == clear and session.client is not None and not session.closed:
                    self._wait_for(moving.over, _rest(data, items, at))
                    return
                if session.gone(session.channels.get(number)):
                    return
                continue
            if kind == BASIC_ACK:
                at = session.acks(session, data, items, at)
                continue
            at += 1
            acknowledge.flush(session)
            if kind == HEARTBEAT:
                if not session.outbox.full:  # else enough data is on its way
                    session.outbox.write(HEARTBEAT_FRAME)
                continue
            payload = bytes(data[item[2] : item[3]])
            if kind in (HEADER, BODY, BASIC_PUBLISH):
                session.channel(number)
                held_back = self._take_part(kind, number, payload)
                if held_back is not None:
                    self._wait_for(held_back[0], held_back[1] + _rest(data, items, at))
                    return
                continue
            channel = session.channel(number)
            if channel.closing and kind not in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
                continue  # sent before the client knew
            if session.replica.moving and (moving := waits_for(session, channel, kind, payload)) is not None:
                self._wait_for(moving.over, _rest(data, items, at - 1))
                return
            if channel.gets:
                channel.asked_behind = True
            handler = session.on_client.get(kind)
            if handler is not None:
                handler(session, channel, kind, payload)
            else:
                session.outbox.put(encode.frame(METHOD, number, payload))
            if self._deafened:
                return
            if self.stalled:
                if left := _rest(data, items, at) + self.left:
                    self._wait_with(left)
                return
        acknowledge.flush(session)

    def _take_part(self, kind: int, number: int, payload: bytes) -> tuple[asyncio.Event, bytes] | None:
        """Takes a frame of a content that comes in pieces. Returns the event and the bytes that have to wait for it, if any."""
        session = self._session
        try:
            content = self.parts.take(kind, number, payload)
        except content_assembly.BodyTooLarge as error:
            channel = session.channel(number)
            if not channel.closing:
                closing.too_large(session, channel, error.size, error.limit)
            return None
        if content is not None:
            whole = content_assembly.whole(number, content, session.frame_max_bytes)
            if session.replica.moving and (moving := first_that_waits(session, *whole, 0)[1]) is not None:
                return moving.over, whole[0]
            session.take(session, *whole, 0)
            if session.permission_needed:
                return permissions.ask(session, *whole, 0), whole[0]
        return None

    def hear_nothing_more(self) -> None:
        """Ignores the client's frames from now on: it has sent its close."""
        self._deafened = True
        self._session.takes_deliveries = False
        self._backlog.clear()
        self._keep(b"")

    def forget(self) -> None:
        """The client is gone: drops all its pending bytes."""
        self._backlog.clear()
        self._keep(b"")
        self.parts.clear()
        self.share.leave()

    def stall(self) -> None:
        """Stops taking frames from the client for now."""
        self.stalled = True
        self._session.flow.pause_client()

    def unstall(self, first: Callable[[], None] | None = None) -> None:
        """Resumes with the backlog; `first` is called before that, in that turn of the event loop."""
        session = self._session
        self.stalled = False
        if first is not None and not session.closed:
            try:
                first()
            except Exception as error:
                self.cannot_take(error)
        if session.closed or session.client is None:
            return
        session.flow.resume_client()
        self.data(b"")

    def take_again(self, data: bytes) -> None:
        """Puts frames that were parsed before in front of the backlog."""
        self._backlog.appendleft(data)

    def _wait_for(self, over: asyncio.Event, data: bytes) -> None:
        """Stops taking frames, from these bytes on, until a queue has been moved, or the broker has answered a question."""
        acknowledge.flush(self._session)
        self._wait_with(data + self.left)
        self.stall()
        self._session.spawn(self._unstall_after(over))

    def _wait_with(self, data: bytes) -> None:
        """Puts these bytes, with the incomplete rest, in front of the backlog. Raises FrameError if the connection has to end because of them."""
        self._keep(b"")
        self.share.take(len(data))
        self._put_back += len(data)
        self._backlog.appendleft(data)

    def wait_for_answer(self, answered: asyncio.Event) -> None:
        """Stops taking frames until the broker has answered."""
        self.stall()
        self._session.flow.asks(True)
        self._session.spawn(self._unstall_when_answered(answered))

    async def _unstall_when_answered(self, answered: asyncio.Event) -> None:
        await answered.wait()
        self._session.flow.asks(False)
        self.unstall()

    async def _unstall_after(self, over: asyncio.Event) -> None:
        """Resumes when the event is set."""
        await over.wait()
        self.unstall()

    async def _await_barrier(self) -> None:
        """Resumes when another connection's declaration is done."""
        await self._session.replica.barrier.eased()
        self.unstall()


def _rest(data: bytes, items: list[Item], at: int) -> bytes:
    """The frames from items[at] on, unchanged; without the bytes behind the last one."""
    return data[items[at][2] - 7 : end_of(items[-1])] if at < len(items) else b""
