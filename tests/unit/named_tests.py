"""What the files of tests define, read without importing them: for checks that whatever names a test names one that exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
_DEFINITION = re.compile(r"^(?:(?:async )?def|class) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)


@cache
def defined(file: Path) -> frozenset[str]:
    """Functions, classes and variables of a module."""
    return frozenset(function or variable for function, variable in _DEFINITION.findall(file.read_text("utf-8")))
