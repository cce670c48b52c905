"""The generator that transmits log entries to a site at a given rate, PER_TRANSACTION at once; each holds the instant at which it was due.

Rules: the schedule is fixed beforehand, so a stall of the publisher counts for every entry that it delays. An instant is CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from typing import Any

from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher

from .measure import WAIT_S, percentile

ENTRY_BYTES = 100
PER_TRANSACTION = 10
CLIENT = "bench"
FORM = struct.Struct(">dQ")


def unpack(payload: bytes) -> tuple[float, int]:
    """The instant at which an entry was due, and its number."""
    due, number = FORM.unpack_from(payload)
    return due, number


def transmit(url: str, site: str, rate: float) -> dict[str, Any]:
    """Says that it is ready, waits for a line, then transmits until the next line.

    Returns:
        sent: Entries, all confirmed. late_p99_ms: From due to handed to the publisher.
    """
    with Publisher([url], "bench-entries", CLIENT, confirm_timeout_s=WAIT_S) as publisher:
        publisher.on_full_sync(_complete)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        late: list[float] = []
        began, number = time.monotonic(), 0
        while True:
            due = began + number / rate
            if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
                break
            late.append(time.monotonic() - due)
            entries = [(FORM.pack(due, each).ljust(ENTRY_BYTES, b"x"), [site]) for each in range(number, number + PER_TRANSACTION)]
            publisher.transmit_log_entry_messages(entries)
            number += PER_TRANSACTION
        publisher.flush(WAIT_S)
    return {"sent": number, "late_p99_ms": 1000 * percentile(sorted(late), 0.99)}


def _complete(_: FullSyncRequest, context: FullSyncContext) -> None:
    context.complete()
