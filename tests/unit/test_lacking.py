"""A node whose broker lacks what the log needs: it is found out, told with the command that mends it, and nothing is passed over meanwhile.

Against real brokers: tests/integration/test_broker_lacks.py.
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import commands
from test_back_pressure import Backup, Slow, live
from test_lane import ADDRESS, Broker, applier_of

from broker_plugin.amqp import encode
from broker_plugin.amqp.errors import AccessRefused, BrokerRefuses, ChannelClosed, ConnectionClosed, ConnectionLimit, VhostNotFound
from broker_plugin.apply import applier as apply_applier
from broker_plugin.apply import broker_rights, waits
from broker_plugin.apply.applier import Applier
from broker_plugin.apply.broker_rights import BrokerRights
from broker_plugin.apply.declarer import Declarer
from broker_plugin.apply.partial_queues import PartialQueues
from broker_plugin.door.server import Door
from broker_plugin.log.replica import Entry
from broker_plugin.log.shortfall import Refusal, Shortfall
from broker_plugin.log.streams import Streams
from broker_plugin.reconcile.strays import Strays
from broker_plugin.sweep.sweeper import Sweeper
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation, Kept
from lrq_ha.sidecar.node.log_writer import LogWriter
from lrq_ha.sidecar.node.retention import Watch
from lrq_ha.sidecar.peers.log_shipping import LogShipping

pytestmark = pytest.mark.proves("broker-lacks")

GRANT = "rabbitmqctl set_permissions -p shop a '.*' '.*' '.*'"
REFUSED = ChannelClosed(403, "ACCESS_REFUSED - configure access to queue 'orders' in vhost '/' refused for user 'a'")
BY_ITSELF = "the broker refuses: run this"
PATIENCE_S = 60.0


async def until(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


# ---- rights are looked at ------------------------------------------------------------------------------------------------


class Rights:
    """The rights of user `a` at a broker that answers with `error`, when its vhost is opened or one of its queues is used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, entered: bool = False) -> None:
        self.error: LrqError | None = None
        self.error_at_open = False
        self.looks: list[str] = []
        self.changes = 0
        self.shortfall = Shortfall()
        definitions = SimpleNamespace(queues=lambda: [("shop", "orders"), ("/", "orders"), ("shop", "returns")])
        replica: Any = SimpleNamespace(
            shortfall=self.shortfall, entered={"shop"} if entered else set(), declared=SimpleNamespace(definitions=definitions)
        )

        async def open_vhost(_broker: object, vhost: str) -> object:
            self.looks.append(vhost)
            if self.error_at_open and self.error is not None:
                raise self.error
            return SimpleNamespace(error=None, abort=lambda: None)

        async def use(_connection: object, _queue: str) -> None:
            if self.error is not None:
                raise self.error

        def changed() -> None:
            self.changes += 1

        monkeypatch.setattr(broker_rights, "open_vhost", open_vhost)
        monkeypatch.setattr(broker_rights, "_use_a_queue", use)
        self.rights = BrokerRights(replica, ADDRESS, changed)

    def look(self, error: LrqError | None = None, *, at_open: bool = False) -> tuple[bool, str]:
        """Whether vhost `shop` may be written to, and what an operator is told."""
        self.error, self.error_at_open = error, at_open
        return asyncio.run(self.rights.look("shop")), self.shortfall.tell()


@pytest.mark.parametrize(
    ("error", "at_open", "said"),
    [
        (VhostNotFound(530, "NOT_ALLOWED - vhost shop not found"), True, f"its broker has no vhost 'shop': rabbitmqctl add_vhost shop && {GRANT}"),
        (AccessRefused(530, "NOT_ALLOWED - access to vhost"), True, f"user 'a' has no permissions in vhost 'shop' of its broker: {GRANT}"),
        (REFUSED, False, f"user 'a' lacks permissions in vhost 'shop' of its broker: {GRANT}"),
        (
            ChannelClosed(406, "PRECONDITION_FAILED - user_id property set to 'x' but authenticated user was 'a'"),
            False,
            "user 'a' of its broker may not publish for other users: rabbitmqctl set_user_tags a administrator impersonator",
        ),
    ],
    ids=["no vhost", "no permissions", "some permissions", "no tag"],
)
def test_what_the_sidecars_user_may_not_do_is_told_with_the_command(
    error: LrqError, at_open: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights = Rights(monkeypatch)
    assert rights.look() == (True, "")
    rights.rights._connections.clear()
    may, told = rights.look(error, at_open=at_open)
    assert not may
    assert told.startswith("cannot write its queues since ")
    assert told.endswith(f": {said}")
    assert rights.look(ConnectionClosed(0, "it went away")) == (False, told), "what is not known now is as it was"
    assert rights.changes == 1
    assert rights.look() == (True, "")
    assert rights.changes == 2


@pytest.mark.parametrize("error", [ConnectionLimit(530, "vhost connection limit (1)"), ConnectionClosed(0, "it went away")])
def test_a_broker_that_does_not_answer_says_nothing_of_rights(error: LrqError, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rights(monkeypatch).look(error, at_open=True) == (True, "")


def test_a_vhost_that_was_deleted_is_no_question_of_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = VhostNotFound(530, "NOT_ALLOWED - vhost shop not found")
    assert Rights(monkeypatch, entered=True).look(gone, at_open=True) == (True, "")


def test_every_vhost_of_the_log_is_looked_at_when_an_incarnation_begins_and_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a message comes for it: a node that looked as if it could lead could not."""
    monkeypatch.setattr(broker_rights, "BETWEEN_S", 0.001)
    monkeypatch.setattr(broker_rights, "REFUSED_AGAIN_S", 0.01)
    rights = Rights(monkeypatch)

    async def go() -> None:
        running = asyncio.create_task(rights.rights.run())
        await until(lambda: len(rights.looks) >= 2)
        assert sorted(rights.looks) == ["/", "shop"]
        assert not rights.shortfall.tell()
        running.cancel()
        rights.error = REFUSED
        for connection in rights.rights._connections.values():
            connection.error = REFUSED  # type: ignore[assignment]
        running = asyncio.create_task(rights.rights.run())
        await until(lambda: len(rights.looks) >= 6)
        assert "lacks permissions in vhost '/'" in rights.shortfall.tell()
        assert "lacks permissions in vhost 'shop'" in rights.shortfall.tell()
        rights.error = None
        await until(lambda: not rights.shortfall.tell())
        running.cancel()

    asyncio.run(go())
    assert broker_rights.AGAIN_S == 30.0


def test_rights_are_looked_at_from_the_beginning_of_an_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only when there is something to write."""
    config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
    looks = False

    async def nothing(*_: object) -> None: ...

    async def lasts(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def look(_rights: object) -> None:
        nonlocal looks
        looks = True
        await lasts()

    async def go() -> None:
        for part in (LogWriter, Watch, Applier, Sweeper, PartialQueues, Strays):
            monkeypatch.setattr(part, "run", lasts)
        monkeypatch.setattr(LogWriter, "rebuild", nothing)
        monkeypatch.setattr(LogShipping, "start", lambda _: None)
        monkeypatch.setattr(Streams, "close", nothing)
        monkeypatch.setattr(BrokerRights, "run", look)
        incarnation = Incarnation(config, Door(config.door_settings))
        running = asyncio.create_task(incarnation.run())
        await until(lambda: looks or running.done())
        assert not running.done()
        incarnation._life.end("the test is over")
        assert await running == "the test is over"

    asyncio.run(go())


# ---- nothing is passed over meanwhile ------------------------------------------------------------------------------------


def declares(queue: str) -> pb.Run:
    return pb.Run(topology=pb.Topology(vhost="/", method=encode.encode_method(commands.Queue.Declare(queue=queue, durable=True))))


def purges(queue: str) -> pb.Run:
    return pb.Run(purge=pb.Purge(vhost="/", queue=queue, before=1))


def deletes(queue: str) -> pb.Run:
    return pb.Run(topology=pb.Topology(vhost="/", method=encode.encode_method(commands.Queue.Delete(queue=queue))))


class Refusing:
    """An applier whose broker refuses declarations, deletions and purges for a missing right, so many times; `tries`: all of them."""

    def __init__(self, run: pb.Run, times: int = 2) -> None:
        self.left, self.tries = times, 0
        self.told: list[str] = []
        broker = Broker()
        self.replica = broker.replica
        self.applier: Any = applier_of(broker)
        self.lane = cast(Any, broker.lane)
        self.lane._waits, self.lane.abort = self.applier._waits, lambda: None
        self.lane.declarer = SimpleNamespace(execute=self._do, purge=self._do, try_again=self._do)
        self.applier._lanes["/"] = self.lane
        self.applier._rejected._sweeper = SimpleNamespace(is_rejecting=lambda _vhost: False)

        async def write_record() -> None:
            self.replica.barrier.recorded = 1

        self.replica.barrier.write_record = write_record
        self.replica.progress.safe = 1
        self.replica.to_apply.append(Entry(1, 1, run, 100, 0.0))

    async def _do(self, _method: object) -> None:
        self.tries += 1
        self.told.append(self.replica.shortfall.tell())
        if self.left:
            self.left -= 1
            raise BrokerRefuses("it may not", todo=GRANT)


@pytest.mark.parametrize("run", [declares("orders"), deletes("orders"), purges("orders")], ids=["declaration", "deletion", "purge"])
def test_what_the_broker_refuses_for_a_missing_right_is_tried_until_it_is_done(run: pb.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal ended its incarnation, and the confirms of the whole group waited for the next one."""
    monkeypatch.setattr(waits, "REFUSED_AGAIN_S", 0.01)

    async def scenario() -> None:
        refusing = Refusing(run)
        running = asyncio.create_task(refusing.applier.run())
        await until(lambda: refusing.tries >= 2 or running.done())
        assert not running.done()
        assert not refusing.replica.progress.tracker.applied
        await until(lambda: refusing.replica.progress.tracker.applied)
        running.cancel()
        assert refusing.tries == 3
        assert refusing.told[0] == ""
        assert all(told.startswith("cannot write its queues since ") and GRANT in told for told in refusing.told[1:])
        assert refusing.replica.shortfall.tell() == ""

    asyncio.run(scenario())


def test_a_purge_that_is_refused_for_a_missing_right_is_not_passed_over() -> None:
    class Channel:
        error = None

        async def channel(self) -> Channel:
            return self

        async def queue_purge(self, _queue: str) -> None:
            raise ChannelClosed(403, "ACCESS_REFUSED - read access to queue 'orders' in vhost '/' refused for user 'a'")

    both: Any = Channel()
    with pytest.raises(BrokerRefuses, match=r"rabbitmqctl set_permissions -p / a '\.\*' '\.\*' '\.\*'"):
        asyncio.run(Declarer(ADDRESS, both, "e2", Shortfall()).purge("orders"))


@pytest.mark.parametrize("hurry", [False, True])
def test_nothing_is_written_while_a_right_is_missing_but_for_a_promotion(hurry: bool) -> None:
    """What the log has for other vhosts waits too, as the log is carried out in its order; a promotion, which an operator insists on, goes on."""

    async def scenario() -> None:
        refusing = Refusing(declares("orders"), times=0)
        refusing.applier.hurry = hurry
        refusing.replica.shortfall.hold(("rights", "shop"), "cannot write its queues")
        running = asyncio.create_task(refusing.applier.run())
        if not hurry:
            await asyncio.sleep(0.1)
            assert refusing.tries == 0
            assert not running.done()
            refusing.replica.shortfall.hold(("rights", "shop"), "")
            refusing.applier.wake()
        await until(lambda: refusing.tries == 1)
        running.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("PRECONDITION_FAILED - user_id property set to 'app' but authenticated user was 'a'", "set_user_tags a administrator impersonator"),
        ("PRECONDITION_FAILED - message size 200 is larger than configured max size 100", "set one max_message_size on all brokers of the group"),
        ("ACCESS_REFUSED - write access to topic 'x' in exchange 't' in vhost '/' refused for user 'a'", "and then set_topic_permissions"),
    ],
    ids=["tag", "size", "topic"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_message_that_only_this_broker_refuses_is_not_passed_over(count: int, said: str, todo: str) -> None:
    async def scenario() -> None:
        broker = Broker()
        broker.publish(*range(1, count + 1))
        broker.lane._closed(ChannelClosed(403 if "ACCESS" in said else 406, said))
        with pytest.raises(BrokerRefuses) as caught:
            await broker.lane.tend()
        assert todo in str(caught.value)
        assert not broker.replica.progress.tracker.applied

    asyncio.run(scenario())


def test_the_next_incarnation_waits_before_it_tries_a_refused_message_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended over the message once more, every two or three seconds."""
    monkeypatch.setattr(apply_applier, "MESSAGE_AGAIN_S", 0.2)

    async def refused_at_the_end() -> str:
        refusing = Refusing(declares("orders"))

        async def tend() -> float:
            raise BrokerRefuses("its broker does not take a message", todo=GRANT)

        refusing.lane.tend = tend
        with pytest.raises(BrokerRefuses):
            await refusing.applier.run()
        return str(refusing.applier.refused)

    async def scenario() -> None:
        refused = await refused_at_the_end()
        assert GRANT in refused
        following = Refusing(declares("orders"), times=0)
        following.applier.refused = refused
        began = time.monotonic()
        running = asyncio.create_task(following.applier.run())
        await until(following.replica.shortfall.tell)
        assert refused in following.replica.shortfall.tell()
        await until(lambda: following.tries)
        assert time.monotonic() - began >= 0.2
        assert (following.replica.shortfall.tell(), following.applier.refused) == ("", "")
        running.cancel()
        urgent = Refusing(declares("orders"), times=0)
        urgent.applier.refused, urgent.applier.hurry = refused, True
        monkeypatch.setattr(apply_applier, "MESSAGE_AGAIN_S", PATIENCE_S)
        running = asyncio.create_task(urgent.applier.run())
        await until(lambda: urgent.tries)
        running.cancel()

    asyncio.run(scenario())


def test_declarations_that_were_refused_are_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who has mended the broker need not start anything again."""
    monkeypatch.setattr(apply_applier, "GAPS_AGAIN_S", 0.02)

    async def scenario() -> None:
        refusing = Refusing(declares("orders"), times=0)
        refusing.replica.shortfall.refusals.add("/", b"any", Refusal("queue 'orders' in vhost '/'"))
        running = asyncio.create_task(refusing.applier.run())
        await until(lambda: refusing.tries >= 4)
        running.cancel()

    asyncio.run(scenario())


# ---- the others are told, and the next incarnation -----------------------------------------------------------------------


def test_a_node_tells_what_its_broker_lacks_and_that_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(backup: Backup, _slow: Slow) -> None:
        node, shortfall = backup.core.node, backup.replica.shortfall
        backup.incarnation._life.spawn(backup.incarnation._ticks())
        shortfall.hold(("rights", "shop"), BY_ITSELF)
        await until(lambda: node.lacks == BY_ITSELF)
        for role, following, reason in ((Role.READY, 2, "x; "), (Role.CATCH_UP, 0, "x ("), (Role.ACTIVE, 2, "x; ")):
            node.role, node.reason, node.leader_epoch = role, "x", node.leader_epoch if following else 0
            node.leading = 257 if role is Role.ACTIVE else 0
            assert f"{reason}{BY_ITSELF}" in backup.incarnation.status.tell()["reason"]
            assert backup.incarnation.status.tell()["lacks"] == BY_ITSELF
        node.leading = 0
        shortfall.hold(("rights", "shop"), "")
        await until(lambda: not node.lacks)

    live(check, monkeypatch)


def test_what_an_incarnation_knows_is_kept_for_the_next() -> None:
    """A queue that is missing is missing to it, too; the message that was refused is refused; and a primary was heard when it was heard."""
    config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))

    async def go() -> None:
        before = Shortfall()
        before.note_gap("queue", BY_ITSELF)
        incarnation = Incarnation(config, Door(config.door_settings), Kept(refused="a message", shortfall=before, heard_before=(257, 12.0)))
        assert incarnation._replica.shortfall.tell() == BY_ITSELF
        kept = incarnation.kept
        assert (kept.refused, kept.heard_before) == ("a message", (257, 12.0))
        assert kept.shortfall is incarnation._replica.shortfall
        assert incarnation._node.heard == (257, 12.0)
        incarnation._node.role = Role.READY
        incarnation._node.hear_leader(514, 34.0)
        assert incarnation.kept.heard_before == (514, 34.0)

    asyncio.run(go())
