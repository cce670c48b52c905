"""The quick start of docs/spark/index.md, pasted: its programs and commands print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrq_ha.lab.files import python_environment
from lrq_ha.lab.keeper import end_with_parent

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[2] / "docs" / "spark" / "index.md"
FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^`(python \S+)` prints:\n\n((?: {4}.*\n)+)", re.MULTILINE)
LAB_TIMEOUT_S = 300.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A terminal beside `lrq-ha lab up`, with the line that it prints for Spark, in a folder of its own."""
    first = python_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = tmp_path / "lab.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "lrq_ha.cli.main", "lab", "up"]
        lab = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path, env=first, preexec_fn=end_with_parent)
    try:
        deadline = time.monotonic() + LAB_TIMEOUT_S
        while not (found := re.search(r"^ *export (LRQ_NODES)=(\S+) +# what west receives$", log.read_text(), re.MULTILINE)):
            assert lab.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield first | {found[1]: found[2]}
    finally:
        lab.send_signal(signal.SIGINT)
        lab.wait(120)


def run(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=900, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_quick_start(environment: dict[str, str], tmp_path: Path) -> None:
    """Takes more than a minute: a lab and four Sparks start."""
    page = PAGE.read_text("utf-8")
    for name, text in FILE.findall(page):
        (tmp_path / name).write_text(text)
    printed = {command: re.sub(r"^    ", "", lines, flags=re.MULTILINE) for command, lines in PRINTS.findall(page)}
    assert list(printed) == ["python read.py", "python follow.py", "python table.py"]

    assert "transmitted" in run("python stock.py", tmp_path, environment).stdout
    for command in ("python read.py", "python follow.py"):
        assert run(command, tmp_path, environment).stdout.strip() == printed[command].strip()
    assert run("python follow.py", tmp_path, environment).stdout.strip() == printed["python follow.py"].strip(), "a second run finds nothing new"
    pipeline = re.search(r"^ {4}(lrq-ha-pipeline .*)$", page, re.MULTILINE)
    says = re.search(r"`(version .*?) in 3\.9 s`", page)
    assert pipeline
    assert says
    words = pipeline[1].replace("lrq-ha-pipeline", f"{sys.executable} -m lrq_ha.spark.pipeline")
    assert says[1] in run(words, tmp_path, environment).stderr
    assert run("python table.py", tmp_path, environment).stdout.strip() == printed["python table.py"].strip()
