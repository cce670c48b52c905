"""Client libraries' own tests, directly against a broker and through a door: a table of those that end differently.

    python tests/acceptance/compare.py [--broker 3.10|4.3]... [--suite LIBRARY]... [--quick]

Rules: the broker under test and the pair whose primary's door is tested are private ones of a lab each, with the user guest:guest that the suites
log in as; a test that ends differently is run again by itself on both sides, and counts only if it never ends the same; the exit code is 1 if such
a test is not in KNOWN.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from runs import Outcome, Outcomes, Unavailable, prepare, run
from suites import KNOWN, SUITES, Suite

from lrq_ha.lab import Lab

TRIES = 3
#: How long one side of a suite may take.
QUICK_S, EVERYTHING_S = 240.0, 2400.0
_MISSING = Outcome("not run")


@dataclass(frozen=True)
class Addresses:
    """AMQP URLs of the two things to compare."""

    series: str
    broker: str
    door: str


@dataclass
class Comparison:
    """What two runs of a suite have shown.

    Attributes:
        same: How many tests ended the same.
        differ: Tests that never did: how they ended directly, and through the door.
        known: Those of them that may, and why.
        mended: Tests that may differ by KNOWN and did not.
        unsteady: Tests that ended the same when they were run again.
    """

    same: int
    differ: dict[str, tuple[Outcome, Outcome]]
    known: dict[str, str]
    mended: list[str]
    unsteady: list[str]

    @property
    def unexplained(self) -> dict[str, tuple[Outcome, Outcome]]:
        """What must not be."""
        return {name: both for name, both in self.differ.items() if name not in self.known}


def compare(suite: Suite, addresses: Addresses, quick: bool) -> Comparison:
    """Runs a suite on both sides.

    Raises:
        Unavailable: It cannot be had.
    """
    sources = prepare(suite)
    select, limit_s = (suite.quick, QUICK_S) if quick else (suite.everything, EVERYTHING_S)
    direct, door = (run(suite, sources, url, select, limit_s) for url in (addresses.broker, addresses.door))
    if not any(outcome.word == "passed" for outcome in direct.values()):
        raise Unavailable(f"no test of {suite.library} passes against the broker itself")
    differ = first = _differences(direct, door)
    for _ in range(TRIES - 1):
        if differ:
            again = sorted(differ)
            still = _differences(*(run(suite, sources, url, again, QUICK_S) for url in (addresses.broker, addresses.door)))
            differ = {name: differ[name] for name in differ if name in still}
    same = (direct.keys() | door.keys()) - first.keys()
    return Comparison(len(same), differ, _known(suite, differ, addresses.series), sorted(_known(suite, same, addresses.series)),
                      sorted(first.keys() - differ))


def _differences(direct: Outcomes, door: Outcomes) -> dict[str, tuple[Outcome, Outcome]]:
    both = {name: (direct.get(name, _MISSING), door.get(name, _MISSING)) for name in direct.keys() | door.keys()}
    return {name: (one, other) for name, (one, other) in both.items() if one.word != other.word}


def _known(suite: Suite, names: Iterable[str], series: str) -> dict[str, str]:
    return {name: reason for name in names for (library, pattern, version), reason in KNOWN.items()
            if library == suite.library and fnmatch(name, pattern) and version in ("*", series)}


@contextmanager
def addresses(series: str, folder: Path) -> Iterator[Addresses]:
    """A private broker by itself, and a pair."""
    alone, pair = Lab({"plain": 1}, folder / "broker", series, brokers_only=True), Lab({"east": 2}, folder / "pair", series)
    for lab in (alone, pair):
        lab.prepare()
        for node in lab.nodes.values():
            _add_guest(node.config.parent / "definitions.json")
    with alone, pair:
        primary = next(filter(None, (pair.primary("east") for _ in range(60))), None)  # a busy machine may not answer in time at once
        if primary is None:
            raise Unavailable("the pair has no primary")
        yield Addresses(series, alone.nodes["p1"].broker, pair.nodes[primary].door)


def _add_guest(definitions: Path) -> None:
    """The user that all suites take for granted."""
    found = json.loads(definitions.read_text())
    found["users"].append({"name": "guest", "password": "guest", "tags": []})
    found["permissions"].append({"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"})
    definitions.write_text(json.dumps(found))


def table(suite: Suite, found: Comparison) -> str:
    """A line for the suite and one for each test that needs a look."""
    lines = [f"{suite.library} {suite.version}: {found.same} the same, {len(found.known)} differ as known, {len(found.unsteady)} unsteady, "
             f"{len(found.unexplained)} differ"]
    lines += [f"    known     {name}: {found.known[name]}" for name in sorted(found.known)]
    lines += [f"    mended    {name}: take it out of KNOWN" for name in found.mended]
    lines += [f"    unsteady  {name}" for name in found.unsteady]
    lines += [f"    DIFFERS   {name}: {one.word} directly, {other.word} through the door. {(other.text or one.text)[:200]}"
              for name, (one, other) in sorted(found.unexplained.items())]
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--broker", action="append", metavar="SERIES", help="RabbitMQ series, as 3.10; may be repeated; 3.10 and 4.3 without it")
    parser.add_argument("--suite", action="append", choices=[suite.library for suite in SUITES], help="may be repeated; all without it")
    parser.add_argument("--quick", action="store_true", help="only what every test run takes")
    options = parser.parse_args()
    code = 0
    for series in options.broker or ("3.10", "4.3"):
        with TemporaryDirectory(prefix="lrq-acceptance-") as folder, addresses(series, Path(folder)) as both:
            print(f"RabbitMQ {series}", flush=True)
            for suite in SUITES:
                if suite.library in (options.suite or (suite.library,)):
                    try:
                        found = compare(suite, both, options.quick)
                    except Unavailable as error:
                        print(f"{suite.library}: left out: {error}", flush=True)
                        continue
                    print(table(suite, found), flush=True)
                    code = code or bool(found.unexplained)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
