"""CPU time per message of a lab's processes, and a door beside its broker: what goals are set for, and the rates beside it.

Door and direct take turns within a round. A `Meter` reads the CPU time of every process around a run. `compare` makes one `Comparison` of all rounds.

Rules:
- Rounds begin with the other side each time. A ratio is taken within a round, and the median of the rounds counts: a machine's mood meets both alike.
- The CPU time of a direct run is that of its broker alone. Through the door it is that of every broker and every sidecar of the group.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DIRECT = "e1.broker"

Round = dict[str, dict[str, Any]]
"""The figures of two runs, by side: "door" and "direct"."""


def cpu_s(pid: int | None) -> float:
    """CPU time that a process has used, in seconds."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def cpu_tree_s(pid: int) -> float:
    """CPU time in seconds that a process, those that it has started, and so on, have used, ended ones that were waited for included."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        child = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(child)
        used[child] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        total += used.get(one, 0.0)
        left += children.get(one, [])
    return total


def cpu_of(lab: Lab) -> dict[str, float]:
    """CPU time used by every process of a lab, in seconds."""
    return {key: cpu_s(pid) for key, pid in lab.processes().items() if pid is not None and key != "epmd"}


class Meter:
    """Reads the CPU time that a lab's processes use from now on.

    Args:
        lab: Whose.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab, self._load, self._before = lab, os.getloadavg(), cpu_of(lab)

    def read(self, messages: int) -> dict[str, Any]:
        """A run's figures: `cpu_us`, µs per message by process, and `load`, the load average when the run began."""
        used = cpu_of(self._lab)
        return {"load": self._load, "cpu_us": {key: 1e6 * (used[key] - self._before[key]) / messages for key in used}}


def sides(number: int) -> tuple[str, str]:
    """The sides of the `number`th round, in their order."""
    return ("door", "direct") if number % 2 else ("direct", "door")


@dataclass(frozen=True)
class Comparison:
    """A door beside its broker. All are medians of rounds but `least` and `most`; CPU times are in µs per message.

    Attributes:
        direct_us: CPU time of the broker in direct runs.
        brokers_us: CPU time of each node's broker behind the door, the primary's first.
        sidecars_us: CPU time of each node's sidecar.
        cpu_ratio: CPU time of a direct run ÷ CPU time of all brokers and sidecars through the door.
        ratio: Rate through the door ÷ rate directly.
        least, most: The lowest and highest of these ratios.
        direct_rate, door_rate: Messages per second.
    """

    direct_us: float
    brokers_us: tuple[float, ...]
    sidecars_us: tuple[float, ...]
    cpu_ratio: float
    ratio: float
    least: float
    most: float
    direct_rate: float
    door_rate: float

    @property
    def cpu_multiple(self) -> float:
        """CPU time of all brokers and sidecars ÷ that of as many brokers, each with direct publishes of all messages."""
        return 1 / (len(self.brokers_us) * self.cpu_ratio) if self.cpu_ratio else math.inf

    def __str__(self) -> str:
        sidecars, brokers = (" and ".join(f"{us:.1f}" for us in each) for each in (self.sidecars_us, self.brokers_us))
        return (
            f"sidecar {sidecars} µs/msg, broker {brokers}, {self.direct_us:.1f} directly, CPU ratio {self.cpu_ratio:.2f}, "
            f"multiple {self.cpu_multiple:.2f}; rate ratio {self.ratio:.2f}, {self.least:.2f} to {self.most:.2f}, "
            f"{self.door_rate:,.0f} of {self.direct_rate:,.0f} msg/s"
        )


def compare(rounds: list[Round]) -> Comparison:
    """What these rounds say."""
    door, direct = ([pair[side]["cpu_us"] for pair in rounds] for side in ("door", "direct"))
    ratios = [pair["door"]["rate"] / pair["direct"]["rate"] for pair in rounds]

    def behind_door(part: str) -> tuple[float, ...]:
        return tuple(median(run[key] for run in door) for key in sorted(door[0]) if key.endswith(part))

    return Comparison(
        direct_us=median(run[_DIRECT] for run in direct), brokers_us=behind_door(".broker"), sidecars_us=behind_door(".sidecar"),
        cpu_ratio=median(alone[_DIRECT] / sum(both.values()) for alone, both in zip(direct, door, strict=True)),
        ratio=median(ratios), least=min(ratios), most=max(ratios),
        direct_rate=median(pair["direct"]["rate"] for pair in rounds), door_rate=median(pair["door"]["rate"] for pair in rounds),
    )
