"""The table of docs/verification.md that says, for each part of each rule, which life or trace fails without it.

    python tests/simulation/table.py            finds them anew, and writes the table into docs/verification.md

What stands in the table is tried first, so that as little as possible changes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import chaos
import life
import registered
from cluster import Violation
from rules_off import ETCD, LOG, PARTS, rule_off

sys.path.append(str(Path(__file__).parent.parent / "scenarios"))

DOCUMENT = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- rules: made by tests/simulation/table.py -->", "<!-- end of rules -->"  # as in tests/verification.py
SEEDS = 600
RUNS: dict[str, Callable[..., object]] = {"log": chaos.run, "whole": life.run, "etcd": registered.run}
_ROW = re.compile(r"\| ([ER]\d+) \| (.+?) \| (log|whole|etcd|trace) `(\w+)` \|")


class Found(NamedTuple):
    """`kind`: "log", "whole" or "etcd" with a seed, or "trace" with a name."""

    kind: str
    which: str


def traces() -> dict[str, tuple[str, Callable[..., None]]]:
    """By part: name and function of the trace that fails without it."""
    import test_m1_traces
    import test_m3_traces

    return {part: (trace.__name__, trace) for trace, part, _ in (*test_m1_traces.TRACES, *test_m3_traces.TRACES)}


def fails(part: str, found: Found) -> str:
    """What a life or trace breaks with this part switched off; empty if nothing, or if it breaks something with it, too."""
    with rule_off(part) as options:
        broken = breaks(part, found, options)
    return "" if broken and breaks(part, found, {}) else broken


def breaks(part: str, found: Found, options: dict[str, object]) -> str:
    """What is broken; empty if nothing is."""
    try:
        if found.kind == "trace":
            traces()[part][1](**options)
        else:
            RUNS[found.kind](int(found.which), **options)
    except Violation as error:
        if isinstance(error.__cause__, Violation | None):  # else it is no promise that is broken, but a program
            return str(error.__cause__ or error)
    return ""


def documented() -> dict[str, Found]:
    """What docs/verification.md says, by part."""
    text = DOCUMENT.read_text()
    table = text[text.index(BEGIN) : text.index(END)]
    return {part: Found(kind, which) for _, part, kind, which in _ROW.findall(table)}


def find(part: str, known: Found | None) -> Found | None:
    """Something that fails without the part: what is known, else a trace, else the first seed."""
    if known is not None and fails(part, known):
        return known
    if part in traces():
        trace = Found("trace", traces()[part][0])
        if fails(part, trace):
            return trace
    for kind in ("log", "whole") if part in LOG else ("etcd",) if part in ETCD else ("whole",):
        for seed in range(SEEDS):
            if fails(part, Found(kind, str(seed))):
                return Found(kind, str(seed))
    return None


def main() -> None:
    known = documented()
    rows = []
    for part, (rule, _) in PARTS.items():
        found = find(part, known.get(part))
        print(rule, part, found, flush=True)
        if found is None:
            raise SystemExit(f"nothing fails without: {rule}, {part}")
        rows.append(((rule[0] == "E", int(rule[1:])), f"| {rule} | {part} | {found.kind} `{found.which}` |"))
    text = DOCUMENT.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    lines = [BEGIN, "", "| rule | switched off | fails |", "|---|---|---|", *(row for _, row in sorted(rows, key=lambda r: r[0])), "", tail]
    DOCUMENT.write_text(head + "\n".join(lines))


if __name__ == "__main__":
    main()
