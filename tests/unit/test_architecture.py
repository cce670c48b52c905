"""The walks of docs/architecture.md name files and functions that exist, in at most twelve steps each."""

from __future__ import annotations

import ast
import re

import pytest
from named_tests import TESTS

ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
SECTION = PAGE.partition("## The path of a message\n")[2].partition("\n## ")[0]
WALKS = {walk[0]: walk[1] for walk in re.findall(r"\*\*(.+?)\*\*.*\n\n((?:\d+\. .*\n)+)", SECTION)}
NAMED = re.compile(r"`(\w[\w/]+\.py)` `([\w.]+)`")


def defined(path: str) -> set[str]:
    """Functions of a file, methods with their class."""
    found = set()
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_the_walks_are_those_that_a_stranger_needs() -> None:
    assert list(WALKS) == ["Publish → confirm", "Ack", "Push at a backup", "Log entry → receive queue"]


@pytest.mark.parametrize("walk", WALKS)
def test_each_step_of_a_walk_names_what_is_there(walk: str) -> None:
    steps = WALKS[walk].splitlines()
    assert 1 < len(steps) <= 12
    for step in steps:
        named = NAMED.findall(step)
        assert named, step
        for path, function in named:
            assert function in defined(path), step
