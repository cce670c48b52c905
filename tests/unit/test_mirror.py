"""A broker's objects are made as the log has them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from broker_plugin.definitions.changes import Changes
from broker_plugin.definitions.management import Management, ManagementUnavailable, ObjectRefused
from broker_plugin.definitions.mirror import Mirror
from broker_plugin.definitions.objects import REPLICATED, Key, Listing, Objects, canonical

USER, OTHER, VHOST = ("users", "app"), ("users", "other"), ("vhosts", "shop")
RIGHTS, POLICY = ("permissions", "shop", "app"), ("policies", "shop", "p")
SHOVEL = ("parameters", "shovel", "shop", "s")
HAS: Objects = {
    VHOST: canonical({"tags": []}),
    USER: canonical({"password_hash": "x", "tags": []}),
    RIGHTS: "{}",
    POLICY: canonical({"pattern": "a", "definition": {"max-length": 3}}),
    SHOVEL: canonical({"value": {"src-uri": "amqp://u:secret@h"}}),
}


class Broker(Management):
    """A management API without HTTP."""

    def __init__(self, **_: object) -> None:
        self.user = "lrq"
        self.has: Objects = {}
        self.entered: set[str] = {"lrq"}
        self.asked: list[tuple[str, Key]] = []
        self.refuses: dict[Key, str] = {}
        self.says: dict[str, str] = {}  # values that it says otherwise
        self.down = False

    def _up(self) -> None:
        if self.down:
            raise ManagementUnavailable("it is down")

    async def read(self) -> Listing:
        self._up()
        return Listing({key: self.says.get(value, value) for key, value in self.has.items()}, frozenset(self.entered))

    async def has_vhost(self, vhost: str) -> bool:
        self._up()
        return ("vhosts", vhost) in self.has

    async def put(self, key: Key, value: str) -> None:
        self._up()
        await asyncio.sleep(0)
        if key in self.refuses:
            raise ObjectRefused(self.refuses[key])
        if key[0] == "permissions" and (("vhosts", key[1]) not in self.has or ("users", key[2]) not in self.has):
            raise ObjectRefused("vhost_or_user_not_found")
        self.asked.append(("put", key))
        self.has[key] = value

    async def delete(self, key: Key) -> None:
        self._up()
        self.asked.append(("delete", key))
        self.has.pop(key, None)

    async def plugins(self) -> list[str]:
        return ["rabbitmq_management"]

    async def enter(self, vhost: str) -> None:
        self._up()
        self.entered.add(vhost)


def align(
    broker: Broker, mirror: Mirror, wanted: Objects = HAS, *, leads: bool = False, clear: Collection[Key] = (), kinds: Collection[str] = REPLICATED
) -> Objects:
    """Brings the broker to the log's state, and asks for nothing when that is done once more."""
    asyncio.run(mirror.align(wanted, kinds, leads=leads, clear=clear))
    broker.asked.clear()
    here = asyncio.run(mirror.align(wanted, kinds, leads=leads)).objects
    assert not broker.asked
    return here


def made(kinds: Collection[str] = REPLICATED) -> tuple[Broker, Mirror]:
    broker = Broker()
    return broker, Mirror(broker, kinds)


def test_what_acts_by_itself_runs_where_the_leader_is() -> None:
    broker, mirror = made()
    quiet = {key: value for key, value in HAS.items() if key != SHOVEL}
    assert align(broker, mirror) == quiet
    assert align(broker, mirror, leads=True) == HAS
    assert align(broker, mirror) == quiet, "it follows again"
    asyncio.run(mirror.apply(Changes(HAS, frozenset())))
    assert broker.has == quiet, "nor does an entry of the log bring it to a backup"


def test_the_sidecars_user_enters_each_vhost_of_the_log() -> None:
    broker, mirror = made()
    broker.has[VHOST] = HAS[VHOST]
    align(broker, mirror)
    assert broker.entered == {"lrq", "shop"}


def test_what_the_log_lacks_is_kept_and_named_until_an_operator_says_otherwise() -> None:
    broker, mirror = made()
    broker.has[OTHER] = "{}"
    assert OTHER in align(broker, mirror)
    assert mirror.extras == {OTHER}
    assert OTHER not in align(broker, mirror, clear={OTHER})
    assert not mirror.extras


def test_objects_of_other_kinds_are_left_alone() -> None:
    broker, mirror = made({"vhosts", "policies"})
    broker.has[OTHER] = "{}"
    assert align(broker, mirror, clear={OTHER}, kinds={"vhosts", "users"}) == {VHOST: HAS[VHOST], OTHER: "{}"}
    asyncio.run(mirror.apply(Changes(HAS, frozenset({OTHER}))))
    assert broker.has.keys() == {VHOST, POLICY, OTHER}


def test_a_change_on_a_backup_is_set_back() -> None:
    broker, mirror = made()
    align(broker, mirror)
    broker.has[USER] = canonical({"password_hash": "mine", "tags": ["administrator"]})
    del broker.has[POLICY]
    assert align(broker, mirror)[USER] == HAS[USER]
    assert broker.has[POLICY] == HAS[POLICY]


def test_a_refused_object_is_named_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    broker, mirror = made()
    broker.refuses[VHOST] = "no such type"
    align(broker, mirror)
    assert mirror.refused == {VHOST: "no such type", RIGHTS: "vhost_or_user_not_found"}
    assert broker.has.keys() == {USER, POLICY}
    assert len([line for line in caplog.messages if "no such type" in line]) == 1, "once, though it is tried again"
    assert not mirror.find_news(HAS, broker.has).deleted & mirror.refused.keys(), "a leader does not take it for deleted"
    broker.refuses.clear()
    align(broker, mirror)
    assert not mirror.refused


def test_a_value_that_a_broker_says_otherwise_is_set_once() -> None:
    """RabbitMQ 3.10 has no default queue type."""
    broker, mirror = made()
    broker.says[HAS[VHOST]] = other = canonical({"tags": [], "more": True})
    assert align(broker, mirror)[VHOST] == other
    assert VHOST not in mirror.find_news(HAS, {VHOST: other}).set, "nor does a leader take it for news"
    assert VHOST in mirror.find_news(HAS, {VHOST: "{}"}).set


def test_a_deletion_that_fails_is_made_up_for() -> None:
    broker, mirror = made()
    broker.has |= HAS | {OTHER: "{}"}
    broker.down = True
    with pytest.raises(ManagementUnavailable):
        asyncio.run(mirror.apply(Changes({}, frozenset({USER, RIGHTS}))))
    broker.down = False
    left = {key: value for key, value in HAS.items() if key not in (USER, RIGHTS)}
    assert align(broker, mirror, left).keys() == left.keys() - {SHOVEL} | {OTHER}
    asyncio.run(mirror.apply(Changes({USER: HAS[USER]}, frozenset())))
    assert USER in align(broker, mirror, {**left, USER: HAS[USER]}), "it is owed no more"


def test_a_change_goes_in_an_order_in_which_it_can() -> None:
    broker, mirror = made()
    asyncio.run(mirror.apply(Changes(dict(reversed(HAS.items())), frozenset())))
    assert [key[0] for _, key in broker.asked] == ["vhosts", "users", "permissions", "policies"]
    broker.asked.clear()
    asyncio.run(mirror.apply(Changes({}, frozenset(HAS))))
    assert [key[0] for _, key in broker.asked] == ["parameters", "policies", "permissions", "users", "vhosts"]


@pytest.mark.parametrize("known", [True, False])
def test_a_vhost_is_made_before_its_queues(known: bool) -> None:
    broker, mirror = made()
    assert asyncio.run(mirror.provide_vhost("shop", HAS if known else {}))
    assert (broker.has, broker.entered) == ({VHOST: HAS[VHOST] if known else "{}"}, {"lrq", "shop"})
    assert not asyncio.run(mirror.provide_vhost("shop", HAS)), "it is there"
