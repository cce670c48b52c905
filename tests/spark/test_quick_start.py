"""The quick start of docs/spark/index.md, pasted: its programs and commands print what the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pasted import paste, running_lab, write_files

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[2] / "docs" / "spark" / "index.md"
PRINTS = re.compile(r"^`(python \S+)` prints:\n\n((?: {4}.*\n)+)", re.MULTILINE)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A terminal with the line that the lab prints for Spark."""
    with running_lab(tmp_path, prints=r"^ *export (LRQ_NODES)=(\S+) +# what west receives$") as (environment, found):
        yield environment | {found[1]: found[2]}


def test_the_quick_start(environment: dict[str, str], tmp_path: Path) -> None:
    """Takes more than a minute: a lab and four Sparks start."""
    page = PAGE.read_text("utf-8")
    write_files(page, tmp_path)
    printed = {command: re.sub(r"^    ", "", lines, flags=re.MULTILINE) for command, lines in PRINTS.findall(page)}
    assert list(printed) == ["python read.py", "python follow.py", "python table.py"]

    assert "transmitted" in paste("python stock.py", tmp_path, environment).stdout
    for command in ("python read.py", "python follow.py"):
        assert paste(command, tmp_path, environment).stdout.strip() == printed[command].strip()
    assert paste("python follow.py", tmp_path, environment).stdout.strip() == printed["python follow.py"].strip(), "a second run finds nothing new"
    pipeline = re.search(r"^ {4}(lrq-ha-pipeline .*)$", page, re.MULTILINE)
    says = re.search(r"`(version .*?) in 3\.9 s`", page)
    assert pipeline
    assert says
    words = pipeline[1].replace("lrq-ha-pipeline", f"{sys.executable} -m lrq_ha.spark.pipeline")
    assert says[1] in paste(words, tmp_path, environment).stderr
    assert paste("python table.py", tmp_path, environment).stdout.strip() == printed["python table.py"].strip()
