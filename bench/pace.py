"""The generator that publishes at a given rate and measures from when each message is due, whether or not it could be sent then.

Rules: the schedule is fixed beforehand (so many messages at each tick) and never waits for an answer, so a stall is counted against every message
that is due while it lasts; between ticks the process sleeps, as it shares the cores with what it measures.
"""

from __future__ import annotations

import gc
import select
import time
from array import array
from collections.abc import Iterator
from typing import Any

from . import wire
from .measure import percentile

TICK_S = 0.001  # about: a tick has a whole number of messages
SILENCE_S = 100.0


def pace(url: str, queue: str, size_bytes: int, rate: float, warm_up_s: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Publishes with confirms on one connection at `rate` messages/s for `warm_up_s` + `seconds`; tells percentiles of the latter's confirms.

    Yields:
        When connected; then p50_ms, p99_ms, p999_ms and max_ms from due to confirmed, over all messages after the warm-up, and `late_p99_ms`,
        from due to handed to the kernel: the generator's own share and the other side's back pressure.
    """
    raw = wire.Raw(url, confirms=True)
    raw.socket.setblocking(False)
    yield {"ready": True}
    gc.disable()
    per_tick = max(1, round(rate * TICK_S))
    tick_s = per_tick / rate
    first = round(warm_up_s / tick_s) * per_tick
    total = first + max(1, round(seconds / tick_s)) * per_tick
    chunk = memoryview(wire.message(queue, b"x" * size_bytes) * per_tick)
    yield {"messages": total - first, "rate": rate} | _run(raw, chunk, per_tick, tick_s, first, total)


def _run(raw: wire.Raw, chunk: memoryview, per_tick: int, tick_s: float, first: int, total: int) -> dict[str, Any]:
    confirms, pending = wire.Confirms(), chunk[:0]
    waited, late = array("d"), array("d")
    begun = done = 0  # ticks whose sending has begun, and messages whose confirm has been counted
    began = time.monotonic()
    while done < total:
        now = time.monotonic() - began
        while True:
            if not pending:
                if begun * per_tick >= total or begun * tick_s > now:
                    break
                late.append(now - begun * tick_s)
                pending = chunk
                begun += 1
            try:
                pending = pending[raw.socket.send(pending) :]
            except BlockingIOError:
                break
        pause_s = SILENCE_S
        if not pending and begun * per_tick < total:
            pause_s = max(0.0, began + begun * tick_s - time.monotonic())
        readable, writable, _ = select.select([raw.socket], [raw.socket] if pending else [], [], pause_s)
        if readable:
            confirms.take(*raw.read())
            now = time.monotonic() - began
            waited.extend(now - number // per_tick * tick_s for number in range(done, confirms.upto))
            done = confirms.upto
        elif not writable and pause_s == SILENCE_S:
            raise TimeoutError("nothing comes any more")
    if confirms.refused:
        raise wire.Refused(f"{confirms.refused} publishes were refused")
    ordered = sorted(waited[first:])
    return {f"{name}_ms": 1000 * percentile(ordered, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))} | {
        "late_p99_ms": 1000 * percentile(sorted(late[first // per_tick :]), 0.99)}
