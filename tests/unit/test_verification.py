"""docs/verification.md is up to date, and every promise and condition has a test that tries to break it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verification
from named_tests import TESTS
from verification import ANY, BEGIN, DOCUMENT, END, SECTIONS, STATEMENTS, BadMark, all_proofs, page, proofs_of, rules_of, section_of

ALL = ("3.10", "4.3")


def written(folder: Path, marked: str, module: str = "") -> Path:
    """A file with one test, which asks for a broker."""
    path = folder / "test_it.py"
    path.write_text(f"import pytest\n{module}\n{marked}\ndef test_it(broker_version: str) -> None: ...\n")
    return path


def test_the_page_is_up_to_date() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text == page(rules_of(text)), "run: python tests/verification.py"


def test_every_slug_has_a_test_and_a_section() -> None:
    assert STATEMENTS.keys() - {proof.slug for proof in all_proofs()} == set()
    assert {section_of(slug) for slug in STATEMENTS} == SECTIONS.keys()


def test_cases_are_parameters_of_their_tests() -> None:
    """By their names: of functions, of strings in the file, or of classes, as `DropHead` is `drop_head`."""
    named = [proof for proof in all_proofs() if proof.cases]
    assert named
    kinds = "".join(path.read_text("utf-8") for path in (TESTS / "integration").rglob("queue_kinds_*.py"))
    classes = {re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower() for name in re.findall(r"^class (\w+)", kinds, re.MULTILINE)}
    for proof in named:
        marks = re.compile(r"^@pytest\.mark\.proves\((?:.*\)$|\n(?:    .*\n)*\)$)", re.MULTILINE)
        words = set(re.findall(r"\w+", marks.sub("", proof.file.read_text("utf-8")))) | classes
        assert set(proof.cases) <= words, proof


@pytest.mark.parametrize("part", ["BEGIN", "END"])
def test_the_rules_stand_between_the_marks_of_their_program(part: str) -> None:
    assert f'"{getattr(verification, part)}"' in next(TESTS.rglob("table.py")).read_text("utf-8")
    assert DOCUMENT.read_text("utf-8").count({"BEGIN": BEGIN, "END": END}[part]) == 1


@pytest.mark.parametrize(
    ("marked", "module", "found"),
    [
        ('@pytest.mark.proves("G1", "strict")', "", [("G1", "test_it", (), ALL), ("strict", "test_it", (), ALL)]),
        ('@pytest.mark.quick\n@pytest.mark.proves("G1", cases=("a", "b"))', "", [("G1", "test_it", ("a", "b"), ALL)]),
        ('@pytest.mark.one_version("4.3")\n@pytest.mark.proves("G1")', "", [("G1", "test_it", (), ("4.3",))]),
        ('@pytest.mark.proves("G1")', 'pytestmark = [pytest.mark.broker, pytest.mark.one_version("3.10")]', [("G1", "test_it", (), ("3.10",))]),
        ("", 'pytestmark = pytest.mark.proves("G1")', [("G1", "", (), ALL)]),
        ("", 'pytestmark = [pytest.mark.broker, pytest.mark.proves("G1")]', [("G1", "", (), ALL)]),
        ('@pytest.mark.proves("G1")\nclass TestIt: ...', "", [("G1", "TestIt", (), ())]),
        ("@pytest.mark.quick", "pytestmark = pytest.mark.broker", []),
    ],
)
def test_marks_are_read(tmp_path: Path, marked: str, module: str, found: list[tuple[object, ...]]) -> None:
    assert [(p.slug, p.name, p.cases, p.versions) for p in proofs_of(written(tmp_path, marked, module))] == found


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ('@pytest.mark.proves("G7")', r"test_it\.py::test_it: the slug 'G7' is not in STATEMENTS"),
        ("@pytest.mark.proves", 'a mark is as proves("G1", "strict")'),
        ("@pytest.mark.proves()", "a mark is as proves"),
        ('@pytest.mark.proves("G1", only="a")', "a mark is as proves"),
        ("@pytest.mark.proves(SLUG)", "literal strings"),
    ],
)
def test_a_wrong_mark_is_an_error(tmp_path: Path, marked: str, message: str) -> None:
    with pytest.raises(BadMark, match=message.replace("(", r"\(").replace(")", r"\)")):
        proofs_of(written(tmp_path, marked))


def test_versions_are_those_that_a_test_runs_on() -> None:
    """Fixtures ask for brokers, too: those of the file, those that it imports, those of each conftest.py; a test without the fixture has one."""
    by_test = {(proof.file.name, proof.name): proof.versions for proof in all_proofs()}
    assert by_test["test_three_nodes.py", ""] == ("4.3",)
    assert by_test["test_queue_kinds.py", "test_over_a_failover"] == ALL
    assert by_test["test_applier.py", "test_sweep_gives_back_uncounted"] == ("4.3",)
    assert by_test["test_door.py", "test_rejected_for_good_then_taken_from_the_dead_letter_queue"] == ALL
    assert by_test["test_operator.py", ""] == (ANY,)
    assert by_test["test_ids.py", ""] == ()
