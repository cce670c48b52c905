"""The door's rig, the two publishers and the pair in containers, for the tests that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator

import pytest
from container_lab import ContainerLab, left, why_not
from door_rig import Rig
from load import in_sync
from mending import mend
from publisher_api import BlockingPublisher, LoopThread
from traffic import Traffic

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a test that failed, and before the next or the same once more: its lab is mended. Containers have their own way (`containers`)."""
    report = yield
    item.stash[_failed] = report.failed or (report.when != "setup" and item.stash.get(_failed, False))
    if report.when == "teardown" and item.stash[_failed]:
        labs = {id(each): each for each in getattr(item, "funcargs", {}).values() if isinstance(each, Lab) and not isinstance(each, ContainerLab)}
        for said in filter(None, map(mend, labs.values())):
            item.warn(pytest.PytestWarning(said))
    return report


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No load outlives its test."""
    yield
    Traffic.abandon_all()


@pytest.fixture
def rig(pair: Lab) -> Iterator[Rig]:
    """The shared pair; checks after the test that its logs are whole."""
    rig = Rig(pair)
    yield rig
    rig.finish()


@pytest.fixture(scope="session")
def container_pair(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerLab]:
    """See `containers`."""
    directory = tmp_path_factory.mktemp("containers")
    if reason := why_not(directory):
        pytest.skip(reason)
    with ContainerLab({"east": 2}, directory / "lab", broker_version) as lab:
        yield lab
    assert left() == []


@pytest.fixture
def containers(container_pair: ContainerLab) -> Iterator[ContainerLab]:
    """A shared HA pair whose nodes are containers; whoever wants other keys of [replication] than the last sets them (load.replication)."""
    yield container_pair
    container_pair.recover()


@pytest.fixture
def names(lab: Lab) -> tuple[str, str]:
    """Primary and backup of a module's own lab, in sync."""
    return in_sync(lab)


@pytest.fixture(params=["sync", "async"])
def api(request: pytest.FixtureRequest) -> Iterator[Callable[..., Publisher | BlockingPublisher]]:
    """Publisher, then AsyncPublisher behind the same methods."""
    if request.param == "sync":
        yield Publisher
        return
    loop = LoopThread()
    yield functools.partial(BlockingPublisher, loop)
    loop.end()
