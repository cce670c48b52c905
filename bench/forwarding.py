"""What a relay costs: CPU time per message of a backup that forwards (`door.when_backup = "forward"`), beside that of the whole pair.

`python -m bench.forwarding [MESSAGES]` publishes confirmed messages of 1 KB to a pair, by the primary's door and by the backup's in turn, and prints
the CPU time of both sidecars. A relay costs what the backup's sidecar uses more when clients come by its door.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from lrq_ha.lab import Lab

from .cost import Meter
from .measure import applied, declare, delete, finish, note, start

MESSAGES, WARM_UP, WINDOW = 50_000, 2_000, 5_000
SIZE_BYTES = 1_024
ROUNDS = 3


def main() -> None:
    """Runs both ways in turn."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES
    used: dict[str, list[dict[str, float]]] = {"primary's door": [], "backup's door": []}
    with tempfile.TemporaryDirectory() as folder, Lab({"east": 2}, Path(folder) / "lab", door={"when_backup": "forward"}) as lab:
        primary = lab.primary("east") or "e1"
        backup = "e2" if primary == "e1" else "e1"
        for number in range(ROUNDS):
            for way in list(used) if number % 2 else list(used)[::-1]:
                door = lab.nodes[primary if way == "primary's door" else backup].door
                declare(lab.nodes[primary].door, "forwarded", "classic")
                applied(lab)
                meter = Meter(lab)
                given = {"url": door, "queue": "forwarded", "messages": messages, "size_bytes": SIZE_BYTES, "window": WINDOW, "warm_up": WARM_UP}
                rate = finish(start("flood", **given))["rate"]
                applied(lab)
                found = meter.read(messages + WARM_UP)
                cpu_us = {"primary": found["cpu_us"][f"{primary}.sidecar"], "backup": found["cpu_us"][f"{backup}.sidecar"]}
                used[way].append(cpu_us)
                note(f"by the {way}: sidecars {cpu_us['primary']:.1f} and {cpu_us['backup']:.1f} µs/msg, {rate:.0f}/s, load {found['load'][0]:.0f}")
                delete(lab.nodes[primary].door, "forwarded")
    for way, rounds in used.items():
        print(f"by the {way}: " + ", ".join(f"{side}'s sidecar {median(one[side] for one in rounds):.1f} µs/msg" for side in ("primary", "backup")))


if __name__ == "__main__":
    main()
