"""Kinds and arguments of queues, and what RabbitMQ does with messages by itself, over one failover for all of them: what a client finds on the
new primary.

Rules: the cases are the classes of `queue_kinds_*`, prepared together; one test per case; a case that cannot be prepared fails alone. All of them
wait for what the backup's broker must hold before the primary is killed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import queue_kinds_exchanges  # noqa: F401 - the cases register themselves
import queue_kinds_levels  # noqa: F401
import queue_kinds_limits  # noqa: F401
import queue_kinds_operator  # noqa: F401
import queue_kinds_plain  # noqa: F401
from load import eventually, in_sync, replace_primary
from queue_stage import KINDS, Kind, Site, Stage

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills")]

AT_ONCE = 12  # kinds that are prepared at a time


@dataclass
class After:
    """The new primary. `failed`: kinds that could not be prepared, or were not as they should be, and why; `late`: those whose backup was not."""

    door: Site
    kinds: dict[str, Kind]
    failed: dict[str, str]
    late: list[str]


@pytest.fixture(scope="module")
def after(pair: Lab) -> Iterator[After]:
    primary, backup = in_sync(pair)
    stage = Stage.of(pair, primary, backup)
    kinds = {name: cls() for name, cls in KINDS.items()}
    failed: dict[str, str] = {}

    def each(what: Callable[[Kind], None]) -> None:
        def one(name: str) -> None:
            try:
                what(kinds[name])
            except Exception:
                failed[name] = traceback.format_exc()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, [name for name in kinds if name not in failed]))

    each(lambda one: one.prepare(stage))
    in_sync(pair, applied=True)
    waiting = [name for name in kinds if name not in failed]

    def all_there() -> bool:
        waiting[:] = [name for name in waiting if not kinds[name].before(stage)]
        return not waiting

    try:
        eventually("the backup's queues to be as the primary's", all_there)
    except AssertionError:
        pass
    replace_primary(pair, primary, backup)
    door = Site(pair.nodes[backup].door, stage.door.run)
    each(lambda one: one.first(door))
    yield After(door, kinds, failed, waiting)
    pair.start(primary)


@pytest.mark.quick("3.10", "4.3", only=r"-(classic|quorum|stream|delivery_limit|retry_loop|drop_head|reject_publish|message_ttl)\]")
@pytest.mark.parametrize("name", KINDS)
def test_over_a_failover(after: After, name: str) -> None:
    assert name not in after.failed, after.failed[name]
    try:
        after.kinds[name].check(after.door)
    except Exception:
        after.failed[name] = traceback.format_exc()  # a check takes out what it finds: the second try would find nothing wrong
        raise
    assert name not in after.late, "the backup's queues were not as the primary's before the failover"
