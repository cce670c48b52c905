"""A page of the documentation, pasted: its files, and a terminal beside `lrq-ha lab up`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lrq_ha.lab.files import python_environment
from lrq_ha.lab.keeper import end_with_parent

_FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAB_TIMEOUT_S = 300.0


def write_files(page: str, folder: Path) -> None:
    """Saves each file that a page shows; its first line names it."""
    for name, text in _FILE.findall(page):
        (folder / name).write_text(text)


@contextmanager
def running_lab(folder: Path, *options: str, prints: str) -> Iterator[tuple[dict[str, str], re.Match[str]]]:
    """`lrq-ha lab up` in a folder.

    Args:
        folder: Gets `.lab` and the output.
        options: Of `lab up`.
        prints: A regular expression for the output once the lab is ready.

    Yields:
        The environment of another terminal, with the commands of this checkout; and the match of `prints`.
    """
    environment = python_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = folder / "lab.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "lrq_ha.cli.main", "lab", "up", *options]
        lab = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=environment, preexec_fn=end_with_parent)
    try:
        deadline = time.monotonic() + LAB_TIMEOUT_S
        while (found := re.search(prints, log.read_text(), re.MULTILINE)) is None:
            assert lab.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield environment, found
    finally:
        lab.send_signal(signal.SIGINT)
        lab.wait(120)


def paste(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of a page; it has to succeed."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=900, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
