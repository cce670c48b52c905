"""A check: a pure rule over facts, and its findings. No I/O.

Rule: facts that could not be read never pass for good ones: a check that needs them is skipped, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from .facts import Facts, Unread

T = TypeVar("T")


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        level: How bad it is.
        text: What, and why that matters: one sentence or two.
        todo: What mends it, where no command can; empty: `command` does, or nothing has to.
        command: The command that mends it, ready to be pasted; empty: there is none.
    """

    level: Level
    text: str
    todo: str = ""
    command: str = ""


@dataclass(frozen=True)
class Check(Generic[T]):
    """A check.

    Attributes:
        name: Its name.
        about: What has to hold, for the documentation.
        reads: The part of the facts that the rule needs.
        rule: What is wrong with that part; nothing: all is well.
        passed: Text if all is well.
        worst: The worst level that its rule gives.
        mends: How an operator mends it, for the documentation.
    """

    name: str
    about: str
    reads: Callable[[Facts], T | Unread]
    rule: Callable[[T, Facts], Iterator[Finding]]
    passed: str
    worst: Level
    mends: str

    def run(self, facts: Facts) -> list[Finding]:
        """The findings: one at least."""
        found = self.reads(facts)
        if isinstance(found, Unread):
            return [Finding(Level.SKIPPED, found.why)]
        return list(self.rule(found, facts)) or [Finding(Level.OK, self.passed)]


@dataclass(frozen=True)
class Checked:
    """A finding, and the check that has it."""

    check: str
    finding: Finding


def run_checks(checks: Sequence[Check[Any]], facts: Facts) -> list[Checked]:
    """The findings of all checks, in their order."""
    return [Checked(check.name, finding) for check in checks for finding in check.run(facts)]


def warn(text: str, todo: str = "", command: str = "") -> Finding:
    return Finding(Level.WARN, text, todo, command)


def fail(text: str, todo: str = "", command: str = "") -> Finding:
    return Finding(Level.FAIL, text, todo, command)
