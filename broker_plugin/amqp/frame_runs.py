"""Cuts a stream of bytes into runs of whole AMQP frames, without a look at what is in them. Pure.

Rules:
- A frame is given out when its last octet has come, so that what was given out ends at the boundary of a frame at any time.
- Of methods only those of channel 0 are named. Malformed bytes raise FrameError.
"""

from __future__ import annotations

import struct

from .frames import FRAME_END, FRAME_OVERHEAD_BYTES, METHOD, FrameError

FRAME_BYTES_ANY_MAX = (1 << 24) + FRAME_OVERHEAD_BYTES  # more than any door agrees upon
_HEAD_BYTES = 7
_METHOD_BYTES = 4

_head = struct.Struct(">BHI").unpack_from
_u32 = struct.Struct(">I").unpack_from


class FrameRuns:
    """The runs of one stream.

    Attributes:
        methods: IDs of the methods on channel 0 in the last run.
    """

    __slots__ = ("_left", "_missing", "methods")

    def __init__(self) -> None:
        self.methods: list[int] = []
        self._left = bytearray()  # the beginning of an incomplete frame,
        self._missing = 0  # which has this many octets more, if its head has come

    def take(self, data: bytes) -> bytes:
        """Returns the whole frames up to here, and keeps the rest. Raises FrameError."""
        if self.methods:
            self.methods = []
        if self._left:
            self._left += data
            if len(data) < self._missing:
                self._missing -= len(data)
                return b""
            data, self._left = bytes(self._left), bytearray()
        at, length = 0, len(data)
        self._missing = 0
        while at + _HEAD_BYTES <= length:
            kind, channel, size = _head(data, at)
            end = at + size + FRAME_OVERHEAD_BYTES
            if end > length:
                if end - at > FRAME_BYTES_ANY_MAX:
                    raise FrameError(f"a frame of {size} bytes")
                self._missing = end - length
                break
            if data[end - 1] != FRAME_END:
                raise FrameError("a frame without the octet that ends it")
            if not channel and kind == METHOD and size >= _METHOD_BYTES:
                self.methods.append(_u32(data, at + _HEAD_BYTES)[0])
            at = end
        if at == length:
            return data
        self._left += data[at:]
        return data[:at]
