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


@pytest.mark.proves("queue: classic and quorum", cases=("classic", "classic_transient_messages", "lazy", "quorum", "does_not_answer_for_a_while"))
@pytest.mark.proves("queue: priority", cases=("priority", "priority_quorum"))
@pytest.mark.proves("queue: stream", cases=("stream",))
@pytest.mark.proves("queue: single active consumer", cases=("single_active_consumer", "single_active_consumer_classic"))
@pytest.mark.proves("queue: TTL", cases=("queue_ttl", "queue_ttl_quorum", "message_ttl", "message_ttl_quorum", "ttl_that_ends_later_on_the_backup"))
@pytest.mark.proves("queue: dead letters", cases=("dead_letters_in_a_chain",))
@pytest.mark.proves("queue: retry loop", cases=("retry_loop",))
@pytest.mark.proves(
    "queue: drop-head",
    cases=(
        "drop_head", "drop_head_quorum", "drop_head_while_consumers_ack", "drop_head_of_a_priority_queue", "drop_head_to_dead_letters",
    ),
)
@pytest.mark.proves("queue: length in bytes", cases=("drop_head_by_bytes", "drop_head_by_bytes_quorum", "reject_publish_by_bytes"))
@pytest.mark.proves("queue: at-least-once", cases=("at_least_once_dead_letters",))
@pytest.mark.proves("queue: reject-publish", cases=("reject_publish", "reject_publish_quorum"))
@pytest.mark.proves("queue: reject-publish-dlx", cases=("reject_publish_dlx",))
@pytest.mark.proves("queue: delivery limit", cases=("delivery_limit", "lost_by_a_delivery_limit"))
@pytest.mark.proves("queue: expires", cases=("expires_used", "expires_used_quorum", "expires_unused", "expires_unused_quorum"))
@pytest.mark.proves(
    "queue: purged by an operator",
    cases=(
        "purged_by_an_operator", "purged_by_an_operator_quorum", "purged_while_a_consumer_holds", "purged_behind_an_exchange",
        "dead_letters_purged_by_an_operator",
    ),
)
@pytest.mark.proves(
    "queue: deleted by an operator",
    cases=(
        "deleted_by_an_operator", "deleted_by_an_operator_quorum", "deleted_by_an_operator_and_declared_anew",
        "deleted_by_an_operator_and_declared_otherwise", "deleted_by_an_operator_and_bound_anew",
    ),
)
@pytest.mark.proves("queue: silent removals", cases=("unbound_by_an_operator",))
@pytest.mark.proves("queue: deleted by clients", cases=("deleted_and_declared_anew_by_clients",))
@pytest.mark.proves(
    "queue: level configuration",
    cases=(
        "configuration", "configuration_quorum", "configuration_stream", "configuration_of_dead_letters",
        "configuration_behind_an_auto_delete_exchange",
    ),
)
@pytest.mark.proves("queue: level none", cases=("level_none",))
@pytest.mark.proves("queue: auto-delete", cases=("auto_delete_asked", "auto_delete_asked_and_left"))
@pytest.mark.proves("queue: exclusive", cases=("exclusive", "auto_delete"))
@pytest.mark.proves("exchange: alternate", cases=("alternate_exchange",))
@pytest.mark.proves("exchange: auto-delete", cases=("auto_delete_exchange",))
@pytest.mark.proves("exchange: deleted by an operator", cases=("exchange_deleted_by_an_operator_and_declared_otherwise",))
@pytest.mark.quick(only=r"-(classic|quorum|stream|delivery_limit|retry_loop|drop_head|reject_publish|message_ttl)\]")
@pytest.mark.parametrize("name", KINDS)
def test_over_a_failover(after: After, name: str) -> None:
    assert name not in after.failed, after.failed[name]
    try:
        after.kinds[name].check(after.door)
    except Exception:
        after.failed[name] = traceback.format_exc()  # a check takes out what it finds: the second try would find nothing wrong
        raise
    assert name not in after.late, "the backup's queues were not as the primary's before the failover"
