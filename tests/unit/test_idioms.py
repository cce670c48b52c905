"""Texts that an operator or a developer reads are in plain English: the idioms of house style that make them hard to read are gone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from named_tests import TESTS

ROOT = TESTS.parent
BANNED = re.compile(
    r"\b(nobody|everybody|anybody|anew|the same|see above|likewise|for ever|in earnest|so (?:is|are|does|do) (?!not\b))\b", re.IGNORECASE
)
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\)|\[[^\]\n]*::[^\]\n]*\]", re.MULTILINE | re.DOTALL)

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "compose" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [path for package in ("broker_plugin", "lrq_ha") for path in sorted((ROOT / package).rglob("*.py")) if not path.stem.endswith("_pb2")]


def found(text: str) -> list[str]:
    """The banned idioms of a text, each with its line."""
    return [f"{text[: hit.start()].count(chr(10)) + 1}: {hit[0]}" for hit in BANNED.finditer(text)]


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and comment of a module."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def said(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string of a module that is no docstring: what it logs, raises and prints."""
    tree = ast.parse(path.read_text("utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documents(page: Path) -> None:
    text = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page.read_text("utf-8"))
    assert found(text) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_docstrings_and_comments(module: Path) -> None:
    assert [f"{line}: {text}" for line, text in remarks(module) if BANNED.search(text)] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_texts_for_operators(module: Path) -> None:
    """Log lines, errors and help. A name (no space in it) is no text."""
    assert [f"{line}: {text}" for line, text in said(module) if " " in text.strip() and BANNED.search(text)] == []


def test_the_idioms_are_found() -> None:
    """A pattern that finds nothing would pass any text."""
    assert found("It is so.\nNobody begins anew; see above.") == ["2: Nobody", "2: anew", "2: see above"]
    assert list(said(ROOT / "broker_plugin" / "door" / "gate.py"))
