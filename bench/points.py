"""What the intercept points cost the door, without a broker: one connection's relay between two sockets that swallow everything.

`python -m bench.points [before|none|audit|profile] [MESSAGES]` takes confirmed publishes of 1 KB in chunks of 64, as many deliveries and acks, and
prints the CPU time per message of the door's thread; under `perf stat -e instructions:u` or callgrind, two runs with different numbers of messages
give the instructions of one message. `profile` is `none`, and says in which functions that time goes: each millisecond of CPU time counts for the
function that runs, with what it calls in C. The log is a counter: what is appended is safe at once.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pamqp import commands

from broker_plugin.amqp import content_assembly, content_header, encode, frames
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.log import stamps
from broker_plugin.log.replica import Replica
from broker_plugin.session.rights import Right
from broker_plugin.session.session import Agreed
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.tables import DoorTable

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 64
SAMPLE_S = 0.001
SHARE_MIN = 0.01  # of all samples; what has less is one row
BODY = b"x" * 1024


class _Nowhere:
    """A socket that swallows everything."""

    def write(self, data: bytes) -> None: ...

    def writelines(self, pieces: object) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 5

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def _door(kind: str) -> Any:
    config = DoorTable(listen="127.0.0.1:5672", connection_buffer_bytes_max=1 << 30, buffered_bytes_max=1 << 30)
    door: Any = SimpleNamespace(
        config=config, now=lambda: 0.0, unfinished=content_assembly.Budget(1 << 30, "unfinished"), log_blocked="", counters=Counter(), draining="",
        client_full=lambda *_: None, session_closed=lambda _: None, sessions=set(), forget_decisions=lambda: None, sites=frozenset(), group="bench",
        completes_locally=lambda _: False, buffered_bytes_max=config.buffered_bytes_max, interceptors=None,
    )  # fmt: skip
    if kind != "before":  # the code before there were points has none to leave out
        from lrq_ha.interceptors.plugins import Interceptors, Settings

        tables = {"audit": Settings(on_overflow="drop", options={"path": "/dev/null"})} if kind == "audit" else {}
        door.interceptors = Interceptors(tables)
        door.interceptors.start(lambda: None)
    return door


async def run(kind: str, count: int) -> float:
    """Seconds of CPU of this thread for `count` messages, published, delivered and acked."""
    log = SimpleNamespace(end=0, unfinished=False)
    node: Any = SimpleNamespace(role=Role.ACTIVE, serving=True, log=log, leading=257, applied=0)
    replica: Any = None

    def emit(first: int, entries: int, _runs: object) -> None:
        log.end = first + entries - 1
        replica.progress.safe_advanced(log.end)

    replica = Replica(node, Levels({"^.*$": "all"}), emit)
    replica.stamp_affixes = (b"257.", b"/1")
    replica.index.generations.opened(0, 1)
    nowhere: Any = _Nowhere()
    relay = ClientConnection(
        _door(kind), replica, nowhere, nowhere, Agreed(
            user="app", vhost="/", producer="", ascending=False, instance="", peer=None, may_write=True, frame_max_bytes=frames.FRAME_MAX_BYTES,
            broker_frame_max_bytes=frames.FRAME_MAX_BYTES, heartbeat_s=0, told_blocked=False, channels_max=0, broker_channels_max=0,
        ),
    )  # fmt: skip
    relay.rights.add(Right("", "", False))
    relay.client_data(encode.method_frame(1, commands.Channel.Open()))
    relay.client_data(encode.method_frame(1, commands.Confirm.Select()))
    relay.client_data(encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag="c")))
    relay.broker_data(encode.method_frame(1, commands.Basic.ConsumeOk("c")))
    header = content_header.header_payload(len(BODY), content_header.properties())
    publish = encode.publish_method(1, "", "orders") + b"".join(encode.content(1, header, BODY))
    chunk = publish * CHUNK
    began = time.thread_time()
    for first in range(1, count + 1, CHUNK):  # tags, of publishes and of deliveries
        position = replica.next_sequence
        size = min(CHUNK, count + 1 - first)
        relay.client_data(chunk if size == CHUNK else publish * size)
        replica.flush()
        relay.broker_data(encode.ack(1, first + size - 1, True))
        relay.broker_data(b"".join(_delivery(first + i, position + i, header) for i in range(size)))
        relay.client_data(b"".join(encode.ack(1, first + i) for i in range(size)))
        replica.flush()
        await asyncio.sleep(0)
    took = time.thread_time() - began
    channel = relay.channels[1]
    chunks = -(-count // CHUNK)  # each one entry of acks
    if channel.deliveries or relay.unanswered or replica.end != count + chunks or replica.progress.safe != replica.end:
        raise RuntimeError(f"the messages have not gone through: {replica.end} entries, {replica.progress.safe} safe")
    return took


def _delivery(tag: int, position: int, header: bytes) -> bytes:
    arguments = b"\x01c" + struct.pack(">QB", tag, 0) + b"\0" + b"\x06orders"
    stamped = stamps.stamp(header, stamps.position_field(b"257.%d/1" % position))
    return encode.raw_method_frame(1, frames.BASIC_DELIVER, arguments) + b"".join(encode.content(1, stamped, BODY))


@contextmanager
def _sampled() -> Iterator[Counter[str]]:
    """Counts in which functions the process's CPU time goes."""
    found: Counter[str] = Counter()

    def look(_number: int, frame: FrameType | None) -> None:
        if frame is not None:
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Runs it."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "none"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 200_000
    if kind != "profile":
        took_us = asyncio.run(run(kind, count)) / count * 1e6
        print(f"{kind}: {took_us:.2f} us of CPU per message")
        return
    with _sampled() as found:
        took_us = asyncio.run(run("none", count)) / count * 1e6
    print(f"{took_us:.2f} us of CPU per message, {found.total()} samples")
    rows = [(name, samples) for name, samples in found.most_common() if samples >= SHARE_MIN * found.total()]
    rows.append(("all others", found.total() - sum(samples for _, samples in rows)))
    for name, samples in rows:
        print(f"{took_us * samples / max(found.total(), 1):6.2f} {name}")


if __name__ == "__main__":
    main()
