"""Brokers for the tests.

    brokers    session: brokers without sidecars, east = e1, e2 and west = w1, once per RabbitMQ version; shared, so use names of your own
    pair       session: the same with sidecars, once per version; a test that breaks something mends it
    containers session: an HA pair whose nodes are containers, once per version; skipped where there is no Docker
    new_lab    makes a lab of the test's own, which ends with the test

Rules: nothing starts before a test asks for it; a version that is not on this machine is skipped with the command that gets it; tests that
use any of these carry the mark `broker`. `--broker 4.3` picks versions; without it, what is marked `one_version` runs on that one only. `--quick`
and `--shard` choose a part of the tests (`tiers`). Run in several processes (`-n 5`), tests that share brokers go to the same one, so that these
are started once; those that take longest go first, and those that share nothing last, wherever there is time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENT_DOOR, patient_hypothesis, patient_pika
from tiers import Shard, is_quick, shard_of, unit_of, version_of

from lrq_ha.lab import Lab, installations

patient_pika()
patient_hypothesis()  # before the modules of the tests are read, whose settings begin with these

#: The two ends of what is supported. Whatever else this machine has is tested too.
VERSIONS = ("3.10", "4.3")
_SHARED = ("pair", "brokers", "containers")
_FIXTURES = {*_SHARED, "new_lab"}
#: So many pairs are shared, each by some of the files that ask for one: the tests of a pair run one after the other.
PAIRS = 3
#: What runs real brokers is tried once more where it fails, in the open (the summary counts it): a busy machine may stand still in any place.
_REAL = ("broker", "docker", "spark")


#: What is asked for by these takes as long as it takes; the limit on a whole run is for one that stands still.
_TAKES_LONG = ("LRQ_ACCEPTANCE", "LRQ_FAULT_HOURS", "LRQ_FAULT_ROUNDS", "LRQ_FUZZ", "LRQ_FUZZ_DOOR", "LRQ_QUEUES", "LRQ_SEEDS")
_YEAR_S = 365.0 * 86_400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broker", action="append", metavar="VERSION", help="test with this RabbitMQ only, as 3.10; may be repeated")
    parser.addoption("--quick", action="store_true", help="the quick tier only: all that needs no broker, and what is marked `quick`")
    parser.addoption("--shard", type=Shard.parse, metavar="I/N", help="the I-th of N parts of about equal time")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.session_timeout is None and any(os.environ.get(name) for name in _TAKES_LONG):
        config.option.session_timeout = _YEAR_S


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures at once and with the time: a run takes minutes, and what broke is best looked at while it goes on."""
    if report.outcome in ("failed", "rerun") and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{time.strftime('%H:%M:%S')} {report.when} of {report.nodeid} failed:\n{report.longreprtext[-2000:]}", flush=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "broker_version" in metafunc.fixturenames:
        one = metafunc.definition.get_closest_marker("one_version")
        versions = metafunc.config.getoption("--broker") or (one and one.args) or dict.fromkeys((*VERSIONS, *installations()))
        metafunc.parametrize("broker_version", versions, indirect=True, scope="session")


#: Groups of tests that take minutes. None of them should be left to run alone at the end.
_LONG = (
    "containers", "test_three_nodes", "test_restart", "test_operator", "test_frameworks", "test_joining_three", "test_joining",
    "test_queue_that_is_moved", "test_unseen_messages", "test_three_faults", "test_partition_of_three", "test_catching_up", "test_acceptance",
    "test_sites",
)  # fmt: skip


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the groups before xdist reads them, the order after pytest has sorted by parameters
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _deselect(config, items)
    pair_of = shard_of({unit_of(item) for item in items if "pair" in getattr(item, "fixturenames", ())}, PAIRS)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if _FIXTURES & fixtures:
            item.add_marker(pytest.mark.broker)
        if any(item.get_closest_marker(name) for name in _REAL):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=["Failed: Timeout", "^Broken: "]))
        # Tests that share brokers or a module's lab stay in one process.
        version = version_of(item)
        if version or "integration" in item.path.parts or "spark" in item.path.parts:
            shared = next((name for name in _SHARED if name in fixtures), item.path.stem)
            own = item.get_closest_marker("own_pair")
            if shared == "pair":
                shared = f"{own.args[0] if own else pair_of[unit_of(item)]} pair"
            alone = "spark" if "spark" in item.path.parts else item.path.stem  # one JVM for all of Spark's
            item.add_marker(pytest.mark.xdist_group(f"{version} {shared}" if version else alone))
    yield
    items.sort(key=_turn)


def _deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that `--quick` and `--shard` ask for."""
    quick, shard = config.getoption("--quick"), config.getoption("--shard")
    kept = [item for item in items if not quick or is_quick(item)]
    if shard is not None:
        part = shard_of(map(unit_of, kept), shard.of)
        kept = [item for item in kept if part[unit_of(item)] == shard.number]
    if len(kept) < len(items):
        chosen = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    if group is None:
        return len(_LONG) + 3
    name = str(group.args[0])
    if name == "spark":  # the longest of all
        return -1
    if name.endswith(" pair"):
        return 0
    module = name.rpartition(" ")[2]
    return 1 + _LONG.index(module) if module in _LONG else len(_LONG) + 2


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
    with Lab({"east": 2, "west": 1}, tmp_path_factory.mktemp("pair"), broker_version, door=PATIENT_DOOR) as lab:
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


@pytest.fixture
def not_http() -> Iterator[str]:
    """The address of a port that speaks AMQP, as a door's, to who takes it for that of a sidecar's HTTP: twice."""

    def answer() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"AMQP\0\0\x09\x01")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
