"""Which tests belong to the quick tier, and which to a shard.

The quick tier is `make test`: every test that needs no broker, and of the others those that are marked:

    @pytest.mark.quick                 on RabbitMQ 4.3 only (or on the version of its mark `one_version`)
    @pytest.mark.quick("3.10", "4.3")  on these versions
    @pytest.mark.quick(only="classic") with the parameters whose ids match this regular expression
    @pytest.mark.full                  never, where the whole file is marked, or no broker is needed; takes `only`, too

A shard is one of several parts of all tests. Its unit is a file on one RabbitMQ version: units go, the longest first, to the shard that has least
to do by then. `durations.json` has the seconds that each unit took when it was measured; `python tests/tiers.py JUNIT.xml…` writes it.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

import pytest

QUICK_VERSION = "4.3"
TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
UNKNOWN_S = 10.0  # of a unit that was not measured yet
_BROKERLESS = ("unit", "scenarios", "model", "simulation", "fuzz")


class Shard(NamedTuple):
    """One of `of` parts of all tests; the first has number 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "2/6".

        Raises:
            ValueError: It is no such part.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"a shard is I/N, as 2/6 for the second of six, not {text!r}")
        return cls(int(match[1]), int(match[2]))


def is_quick(item: pytest.Item) -> bool:
    """Whether a test belongs to the quick tier."""
    version = version_of(item)
    quick, full = item.get_closest_marker("quick"), item.get_closest_marker("full")
    if full is not None and re.search(full.kwargs.get("only", ""), item.name):
        return False
    if quick is None:
        return version is None and item.path.relative_to(TESTS).parts[0] in _BROKERLESS
    if not re.search(quick.kwargs.get("only", ""), item.name):
        return False
    if version is None:
        return True
    one = item.get_closest_marker("one_version")
    return version in (quick.args or (one.args if one else (QUICK_VERSION,)))


def unit_of(item: pytest.Item) -> str:
    """The unit of a test, as "integration/test_door.py 4.3"."""
    return " ".join(filter(None, (item.path.relative_to(TESTS).as_posix(), version_of(item))))


def shard_of(units: Iterable[str], count: int) -> dict[str, int]:
    """The number of the shard that each unit belongs to, 1 to `count`."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text())
    load = [0.0] * count
    found: dict[str, int] = {}
    for unit in sorted(set(units), key=lambda unit: (-seconds.get(unit, UNKNOWN_S), unit)):
        least = load.index(min(load))
        load[least] += seconds.get(unit, UNKNOWN_S)
        found[unit] = least + 1
    return found


def version_of(item: pytest.Item) -> str | None:
    """The RabbitMQ version that a test runs on; None: it does not ask for one."""
    callspec = getattr(item, "callspec", None)
    version: str | None = callspec.params.get("broker_version") if callspec else None
    return version


def measure_units(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds of each unit in reports of `--junitxml`; those of setups that several units share count for the first."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            name, _, group = case.attrib["name"].partition("@")
            path = case.attrib["classname"].removeprefix("tests.").split(".")
            stem = next(index for index, part in enumerate(path) if part.startswith("test_"))
            parameters = name.partition("[")[2].rstrip("]").split("-")
            version = next((each for each in (*parameters, group.split(" ")[0]) if re.fullmatch(r"\d\.\d+", each)), "")
            seconds[" ".join(filter(None, ("/".join(path[: stem + 1]) + ".py", version)))] += float(case.attrib["time"])
    return {unit: round(time, 1) for unit, time in sorted(seconds.items())}


if __name__ == "__main__":
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    DURATIONS.write_text(json.dumps(known | measure_units(map(Path, sys.argv[1:])), indent=1, sort_keys=True) + "\n")
