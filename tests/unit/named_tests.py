"""What the files of tests define, read without importing them: for checks that whatever names a test names one that exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@cache
def defined(file: Path) -> frozenset[str]:
    """Functions, classes and variables of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return frozenset(found)
