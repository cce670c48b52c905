"""Brokers for the tests.

    brokers    session: brokers without sidecars, east = e1, e2 and west = w1, once per RabbitMQ version; shared, so use names of your own
    pair       session: the same with sidecars, once per version; a test that breaks something mends it
    new_lab    makes a lab of the test's own, which ends with the test

Rules: nothing starts before a test asks for it; a version that is not on this machine is skipped with the command that gets it; tests that
use any of these carry the mark `broker`. `--broker 4.3` picks versions. Run in several processes (`-n 4`), tests that share brokers go to the
same one, so that these are started once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lrq_ha.lab import Lab, installations

#: The two ends of what is supported. Whatever else this machine has is tested too.
VERSIONS = ("3.10", "4.3")
_SHARED = ("pair", "brokers")
_FIXTURES = {*_SHARED, "new_lab"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broker", action="append", metavar="VERSION", help="test with this RabbitMQ only, as 3.10; may be repeated")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures at once and with the time: a run takes half an hour, and what broke is best looked at while it goes on."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{time.strftime('%H:%M:%S')} {report.when} of {report.nodeid} failed:\n{report.longreprtext[-2000:]}", flush=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "broker_version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--broker") or dict.fromkeys((*VERSIONS, *installations()))
        metafunc.parametrize("broker_version", versions, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if _FIXTURES & fixtures:
            item.add_marker(pytest.mark.broker)
        # Tests that share brokers or a module's lab stay in one process; all others go wherever there is time.
        version = getattr(item, "callspec", None) and item.callspec.params.get("broker_version")
        if version or "integration" in item.path.parts or "spark" in item.path.parts:
            shared = next((name for name in _SHARED if name in fixtures), item.path.stem)
            item.add_marker(pytest.mark.xdist_group(f"{version} {shared}" if version else item.path.stem))


@pytest.fixture(scope="session")
def broker_version(request: pytest.FixtureRequest) -> str:
    """A RabbitMQ series that is on this machine."""
    version: str = request.param
    if version not in installations():
        pytest.skip(f"RabbitMQ {version} is not on this machine: scripts/setup --broker {version}")
    return version


@pytest.fixture(scope="session")
def brokers(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Shared brokers without sidecars."""
    directory = tmp_path_factory.mktemp("brokers")
    with Lab({"east": 2, "west": 1}, directory, broker_version, brokers_only=True) as lab:
        yield lab


@pytest.fixture(scope="session")
def pair(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A shared HA pair and a sink site."""
    with Lab({"east": 2, "west": 1}, tmp_path_factory.mktemp("pair"), broker_version) as lab:
        yield lab


@pytest.fixture
def new_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Makes labs that are not up yet, each in a folder of its own; takes what `Lab` takes but the folder."""
    labs: list[Lab] = []

    def make(groups: dict[str, int], **options: Any) -> Lab:
        labs.append(Lab(groups, tmp_path / f"lab{len(labs)}", **options))
        return labs[-1]

    yield make
    for lab in labs:
        lab.down()
