"""What `make` has installed for which command, on a machine that lacks it and has no apt-get to do it with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from named_tests import TESTS

ROOT = TESTS.parent


@pytest.mark.parametrize("options", [["--tls"], ["--extra", "dev"]])
def test_openssl_is_installed_where_certificates_are_made(options: list[str], tmp_path: Path) -> None:
    for program in ("dirname", "sed"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable, "HOME": os.environ["HOME"]}
    done = subprocess.run(["/bin/sh", ROOT / "scripts" / "setup", *options], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert "openssl" in done.stderr.partition("please install:")[2]


@pytest.mark.parametrize(("arguments", "wants"), [("", False), ("--tls", True), ("--broker 4.3 --tls", True), ("--brokers-only", False)])
def test_a_lab_with_tls_asks_for_it(arguments: str, wants: bool) -> None:
    said = subprocess.run(["make", "-n", "-C", ROOT, "lab", f"ARGS={arguments}"], capture_output=True, text=True, check=True, timeout=60).stdout
    setup = next(line for line in said.splitlines() if line.startswith("scripts/setup"))
    assert ("--tls" in setup.split()) is wants
