"""What `make` has installed for which command, on a machine that lacks it and has no apt-get to do it with."""

from __future__ import annotations

import os
import platform
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


@pytest.mark.parametrize("asked", [{}, {"LRQ_FAULT_HOURS": "2"}, {"LRQ_FUZZ_DOOR": "1000000"}], ids=str)
def test_what_is_asked_for_is_not_cut_short(asked: dict[str, str]) -> None:
    """Runs of hours ended after the time that all tests together have."""
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", TESTS / "unit" / "test_unseen.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | asked
    said = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120).stdout
    assert ("session timeout: 31536000.0s" in said) is bool(asked), said


@pytest.mark.parametrize(("arguments", "wants"), [("", False), ("--tls", True), ("--broker 4.3 --tls", True), ("--brokers-only", False)])
def test_a_lab_with_tls_asks_for_it(arguments: str, wants: bool) -> None:
    said = subprocess.run(["make", "-n", "-C", ROOT, "lab", f"ARGS={arguments}"], capture_output=True, text=True, check=True, timeout=60).stdout
    setup = next(line for line in said.splitlines() if line.startswith("scripts/setup"))
    assert ("--tls" in setup.split()) is wants


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt-get on this machine")
@pytest.mark.parametrize(
    ("sources", "mirror"),
    [
        ("deb http://first.example/debian other main\ndeb http://own.example/debian/ CODENAME main\n", "http://own.example/debian/"),
        ("deb http://own.example/debian-security stable-security main\ndeb http://own.example/debian stable main\n", "http://own.example/debian/"),
        (
            "deb http://own.example/debian CODENAME main\ndeb https://other.example/linux/debian CODENAME stable\n"
            "deb http://third.example/debian CODENAME main\n", "http://own.example/debian/",
        ),
        ("", ""),
    ],
)
def test_the_mirror_is_found_where_apt_has_downloaded_nothing(sources: str, mirror: str, tmp_path: Path) -> None:
    """As in images of Debian: it was said that apt had no mirror."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if "CODENAME" in sources and not codename:
        pytest.skip("this machine's system has no codename")
    (tmp_path / "sources.list").write_text(sources.replace("CODENAME", codename))
    (tmp_path / "lists").mkdir()
    (tmp_path / "apt.conf").write_text(
        f'Dir::State::lists "{tmp_path}/lists"; Dir::Etc::sourcelist "{tmp_path}/sources.list"; Dir::Etc::sourceparts "/dev/null";'
    )
    environment = os.environ | {"APT_CONFIG": str(tmp_path / "apt.conf")}
    found = subprocess.run([ROOT / "scripts" / "mirror"], capture_output=True, text=True, env=environment, timeout=60)
    assert (found.returncode, found.stdout.strip()) == (0 if mirror else 1, mirror), found.stderr
    assert ("no Debian mirror in its sources" in found.stderr) is (not mirror)
