"""Reads a broker's bytes for one client: splits them into frames, and passes on, changes or consumes each frame.

`method_table.FROM_BROKER` has the handler of each method.

Rules:
- Frames that need no change are passed on as the slice that they came in.
- A broker cuts bodies to the agreed frame_max, but no header frame: a header frame is as large as its publisher's frame_max allowed.
- A delivery whose fate is not safe yet is withheld with all frames behind it on its channel, so that order is kept. The answer to a declaration
  whose entry is not safe yet is withheld in that way, too.
- A frame that the door cannot handle ends both sides.
"""

from __future__ import annotations

import logging

from lrq_ha.errors import NotPrimary, place

from ..amqp import frames
from ..amqp.content_relay import PIECES, ContentRelay
from ..amqp.frames import BASIC_ACK, BASIC_DELIVER, BASIC_NACK, BODY, Item, scan
from ..amqp.reply_codes import CONNECTION_FORCED, INTERNAL_ERROR
from ..methods import acknowledge, deliver, publish
from ..session.session import ClientSession
from . import closing_handshake

log = logging.getLogger("lrq_ha.door")


class BrokerReader:
    """Reads the broker's side of one session.

    Attributes:
        passing: Contents that come in pieces.
        withheld: Frames, by channel. They begin with a delivery whose fate is not safe yet: no later frame of its channel is given out before it, so
            that a `multiple` ack of the client covers only its deliveries. Or they begin with the answer to a declaration: nothing is taken from the
            client before that is given out.
    """

    __slots__ = ("_answers", "_left", "_session", "_withheld_bytes", "passing", "withheld")

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self.withheld: dict[int, list[bytes]] = {}
        self.passing = ContentRelay(session.frame_max_bytes, self._decide, self.withheld.__contains__)
        self._withheld_bytes = 0
        self._answers: set[int] = set()  # channels on which the answer to a declaration is withheld
        self._left = b""

    def data(self, data: bytes) -> None:
        """Takes bytes from the broker."""
        try:
            self._from_the_broker(data)
        except Exception as error:
            self._cannot_handle(error)
        self._session.flow.broker_heard()

    def _cannot_handle(self, error: Exception) -> None:
        session = self._session
        if isinstance(error, NotPrimary):
            session.close_client(CONNECTION_FORCED, str(error))
            session.close()
            return
        log.error("a broker's frames could not be handled: %s", place(error))
        session.close_client(INTERNAL_ERROR, "the door could not handle the broker's answer; its log says why")
        session.close()

    def _from_the_broker(self, data: bytes) -> None:
        if self._left:
            data = self._left + data
        items, used = scan(data, 0, frames.FRAME_MAX_ANY_BYTES)
        self._left = data[used:] if used < len(data) else b""
        self._sort(data, items)

    def _sort(self, data: bytes, items: list[Item]) -> None:
        """Sorts these frames of the broker, and passes the client's part on."""
        session = self._session
        withheld, passing = self.withheld, self.passing
        limit = session.frame_max_bytes
        on_broker, apart = session.on_broker, session.internal_channels
        out: list[bytes] = []
        keep_from = -1  # start of the slice that is passed on unchanged
        keep_to = 0
        for item in items:
            kind, number, start, end, _, _, stop = item
            begin, after = start - 7, stop or end + 1
            replaced: bytes | None = b""
            if apart and number in apart:
                if keep_from >= 0:
                    out.append(data[keep_from:keep_to])
                    keep_from = -1
                replaced = apart[number](session, number, data, item)
            elif withheld and number in withheld:
                self._withhold(number, data[begin:after])
            elif kind == BASIC_DELIVER and stop:
                replaced = session.deliver(session, number, data, item)
            elif kind in (BASIC_ACK, BASIC_NACK):
                if keep_from >= 0:
                    out.append(data[keep_from:keep_to])
                    keep_from = -1
                replaced = publish.answered(session, number, kind, data, start)
            elif not stop and kind in PIECES:
                replaced = passing.take(kind, number, data, item)
                if replaced is None and not passing.is_open(number):
                    replaced = data[begin:after]
            elif kind in on_broker:
                replaced = on_broker[kind](session, number, data, item)
            else:
                replaced = None
            if stop and after - begin > limit:
                replaced = deliver.refit(data[begin:after] if replaced is None else replaced, limit)
            if replaced is None:
                if keep_from < 0:
                    keep_from = begin
                elif keep_to != begin:
                    out.append(data[keep_from:keep_to])
                    keep_from = begin
                keep_to = after
                continue
            if keep_from >= 0:
                out.append(data[keep_from:keep_to])
                keep_from = -1
            if replaced:
                out.append(replaced)
            if kind == BODY:
                # The content may have ended. The next frame can make the door itself send a frame, which must not come before this.
                session.pass_on(b"".join(out))
                out.clear()
                session.flow.consider_pausing()
        if keep_from >= 0:
            out.append(data[keep_from:keep_to])
        acknowledge.flush(session)
        if out:
            session.pass_on(out[0] if len(out) == 1 else b"".join(out))
        if session.closed_by_broker:
            self._end()

    def _decide(self, number: int, blob: bytes, item: Item) -> bytes | None:
        """Decides on a content whose method and header have come."""
        session = self._session
        handler = session.deliver if item[0] == BASIC_DELIVER else session.on_broker.get(item[0])
        replaced = handler(session, number, blob, item) if handler is not None else None
        if item[5] - item[4] + frames.FRAME_OVERHEAD_BYTES > session.frame_max_bytes:
            return deliver.refit(blob if replaced is None else replaced, session.frame_max_bytes)
        return replaced

    def forget(self, number: int) -> None:
        """A channel has ended at the broker: contents that have begun on it will not be completed."""
        if behind := self.passing.drop(number):
            self._session.pass_on(behind)
            self._session.flow.consider_pausing()

    def _end(self) -> None:
        """The broker has closed the connection, and the client is told. No part of the door may wait for anything until the client answers."""
        session = self._session
        if session.client is not None:
            closing_handshake.hand_over(session.client, session.from_client.left)
            session.client_lost()
        session.close()

    def _withhold(self, channel: int, data: bytes) -> None:
        self.withheld[channel].append(data)
        self._withheld_bytes += len(data)
        if self.withholds_too_much:
            self._session.flow.consider_broker()

    @property
    def withholds_too_much(self) -> bool:
        """Whether too much is withheld to read more from the broker."""
        return self._withheld_bytes > self._session.door.config.connection_buffer_bytes_max

    def hold_answer(self, channel: int, frame: bytes) -> None:
        """Withholds the broker's answer to a declaration, and all frames behind it, until `give_answer`."""
        self.withheld[channel] = [frame]
        self._answers.add(channel)

    def give_answer(self, channel: int, *, silent: bool) -> None:
        """Passes the withheld answer on this channel to the client, or drops it (`silent`); the frames behind it go on."""
        if channel not in self._answers:
            return
        self._answers.remove(channel)
        if silent:
            self.withheld[channel][0] = b""
        self.release()

    def release(self) -> None:
        """Decides again on withheld frames; undecided ones are withheld again."""
        withheld = {channel: parts for channel, parts in self.withheld.items() if channel not in self._answers}
        for channel, parts in withheld.items():
            del self.withheld[channel]
            self._withheld_bytes -= sum(map(len, parts[1:]))
        self._session.flow.consider_broker()
        try:
            for parts in withheld.values():
                data = b"".join(parts)
                self._sort(data, scan(data, 0, frames.FRAME_MAX_ANY_BYTES, 0)[0])
        except Exception as error:
            self._cannot_handle(error)
