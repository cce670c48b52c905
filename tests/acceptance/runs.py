"""Getting a library's tests and running them against an address.

Rules: everything lies in the user's cache (`$XDG_CACHE_HOME/lrq-ha/acceptance`), nothing in the project's folder or virtualenv; what cannot be had
raises Unavailable with the reason; a run ends after a time that is set for it, and what has not been run by then counts as not run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from suites import Source, Suite

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrq-ha" / "acceptance"
TEST_TIMEOUT_S = 60
#: A crate's tests with the features they need and no TLS, which takes a C compiler and minutes.
_CARGO_TEST_COMMAND = ("cargo", "test", "--locked", "--no-fail-fast", "--no-default-features", "--features", "default-runtime")
_CARGO_ENVIRONMENT = {"CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_PROFILE_TEST_DEBUG": "0"}
_CARGO_FILE = re.compile(r"^\s+Running (?:tests/)?(\w+)")
_CARGO_TEST = re.compile(r"^test (\S+) \.\.\. (ok|FAILED|ignored)")
_CARGO_WORDS = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}


class Unavailable(Exception):
    """A suite cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended: passed, failed or skipped, and the last line of its error."""

    word: str
    text: str = ""


Outcomes = dict[str, Outcome]


def prepare(suite: Suite) -> Path:
    """The folder of the suite's sources, ready to run.

    Raises:
        Unavailable: The sources or what they need cannot be had.
    """
    with _locked(suite.library):
        sources = CACHE / f"{suite.library}-{suite.version}"
        recipe = hashlib.sha256(repr(suite).encode() + b"".join((HERE / "inside" / name).read_bytes() for name in sorted(suite.files))).hexdigest()
        stamp = sources / ".ready"
        if not stamp.exists() or stamp.read_text() != recipe:
            shutil.rmtree(sources, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                shutil.move(_FETCH[suite.source](suite, Path(work)), sources)
            for name, where in suite.files.items():
                shutil.copy(HERE / "inside" / name, sources / where)
            for name, old, new in suite.patches:
                text = (sources / name).read_text()
                if old not in text:
                    raise Unavailable(f"{suite.library} {suite.version}: {name} is not as it was")
                (sources / name).write_text(text.replace(old, new))
            stamp.write_text(recipe)
        if suite.source is Source.CRATE:
            _do([*_CARGO_TEST_COMMAND, "--no-run", "--tests"], sources, "cargo could not build its tests")
        else:
            _python()
        return sources


def run(suite: Suite, sources: Path, url: str, select: Sequence[str], timeout_s: float) -> Outcomes:
    """Runs tests of a suite against the AMQP URL of a broker or door, which has the user guest:guest.

    Args:
        suite: The suite.
        sources: What `prepare` returned.
        url: The address; its user does not matter.
        select: What to run: `suite.quick`, `suite.everything`, or names of tests from an earlier run.
        timeout_s: When to give up.
    """
    port = str(urlsplit(url).port)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_", "PYTHON"))}
    environment |= {"RABBITMQ_HOST": "127.0.0.1", "RABBITMQ_5672_TCP": port, "AMQP_ADDR": f"amqp://guest:guest@127.0.0.1:{port}/%2f"}
    runner = _run_cargo if suite.source is Source.CRATE else _run_pytest
    return runner(suite, sources, environment, select, timeout_s)


def _run_pytest(suite: Suite, sources: Path, environment: dict[str, str], select: Sequence[str], timeout_s: float) -> Outcomes:
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "outcomes"
        found.touch()
        environment |= {"OUTCOMES": str(found), "PYTHONPATH": f"{HERE / 'inside'}:{sources}"}
        deselect = [f"--deselect={name}" for name in suite.left_out]
        _limited([str(_python()), "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "log_cli=false",
                  "--timeout", str(TEST_TIMEOUT_S), *deselect, *select], sources, environment, timeout_s)
        return {name: Outcome(word, text) for name, word, text in map(json.loads, found.read_text().splitlines())}


def _run_cargo(suite: Suite, sources: Path, environment: dict[str, str], select: Sequence[str], timeout_s: float) -> Outcomes:
    outcomes: Outcomes = {}
    for one in select or ("",):
        file, _, name = one.partition("::")
        which = ["--test", file, "--", "--exact", name] if one else ["--tests", "--"]
        text = _limited([*_CARGO_TEST_COMMAND, *which, "--test-threads=1"], sources, environment | _CARGO_ENVIRONMENT, timeout_s)
        for line in text.splitlines():
            if running := _CARGO_FILE.match(line):
                file = running[1]
            elif (test := _CARGO_TEST.match(line)) and file != "unittests":
                outcomes[f"{file}::{test[1]}"] = Outcome(_CARGO_WORDS[test[2]])
    return outcomes


def _limited(command: Sequence[str], folder: Path, environment: dict[str, str], timeout_s: float) -> str:
    """What a command prints, until it ends or its time is over."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.seek(0)
        return output.read()


# ---- getting


def _python() -> Path:
    """The Python of the suites' virtualenv."""
    wanted = (HERE / "requirements.txt").read_text() + sys.version
    folder = CACHE / f"venv-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    with _locked("venv"):
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _do([sys.executable, "-m", "venv", str(folder)], CACHE, "no virtualenv can be made")
            _do([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(HERE / "requirements.txt")], CACHE,
                "pip could not install what the suites need")
            (folder / ".ready").touch()
    return python


def _from_sdist(suite: Suite, work: Path) -> Path:
    _do([str(_python()), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", suite.library,
         f"{suite.library}=={suite.version}"], work, f"pip could not get the sources of {suite.library} {suite.version}")
    (archive,) = work.glob("*.tar.gz")
    _do(["tar", "--extract", "--file", archive.name, "--one-top-level=sources"], work, f"{archive.name} cannot be unpacked")
    (sources,) = (work / "sources").iterdir()
    return sources


def _from_git(suite: Suite, work: Path) -> Path:
    address = os.environ.get(f"LRQ_ACCEPTANCE_{suite.library.upper()}") or suite.repository
    _do(["git", "clone", "--quiet", "--depth", "1", "--branch", suite.version, address, "sources"], work,
        f"git could not clone {suite.library} {suite.version} from {address}")
    return work / "sources"


def _from_crate(suite: Suite, work: Path) -> Path:
    if shutil.which("cargo") is None:
        raise Unavailable("there is no cargo on this machine")
    (work / "src").mkdir()
    (work / "src" / "lib.rs").touch()
    package = '[package]\nname = "fetch"\nversion = "0.1.0"\nedition = "2021"\n'
    (work / "Cargo.toml").write_text(f'{package}[dependencies]\n{suite.library} = "={suite.version}"\n')
    text = _do(["cargo", "metadata", "--quiet", "--format-version", "1"], work, f"cargo could not get {suite.library} {suite.version}")
    (manifest,) = (package["manifest_path"] for package in json.loads(text)["packages"] if package["name"] == suite.library)
    shutil.copytree(Path(manifest).parent, work / "sources")
    return work / "sources"


_FETCH = {Source.SDIST: _from_sdist, Source.GIT: _from_git, Source.CRATE: _from_crate}


def _do(command: Sequence[str], folder: Path, failure: str) -> str:
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200,
                              env=os.environ | _CARGO_ENVIRONMENT | {"GIT_TERMINAL_PROMPT": "0"})
    except OSError as error:
        raise Unavailable(f"{failure}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{failure} in {error.timeout:g} s") from error
    if done.returncode != 0:
        raise Unavailable(f"{failure}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Two runs at once must not make the same folder."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".lock-{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
