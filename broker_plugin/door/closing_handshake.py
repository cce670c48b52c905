"""How the door ends a connection to a client: says why, waits for the client's close-ok, then closes; never for longer than a moment.

Rules: until the close-ok comes, what the client still sends is read and dropped. (Closed with unread bytes, TCP would reset the connection, and the
client might never see why.) A client that does not answer, or does not even read, is cut off in time.
"""

from __future__ import annotations

import asyncio

from ..amqp import encode, frames
from ..amqp.frames import CONNECTION_CLOSE, CONNECTION_CLOSE_OK, FrameError, scan

ANSWER_S = 2.0


def say(transport: asyncio.Transport, code: int, text: str, pending: bytes = b"", cause: int = 0) -> None:
    """Ends the connection with connection.close.

    Args:
        transport: The client's. Its protocol hears no more of it but its end.
        code, text: The reason.
        pending: The beginning of a frame that has come already.
        cause: Id of the method that is wrong; 0 for none.
    """
    if transport.is_closing():
        return
    transport.write(encode.connection_close(code, text, cause))
    hand_over(transport, pending)


def hand_over(transport: asyncio.Transport, pending: bytes = b"") -> None:
    """The client has been told; only its answer is waited for."""
    goodbye = _Farewell(transport, pending)
    transport.set_protocol(goodbye)
    transport.resume_reading()


def end(transport: asyncio.Transport) -> None:
    """Closes a transport when what was written to it is gone, and at the latest in a moment."""
    transport.close()
    asyncio.get_running_loop().call_later(ANSWER_S, transport.abort)


class _Farewell(asyncio.Protocol):
    def __init__(self, transport: asyncio.Transport, pending: bytes) -> None:
        self._transport = transport
        self._before = transport.get_protocol()
        self._left = pending
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            data = self._left + data
            items, used = scan(data, 0, frames.FRAME_MAX_BYTES, 0)
        except FrameError:
            self._left = b""  # nothing can be understood any more: only the time is left
            return
        self._left = data[used:]
        if any(item[0] in (CONNECTION_CLOSE, CONNECTION_CLOSE_OK) for item in items):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._before.connection_lost(exc)
