"""Runs of whole frames in a stream: whatever pieces it comes in, a run ends at the end of a frame, and nothing is lost or changed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from broker_plugin.amqp import encode, frames
from broker_plugin.amqp.frame_runs import FRAME_BYTES_ANY_MAX, FrameRuns

CLOSE = encode.connection_close(320, "a reason")
BODY = encode.frame(frames.BODY, 3, bytes(range(256)) * 4)
FRAMES = [
    frames.HEARTBEAT_FRAME,
    encode.method_frame(0, commands.Connection.OpenOk()),
    encode.method_frame(1, commands.Channel.OpenOk()),
    BODY,
    encode.frame(frames.BODY, 1, b""),
    CLOSE,
]


@given(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=20), st.data())
def test_runs_end_with_frames(sent: list[bytes], data: st.DataObject) -> None:
    stream, ends, at = b"".join(sent), {0}, 0
    for frame in sent:
        ends.add(at := at + len(frame))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))) | {0, len(stream)})
    runs, got, methods = FrameRuns(), b"", []
    for begin, end in pairwise(cuts):
        got += runs.take(stream[begin:end])
        methods += runs.methods
        assert len(got) == max(boundary for boundary in ends if boundary <= end), "all whole frames, and no part of one"
    assert got == stream
    known = {FRAMES[1]: frames.CONNECTION_OPEN_OK, CLOSE: frames.CONNECTION_CLOSE}
    assert methods == [known[frame] for frame in sent if frame in known]


@pytest.mark.parametrize("wrong", [BODY[:-1] + b"\0", b"\x03\0\1" + FRAME_BYTES_ANY_MAX.to_bytes(4, "big"), b"HTTP/1.1 400 Bad Request\r\n"])
def test_bytes_that_are_no_frames_are_refused(wrong: bytes) -> None:
    runs = FrameRuns()
    with pytest.raises(frames.FrameError):
        runs.take(BODY + wrong)


def test_a_large_frame_in_small_pieces_is_joined_once() -> None:
    """Joined at each piece, a frame of 16 MiB would take minutes."""
    large = encode.frame(frames.BODY, 1, bytes(8 << 20))
    runs, got = FrameRuns(), 0
    for at in range(0, len(large), 1024):
        got += len(runs.take(large[at : at + 1024]))
    assert got == len(large)
