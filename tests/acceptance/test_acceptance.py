"""Client libraries' own tests end the same through the door as against the broker, but for those that are known (suites.py).

One library in every run; `LRQ_ACCEPTANCE=quick` for a selection of each one's tests, which takes minutes; `LRQ_ACCEPTANCE=all` for everything, which
takes more than an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from compare import Addresses, addresses, compare, table
from runs import Unavailable
from suites import SUITES, Suite

CHOICE = os.environ.get("LRQ_ACCEPTANCE", "")
QUICK = CHOICE != "all"
ALWAYS = "amqp"

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1500 if QUICK else 20000)]


@pytest.fixture(scope="module")
def both(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with addresses(broker_version, tmp_path_factory.mktemp("acceptance")) as found:
        yield found


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.library)
def test_suite(both: Addresses, suite: Suite) -> None:
    if not CHOICE and suite.library != ALWAYS:
        pytest.skip("LRQ_ACCEPTANCE=quick runs it")
    try:
        found = compare(suite, both, QUICK)
    except Unavailable as error:
        pytest.skip(str(error))
    print(table(suite, found))
    assert found.same, "there was something to compare"
    assert not found.unexplained, table(suite, found)
