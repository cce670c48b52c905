"""The primary's broker goes into the log, and the log to a backup's broker."""

from __future__ import annotations

import asyncio
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from test_mirror import HAS, OTHER, RIGHTS, SHOVEL, USER, VHOST, Broker

from broker_plugin.definitions.changes import Changes, entries_of
from broker_plugin.definitions.logged import LoggedObjects
from broker_plugin.definitions.objects import REPLICATED, Listing, Objects
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.sidecar import definitions
from lrq_ha.sidecar.config import Config

EMPTY = '{"tags":[]}'
CONFIG = """
node = { name = "e1", id = 1, group = "east" }
broker = { url = "amqp://lrq:s@127.0.0.1:5672" }
door = { listen = "127.0.0.1:1" }
http = { listen = "127.0.0.1:2" }
"""


class Rig:
    """A node with a broker, and a log that takes what is appended at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicate: tuple[str, ...] = REPLICATED) -> None:
        self.broker = Broker()
        monkeypatch.setattr(definitions, "Management", lambda *_: self.broker)
        self.logged = LoggedObjects()
        self.entries: list[pb.DefinitionsChange] = []
        self.node = SimpleNamespace(leading=0x101, following=False, leader_epoch=0x101)
        self.declared: dict[tuple[str, str], bytes] = {}
        catalog = SimpleNamespace(definitions=SimpleNamespace(queues=lambda: self.declared))
        self.replica = SimpleNamespace(
            active=True, declared=catalog, index=SimpleNamespace(broker_objects=self.logged), reached=lambda: len(self.entries), append=self._append
        )
        core: Any = SimpleNamespace(node=self.node, replica=self.replica)
        config = Config.model_validate({**tomllib.loads(CONFIG), "definitions": {"replicate": list(replicate)}})
        self.definitions = definitions.Definitions(config, core)

    def _append(self, run: pb.Run, size: int) -> int:
        assert size == run.definitions.ByteSize()
        self.note(run.definitions)
        return len(self.entries)

    def note(self, entry: pb.DefinitionsChange) -> None:
        self.entries.append(entry)
        self.logged.noted(len(self.entries), entry)

    def has(self, objects: Objects) -> None:
        """The log has these."""
        for entry in entries_of(Changes(objects, frozenset()), REPLICATED):
            self.note(entry)

    def look(self) -> int:
        """Compares log and broker; returns how many entries came of it."""
        before = len(self.entries)
        asyncio.run(self.definitions.look())
        return len(self.entries) - before

    def follow(self) -> None:
        self.node.leading, self.node.following, self.node.leader_epoch = 0, True, 0x202
        self.replica.active = False


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_what_operators_change_goes_into_the_log(rig: Rig) -> None:
    rig.broker.has |= HAS
    assert rig.look() == 1
    assert (rig.logged.rows, rig.logged.kinds) == (HAS, frozenset(REPLICATED))
    assert rig.broker.entered == {"lrq", "shop"}
    assert rig.look() == 0
    rig.broker.has[OTHER] = EMPTY
    del rig.broker.has[USER]
    assert rig.look() == 1
    assert rig.logged.rows == {key: value for key, value in HAS.items() if key != USER} | {OTHER: EMPTY}


def test_a_new_primarys_broker_gets_what_it_lacks_before_its_own_count(rig: Rig) -> None:
    rig.has(HAS)
    rig.broker.has[OTHER] = EMPTY
    assert rig.look() == 1
    assert rig.broker.has == rig.logged.rows == HAS | {OTHER: EMPTY}


def test_what_an_operator_deletes_as_soon_as_the_node_leads_counts(rig: Rig) -> None:
    rig.has(HAS)
    rig.replica.active = False
    asyncio.run(rig.definitions.begin(rig.node.leading))
    assert rig.broker.has == HAS
    rig.replica.active = True
    del rig.broker.has[USER]
    assert rig.look() == 1
    assert USER not in rig.logged.rows


def test_what_a_new_primarys_broker_refuses_is_not_deleted_from_the_log(rig: Rig) -> None:
    rig.has(HAS)
    rig.broker.refuses[USER] = "too long"
    assert rig.look() == 0
    assert rig.look() == 0
    assert rig.logged.rows == HAS
    assert "user 'app' is refused by its broker: too long" in rig.definitions.trouble()


def test_nothing_is_deleted_for_one_answer_that_lacks_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are not read in one moment: a vhost that is made meanwhile may be in one and not in another."""
    rig.has(HAS)
    rig.look()
    whole, answers = Broker.read, [Listing({}, frozenset({"lrq", "shop"}))]

    async def read(broker: Broker) -> Listing:
        return answers.pop() if answers else await whole(broker)

    monkeypatch.setattr(Broker, "read", read)
    assert rig.look() == 0
    assert (rig.logged.rows, answers) == (HAS, [])


def test_a_management_that_is_down_changes_nothing_and_is_told(rig: Rig) -> None:
    rig.has(HAS)
    rig.broker.down = True
    assert rig.look() == 0
    assert rig.definitions.trouble() == "it is down: users and policies are not replicated; run: rabbitmq-plugins enable rabbitmq_management"
    rig.broker.down = False
    rig.look()
    assert (rig.definitions.trouble(), rig.broker.has) == ("", HAS)


def test_a_kind_that_is_replicated_no_more_is_forgotten_and_not_deleted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.has(HAS)
    for kinds, left in ((("users",), {USER: HAS[USER]}), ((), {})):
        other = Rig(monkeypatch, kinds)
        other.note(rig.logged.export())
        other.broker.has |= HAS
        assert other.look() == 1
        assert other.logged.kinds == set(kinds)
        assert other.logged.rows == left
        assert other.broker.has == HAS
        assert other.look() == 0


def test_a_node_that_has_lost_its_epoch_meanwhile_appends_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.broker.has |= HAS
    whole = Broker.read

    async def read(broker: Broker) -> Listing:
        rig.node.leading = 0x301
        return await whole(broker)

    monkeypatch.setattr(Broker, "read", read)
    assert rig.look() == 0


def test_a_backup_follows_entry_by_entry_and_makes_up_for_what_it_has_missed(rig: Rig) -> None:
    rig.follow()
    rig.has(HAS)
    asyncio.run(rig.definitions.apply(rig.entries[0], 1))
    assert rig.broker.has.keys() == HAS.keys() - {SHOVEL}
    rig.broker.down = True
    rig.note(next(entries_of(Changes({OTHER: EMPTY}, frozenset({USER, RIGHTS})), REPLICATED)))
    asyncio.run(rig.definitions.apply(rig.entries[1], 2))
    assert rig.definitions.trouble() == "it is down: users and policies are not replicated; run: rabbitmq-plugins enable rabbitmq_management"
    rig.broker.down = False
    rig.look()
    assert rig.broker.has.keys() == HAS.keys() - {SHOVEL, USER, RIGHTS} | {OTHER}


def test_a_backup_is_not_ahead_of_what_it_has_applied(rig: Rig) -> None:
    rig.follow()
    rig.has(HAS)
    rig.replica.reached = lambda: 0
    rig.look()
    assert not rig.broker.has
    rig.note(next(entries_of(Changes({}, frozenset({USER})), REPLICATED)))
    for sequence, entry in enumerate(rig.entries, 1):
        rig.replica.reached = lambda before=sequence - 1: before
        asyncio.run(rig.definitions.apply(entry, sequence))
        rig.look()
        assert (USER in rig.broker.has) is (sequence == 1), "nor behind what it just applies"


def test_a_vhost_of_the_log_is_made_if_vhosts_are_replicated(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.follow()
    assert not asyncio.run(rig.definitions.provide_vhost("shop")), "the log has no vhosts"
    rig.has(HAS)
    assert asyncio.run(rig.definitions.provide_vhost("shop"))
    assert rig.broker.has == {VHOST: HAS[VHOST]}
    rig.broker.down = True
    assert not asyncio.run(rig.definitions.provide_vhost("other"))


def test_a_vhost_that_the_log_has_queues_in_is_not_taken_for_an_extra(rig: Rig) -> None:
    """It may have been made here before the entry that sets it."""
    rig.follow()
    rig.has(HAS)
    other = ("vhosts", "other")
    rig.broker.has |= {("vhosts", "used"): "{}", other: "{}", OTHER: EMPTY}
    rig.declared["used", "orders"] = b""
    assert asyncio.run(rig.definitions.take(True))[1].endswith("delete 2 objects of its broker that the primary's lacks: vhost 'other', user 'other'")
    assert other in rig.broker.has
    assert asyncio.run(rig.definitions.take(False))[0]
    assert rig.broker.has.keys() == HAS.keys() - {SHOVEL} | {("vhosts", "used")}
    rig.replica.active = True
    assert not asyncio.run(rig.definitions.take(False))[0], "its own count"


def test_what_is_told_has_no_values(rig: Rig) -> None:
    rig.follow()
    rig.has(HAS)
    rig.broker.has |= {OTHER: EMPTY, SHOVEL: "{}"}
    rig.look()
    told = rig.definitions.tell()
    assert told is not None
    assert (told["objects"], told["differing"], told["named"], told["held_back"]) == (5, 1, ["user 'other'"], 1)
    assert asyncio.run(rig.definitions.compare()) == [{"object": "user 'other'", "how": "is here only"}]
    assert asyncio.run(rig.definitions.names()) == {
        "node": "e1", "vhosts": ["shop"], "users": {"app": [], "other": []}, "plugins": ["rabbitmq_management"]
    }  # fmt: skip
    assert "secret" not in f"{told} {rig.definitions.trouble()}"
