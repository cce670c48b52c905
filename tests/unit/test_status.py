"""What a primary tells of nodes that it cannot reach."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from typing import Any

import pytest

from broker_plugin.amqp.connection import Address
from broker_plugin.amqp.errors import AuthenticationFailed
from broker_plugin.door.server import Door
from lrq_ha.replication.events import Hello
from lrq_ha.replication.guard import QueueGuard
from lrq_ha.replication.log import BatchHeader, LogState
from lrq_ha.replication.positions import epoch_number
from lrq_ha.replication.retention import RECORD_BYTES
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import ReplicatingSubscription, StoredBatch
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.peers.link import Link


def troubles(leading: int, role: Role, problem: str) -> str:
    """What is told of a node with a link that has a problem."""

    async def go() -> str:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings))
        incarnation._node.leading, incarnation._node.role, incarnation._node.reason = leading, role, "reason"
        incarnation._sending.links[2].problem = problem
        return str(incarnation.status.tell()["reason"])

    return asyncio.run(go())


def test_a_primary_that_cannot_log_in_at_a_backup_says_so() -> None:
    """Nothing was said of it: the backup waited for a primary, and nobody told why that did not call it."""
    assert troubles(0x101, Role.ACTIVE, "user 'lrq' is refused") == "reason; e2: user 'lrq' is refused"
    assert troubles(0x101, Role.ACTIVE, "") == "reason"
    for role in (Role.CATCH_UP, Role.READY, Role.JOINING):
        assert troubles(0, role, "user 'lrq' is refused") == "reason (e2: user 'lrq' is refused)"


class Primary:
    """Node 1, which leads; entry n of its log was appended at second n, and has 1,000 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: int, mode: str = "available") -> None:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample().replace('mode = "available"', f'mode = "{mode}"')))
        incarnation = Incarnation(config, Door(config.door_settings))
        self.node, self.status, self.sending = incarnation._node, incarnation.status, incarnation._sending
        self.now = 0.0
        monkeypatch.setattr("lrq_ha.sidecar.status.time.monotonic", lambda: self.now)
        self.node.leading = epoch = epoch_number(1, 1)
        for number in range(1, end + 1):
            self.now = float(number)
            sets = ((1, frozenset({1, 2})),) if number == 1 else ()
            self.node.log.accept(BatchHeader(epoch, number, number, epoch if number > 1 else 0, epoch, sets))
            incarnation._log.watch.appended(number, 1000 - RECORD_BYTES)
            self.status.ticked()

    def tells(self) -> dict[str, Any]:
        """Of node 2."""
        return dict(self.status.tell()["peers"]["e2"])


def test_the_lag_is_all_that_a_backup_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was on its way to it was told: a few MB, however far it was behind, and nothing of one that was away."""

    async def go() -> None:
        primary = Primary(monkeypatch, 100)
        peer = primary.node.peers[2]
        peer.subscribed, peer.guard = True, QueueGuard(10)
        monkeypatch.setattr(primary.status._log.watch.retention, "behind", lambda has: 1000 * (100 - has))
        primary.sending._subscriptions[2] = subscription = ReplicatingSubscription(peer.guard)
        subscription.send(StoredBatch(BatchHeader(0x101, 11, 12, 0x101, 0x101), bytes(40)))
        told = primary.tells()
        assert (told["lag_entries"], told["lag_bytes"], told["log_bytes_behind"]) == (90, 90_000, 90_000)
        subscription.send(StoredBatch(BatchHeader(0x101, 13, 100, 0x101, 0x101), bytes(2)))
        assert primary.tells()["lag_bytes"] == 42, "to the byte, where all of it is on its way"
        peer.guard.place(51)
        peer.guard.acknowledge(20)
        assert primary.tells()["guard"] == {
            "first_guarded": 51, "ready": False, "new": 0, "sent": 30, "delayed": 0, "delayed_sent": 50,
        }  # fmt: skip
        del primary.sending._subscriptions[2]
        peer.subscribed, peer.guard = False, QueueGuard()
        told = primary.tells()
        assert (told["lag_entries"], told["lag_bytes"], told["lag_seconds"]) == (0, 0, 0.0), "in the set, it has all as far as is known"

    asyncio.run(go())


def test_the_lag_of_one_that_has_lost_its_log_and_stays_in_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to have all, and not to be in danger."""

    async def go() -> None:
        primary = Primary(monkeypatch, 100, "strict")
        peer = primary.node.peers[2]
        monkeypatch.setattr(primary.status._log.watch.retention, "behind", lambda has: 1000 * (100 - has))
        peer.left = "its broker went down"
        assert (primary.tells()["lag_entries"], primary.tells()["log_bytes_behind"]) == (None, None)
        peer.hello = Hello(Role.CATCH_UP, LogState(top=257, end=7), 0)
        assert (primary.tells()["lag_entries"], primary.tells()["log_bytes_behind"]) == (93, 93_000)
        peer.hello = Hello(Role.CATCH_UP, LogState(top=257), 0)
        assert primary.tells()["lag_entries"] is None

    asyncio.run(go())


def test_the_lag_in_seconds_goes_by_the_primarys_clock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other nodes' clocks say, or this machine's time of day."""

    async def go() -> None:
        primary = Primary(monkeypatch, 100)
        peer = primary.node.peers[2]
        peer.subscribed = True
        for claimed, of_day in ((0.0, 1e9), (1e12, 0.0), (-1e12, 1e12)):
            monkeypatch.setattr("lrq_ha.sidecar.status.time.time", lambda of_day=of_day: of_day)
            peer.heard_at = peer.progress_at = claimed
            for has, lag_s in ((100, 0.0), (90, 9.0), (10, 89.0)):
                peer.guard = QueueGuard(has)
                assert primary.tells()["lag_seconds"] == lag_s, "the first entry that it lacks was appended so long ago"

    asyncio.run(go())


def test_in_mode_strict_a_primary_says_whom_confirms_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        for mode, until in (("available", ""), ("strict", "nothing is confirmed until e2 has caught up{}, or until lrq-ha remove e2")):
            primary = Primary(monkeypatch, 5, mode)
            peer = primary.node.peers[2]
            primary.sending.links[2].problem = ""
            assert primary.tells()["problem"] == until.format("")
            peer.subscribed, peer.guard, peer.left = True, QueueGuard(2), "its broker went down"
            told = primary.status.tell()
            assert primary.tells()["problem"] == until.format(" (its broker went down)")
            assert told["members"] == ["e1"]
            assert until.format(" (its broker went down)") in told["reason"]
            assert "taken out" not in told["reason"]
            peer.left = ""
            assert not primary.tells()["problem"]

    asyncio.run(go())


def test_the_log_names_the_node(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not its number, which nothing else that an operator sees does."""

    async def open_(*_: object, **__: object) -> None:
        raise AuthenticationFailed(403, "user 'lrq' is refused")

    def nothing(*_: object) -> None: ...

    async def go() -> None:
        link = Link(1, "east", 2, "e2", Address("127.0.0.1"), nothing, nothing, nothing)
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        running.cancel()

    monkeypatch.setattr("lrq_ha.sidecar.peers.link.Connection.open", open_)
    with caplog.at_level(logging.INFO, "lrq_ha.links"):
        asyncio.run(go())
    assert caplog.messages[0].startswith("no link to e2: ")


def test_keys_that_differ_between_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group promises depends on its mode: a node with another one said so to nobody."""

    async def go() -> None:
        primary = Primary(monkeypatch, 10)
        peer, own = primary.node.peers[2], primary.node.settings.shared
        peer.hello = Hello(Role.READY, LogState(top=257, end=10), 0, software="0.2", shared=own)
        assert (primary.tells()["problem"], primary.tells()["software"]) == ("not connected yet", "0.2")
        primary.sending.links[2].problem = ""
        assert primary.tells()["problem"] == ""
        peer.hello = Hello(Role.READY, LogState(top=257, end=10), 0, shared=tuple({**dict(own), "mode": '"strict"'}.items()))
        said = 'replication.mode is "available" on e1 and "strict" on e2: make it equal on all nodes'
        assert primary.tells()["problem"] == said
        assert said in primary.status.tell()["reason"]

    asyncio.run(go())


def test_what_a_backups_broker_lacks_is_told_by_the_primary_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        primary = Primary(monkeypatch, 10)
        primary.sending.links[2].problem = ""
        primary.node.peers[2].hello = Hello(Role.READY, LogState(top=257, end=10), 0, lacks="it has no vhost 'shop'")
        assert "e2: it has no vhost 'shop'" in primary.status.tell()["reason"]
        assert primary.tells()["lacks"] == "it has no vhost 'shop'"

    asyncio.run(go())
