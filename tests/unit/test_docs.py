"""Whatever the documentation names as a test, or as a file of tests, is there; and every scenario of docs/scenarios.md has its answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from named_tests import TESTS, defined

ROOT = TESTS.parent
SCENARIOS = ROOT / "docs" / "scenarios.md"
PATH = re.compile(r"\btests/[\w./-]*\w")
FILE = re.compile(r"\btest_\w+\.py\b")
TEST = re.compile(r"\btest_\w+\b(?!\.py)")
IN_FILE = re.compile(r"\b\w+\.py::\w+")
LINK = re.compile(r"\[(?P<file>\w+\.py)(?:::(?P<name>\w+))?\]\(\.\./(?P<path>tests/[\w/]+\.py)\)")
ANSWER = re.compile(rf"{LINK.pattern}|Does not apply: |\*\*Not yet\*\*")


def wrong(page: str) -> list[str]:
    """What a page names and is not there."""
    files = list(TESTS.rglob("*.py"))
    found = [path for path in PATH.findall(page) if not (ROOT / path).exists()]
    found += set(FILE.findall(page)) - {file.name for file in files}
    found += set(TEST.findall(page)).difference(*map(defined, files))
    links = list(LINK.finditer(page))
    for link in links:
        path = ROOT / link["path"]
        if path.name != link["file"] or not path.exists() or (link["name"] and link["name"] not in defined(path)):
            found.append(link[0])
    linked = {f"{link['file']}::{link['name']}" for link in links}
    return found + [mention for mention in IN_FILE.findall(page) if mention not in linked]


BOTH = re.compile(rf"{LINK.pattern}(?P<between>[^|\[]{{0,80}}?)(?:\(both\b|, both\b)")
ONE_VERSION = re.compile(r"^@pytest\.mark\.one_version\(.*\n(?:@.*\n)*def (\w+)|^pytestmark = .*one_version", re.MULTILINE)


def of_one_version(page: str) -> list[str]:
    """Tests that are said to be for both versions of RabbitMQ, and run on one."""
    found = []
    for link in BOTH.finditer(page):
        marked = {mark[1] or "" for mark in ONE_VERSION.finditer((ROOT / link["path"]).read_text("utf-8"))}
        if "" in marked or link["name"] in marked:
            found.append(link[0])
    return found


def test_what_is_said_to_be_for_both_versions_runs_on_both() -> None:
    assert of_one_version((ROOT / "docs" / "guarantees.md").read_text("utf-8")) == []
    link = "(../tests/integration/{file}.py)"
    assert of_one_version(f"[test_three_nodes.py]{link.format(file='test_three_nodes')} (both)")
    assert of_one_version(f"[test_adopt.py::test_a_backup_has_what_was_there_before]{link.format(file='test_adopt')}, both)")
    assert not of_one_version(f"[test_adopt.py]{link.format(file='test_adopt')} (both)")
    assert not of_one_version(f"[test_three_nodes.py]{link.format(file='test_three_nodes')} (4.3), [x] (both)")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    assert wrong(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "`tests/unit/test_nothing.py`",
        "`tests/nowhere`",
        "`test_nothing.py`: order",
        "`test_nothing` in [test_docs.py](../tests/unit/test_docs.py)",
        "[test_docs.py::test_nothing](../tests/unit/test_docs.py)",
        "[test_docs.py::wrong](../tests/unit/test_protocol.py)",
        "test_docs.py::wrong, without a link",
    ],
)
def test_what_is_wrong_is_found(text: str) -> None:
    assert wrong(text)


def test_every_scenario_is_answered() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", SCENARIOS.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 50
    assert [scenario for scenario, answer in rows if not ANSWER.search(answer) and answer != "answer"] == []
