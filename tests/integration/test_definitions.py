"""Vhosts, users, permissions, policies and parameters of the primary's broker are on every node, and what acts by itself only on one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator

import pika
import pytest
from load import LOST, command, depth, eventually, in_sync, line_of, replace_primary, set_up, switch_over, take_over, told
from managed import LOGIN, a_login, api, change, listed, login_url, value_of
from pika.exceptions import ProbableAuthenticationError

from broker_plugin.definitions.mirror import Mirror
from broker_plugin.definitions.objects import REPLICATED, Key, Objects, canonical
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker
PLUGINS = ["rabbitmq_management", "rabbitmq_shovel", "rabbitmq_federation"]
NUMBERS = itertools.count(1)
RIGHTS = {"configure": "^own", "write": ".*", "read": ".*"}


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pair whose sidecars often start from a CHECKPOINT."""
    found = Lab({"east": 2}, tmp_path_factory.mktemp("definitions") / "lab", broker_version, plugins=PLUGINS, definitions=REPLICATED)
    set_up(found, "checkpoint_entries = 20")
    with found:
        yield found


@pytest.fixture
def name() -> str:
    """A name of the test's own."""
    return f"own{next(NUMBERS)}"


def same(lab: Lab, *, but: frozenset[Key] = frozenset()) -> None:
    """Waits until both brokers have the same objects, but for these of the primary."""

    def of(node: str) -> Objects:
        return {key: value for key, value in listed(lab, node).items() if key not in but}

    eventually("the same objects on both", lambda: of("e1") == of("e2"), seen=lambda: set(of("e1").items()) ^ set(of("e2").items()))


def publish(url: str, queue: str, count: int) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.confirm_delivery()
        for number in range(count):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))


@pytest.mark.quick
def test_a_vhost_its_user_and_its_queue_in_one_breath(lab: Lab, name: str) -> None:
    """They are there after the failover: the same login, the same rights, what the policy does, and what was published."""
    primary, backup = in_sync(lab)
    policy = {"pattern": "^orders", "definition": {"max-length": 2}, "priority": 0, "apply-to": "queues"}
    change(lab, primary, {**a_login(name, name), ("policies", name, "short"): canonical(policy)})
    publish(login_url(lab.nodes[primary].door, name, name), "orders", 5)
    publish(login_url(lab.nodes[primary].door, name, name), "all", 5)
    eventually("the user on the backup", lambda: ("permissions", name, name) in listed(lab, backup))
    lab.kill(f"{primary}.sidecar")
    take_over(lab, backup, primary)
    url = login_url(lab.nodes[backup].door, name, name)
    publish(url, "orders", 3)
    assert (depth(url, "orders"), depth(url, "all")) == (2, 5)
    lab.start(f"{primary}.sidecar")
    assert in_sync(lab) == (backup, primary)


def everything(name: str) -> tuple[Objects, Objects]:
    """An object of each kind, and others of these with other values."""
    policy = {"pattern": f"^{name}", "definition": {"max-length": 5}, "priority": 1, "apply-to": "queues"}
    made: Objects = {
        ("vhosts", name): canonical({"description": "one", "tags": ["a"]}),
        ("users", name): canonical({"password": LOGIN, "tags": ["monitoring"]}),
        ("user_limits", name, "max-channels"): canonical({"value": 50}),
        ("permissions", name, name): canonical(RIGHTS),
        ("topic_permissions", name, name, "amq.topic"): canonical({"write": "^a", "read": ".*"}),
        ("policies", name, "with / and %"): canonical(policy),
        ("operator_policies", name, "o"): canonical(policy),
        ("parameters", "vhost-limits", name, "limits"): canonical({"value": {"max-queues": 50}}),
        ("global_parameters", name): canonical({"value": {"x": 1}}),
    }
    other: Objects = {
        ("vhosts", name): canonical({"description": "", "tags": ["b", "c"]}),
        ("users", name): canonical({"password": "another", "tags": []}),
        ("user_limits", name, "max-channels"): canonical({"value": 40}),
        ("permissions", name, name): canonical({**RIGHTS, "read": ""}),
        ("topic_permissions", name, name, "amq.topic"): canonical({"write": "^b", "read": ".*"}),
        ("policies", name, "with / and %"): canonical({**policy, "definition": {"max-length": 6}}),
        ("operator_policies", name, "o"): canonical({**policy, "definition": {"max-length": 6}}),
        ("parameters", "vhost-limits", name, "limits"): canonical({"value": {"max-queues": 40}}),
        ("global_parameters", name): canonical({"value": [1]}),
    }
    return made, other


def test_each_kind_is_set_changed_and_deleted(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    made, other = everything(name)
    change(lab, primary, made)
    eventually("all on the backup", lambda: made.keys() <= listed(lab, backup).keys())
    same(lab)
    secret = value_of(lab, backup, ("users", name))["password_hash"]
    assert secret
    assert not [node for node in lab.nodes.values() if secret in node.log.read_text() + json.dumps(lab.status(node.name))]
    before = listed(lab, backup)
    change(lab, primary, other)
    eventually("all changed on the backup", lambda: all(listed(lab, backup)[key] != before[key] for key in made))
    same(lab)
    with pika.BlockingConnection(pika.URLParameters(login_url(lab.nodes[backup].broker, name, name, "another"))):
        pass
    switch_over(lab, backup)
    primary, backup = in_sync(lab)
    change(lab, primary, deletes=[key for key in reversed(made) if key[0] != "vhosts"])
    eventually("all deleted on the backup", lambda: not (made.keys() - {("vhosts", name)}) & listed(lab, backup).keys())
    same(lab)
    change(lab, primary, deletes=[("vhosts", name)])
    eventually("the vhost deleted on the backup", lambda: ("vhosts", name) not in listed(lab, backup))
    assert in_sync(lab, applied=True) == (primary, backup)
    with pytest.raises(ProbableAuthenticationError):
        pika.BlockingConnection(pika.URLParameters(login_url(lab.nodes[primary].door, name, "/", "another")))


def test_each_kind_is_there_when_the_primary_was_killed(lab: Lab, name: str) -> None:
    """With its last values: nothing of the former primary's broker is asked."""
    primary, backup = in_sync(lab)
    made, other = everything(name)
    change(lab, primary, made)
    eventually("all on the backup", lambda: made.keys() <= listed(lab, backup).keys())
    before = listed(lab, backup)
    change(lab, primary, other)
    eventually("all changed on the backup", lambda: all(listed(lab, backup)[key] != before[key] for key in made))
    expected = {key: value for key, value in listed(lab, primary).items() if key in made}
    lab.kill(primary)
    take_over(lab, backup, primary)
    assert {key: value for key, value in listed(lab, backup).items() if key in made} == expected
    with pika.BlockingConnection(pika.URLParameters(login_url(lab.nodes[backup].door, name, name, "another"))) as connection:
        connection.channel().queue_declare(f"own-{name}")
    lab.start(primary)
    assert in_sync(lab, applied=True) == (backup, primary)
    same(lab)
    change(lab, backup, deletes=list(reversed(made)))
    same(lab)


def test_a_vhost_goes_with_its_queues_and_everything_else_goes_on(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    change(lab, primary, a_login(name, name))
    publish(login_url(lab.nodes[primary].door, name, name), "orders", 20)
    eventually("the user on the backup", lambda: ("permissions", name, name) in listed(lab, backup))
    in_sync(lab, applied=True)
    assert depth(login_url(lab.nodes[backup].broker, name, name), "orders") == 20
    change(lab, primary, deletes=[("vhosts", name)])
    eventually("the vhost to be gone", lambda: ("vhosts", name) not in listed(lab, backup))
    publish(lab.nodes[primary].door, name, 10)
    primary, backup = in_sync(lab, applied=True)
    replace_primary(lab, primary, backup)
    lab.start(primary)
    publish(lab.nodes[backup].door, name, 10)
    primary, backup = in_sync(lab, applied=True)
    assert [depth(lab.nodes[node].broker, name) for node in (primary, backup)] == [20, 20]
    same(lab)
    assert ("vhosts", name) not in listed(lab, primary)


def running_shovels(lab: Lab, node: str) -> int:
    return int(lab.ctl(node, "eval", "length(rabbit_shovel_status:status()).").strip())


def acts_on_one(lab: Lab, primary: str, backup: str, acts: frozenset[Key]) -> None:
    eventually("what acts on the primary", lambda: acts <= listed(lab, primary).keys() and running_shovels(lab, primary) == 1)
    eventually("nothing that acts on the backup", lambda: not acts & listed(lab, backup).keys() and running_shovels(lab, backup) == 0)
    same(lab, but=acts)


def test_a_shovel_runs_on_the_primary_only_through_three_failovers(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    shovel: Key = ("parameters", "shovel", "/", name)
    upstream: Key = ("parameters", "federation-upstream", "/", name)
    acts = frozenset({shovel, upstream})
    door = lab.nodes[primary].door
    publish(door, f"{name}.to", 0)
    publish(door, f"{name}.from", 0)
    change(lab, primary, {
        shovel: canonical({"value": {"src-uri": "amqp://", "src-queue": f"{name}.from", "dest-uri": "amqp://", "dest-queue": f"{name}.to"}}),
        upstream: canonical({"value": {"uri": "amqp://u:a-secret@127.0.0.1:1"}}),
    })  # fmt: skip
    eventually("it to be in the log", lambda: told(lab, backup)["definitions"]["held_back"] == 2)
    for how in ("killed", "switchover", "killed"):
        if how == "killed":
            replace_primary(lab, primary, backup)
            lab.start(primary)
        else:
            switch_over(lab, backup)
        primary, backup = in_sync(lab)
        acts_on_one(lab, primary, backup, acts)
    change(lab, primary, deletes=list(acts))
    eventually("it to be gone", lambda: told(lab, backup)["definitions"]["held_back"] == 0)
    switch_over(lab, backup)
    assert not acts & listed(lab, backup).keys()
    secrets = [text for node in lab.nodes.values() for text in (node.log.read_text(), json.dumps(lab.status(node.name))) if "a-secret" in text]
    assert not secrets


def test_what_differs_is_kept_and_named_until_it_is_taken(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    change(lab, backup, a_login(name, name))
    eventually("three to differ", lambda: told(lab, backup)["definitions"]["differing"] == 3)
    code, said = command("list", lab=lab)
    assert (code, f"user '{name}'" in line_of(backup, said), f"lrq-ha definitions diff {backup}" in line_of(backup, said)) == (0, True, True), said
    code, said = command("definitions", "diff", backup, lab=lab)
    assert (code, f"user '{name}' is here only" in said) == (1, True), said
    code, said = command("switchover", "--dry-run", lab=lab)
    assert (code, f"only {backup} has the users '{name}'" in said) == (0, True), said
    assert command("definitions", "take", primary, lab=lab)[0] == 1
    code, said = command("definitions", "take", backup, "--dry-run", lab=lab)
    assert (code, "3 objects" in said, ("users", name) in listed(lab, backup)) == (0, True, True), said
    code, said = command("definitions", "take", backup, lab=lab)
    assert (code, ("users", name) in listed(lab, backup)) == (0, False), said
    assert command("definitions", "diff", backup, lab=lab) == (0, f"{backup} has what the log has")
    code, said = command("switchover", "--dry-run", lab=lab)
    assert (code, f"{primary} and {backup} have equal users and vhosts" in said) == (0, True), said


def test_a_change_on_a_backup_is_set_back(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    change(lab, primary, a_login(name, name))
    eventually("the user on the backup", lambda: ("permissions", name, name) in listed(lab, backup))
    before = listed(lab, primary)["users", name]
    change(lab, backup, {("users", name): canonical({"password": "mine", "tags": ["administrator"]})}, [("permissions", name, name)])
    eventually("it to be set back", lambda: value_of(lab, backup, ("users", name)) == json.loads(before))
    same(lab)
    assert f"user '{name}'" in lab.nodes[backup].log.read_text()


def test_what_is_changed_while_a_sidecar_is_down_is_set_back(lab: Lab, name: str) -> None:
    """On either node; and a backup that is rebuilt has all of it again."""
    primary, backup = in_sync(lab)
    change(lab, primary, a_login(name, name))
    publish(login_url(lab.nodes[primary].door, name, name), "kept", 30)
    eventually("the user on the backup", lambda: ("permissions", name, name) in listed(lab, backup))
    before = listed(lab, primary)
    for node in (primary, backup):
        lab.kill(f"{node}.sidecar")
        change(lab, node, {("users", f"{name}.{node}"): canonical({"password": "x", "tags": []})}, [("users", name)])
        lab.start(f"{node}.sidecar")
    primary, backup = in_sync(lab)
    eventually("the user on both", lambda: all(listed(lab, node).items() >= before.items() for node in (primary, backup)))
    eventually("what only the primary has", lambda: ("users", f"{name}.{primary}") in listed(lab, backup))
    command("definitions", "take", backup, lab=lab)
    same(lab)
    code, said = command("reinit", backup, "--discard", lab=lab)
    assert code == 0, said
    change(lab, backup, deletes=[("users", name), ("vhosts", name)])
    assert in_sync(lab, applied=True) == (primary, backup)
    same(lab)
    url = login_url(lab.nodes[backup].broker, name, name)
    eventually("each message once", lambda: depth(url, "kept") == 30, seen=lambda: depth(url, "kept"))


def test_messages_go_on_while_the_management_is_down(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    for node in (primary, backup):
        lab.ctl(node, "eval", "application:stop(rabbitmq_management).")
    try:
        said = "rabbitmq-plugins enable rabbitmq_management"
        eventually("it to be said", lambda: all(said in told(lab, node)["reason"] for node in (primary, backup)))
        publish(lab.nodes[primary].door, name, 10)
        in_sync(lab, applied=True)
        assert depth(lab.nodes[backup].broker, name) == 10
        code, said = command("switchover", "--dry-run", lab=lab)
        assert (code, "were not compared" in said) == (0, True), said
        lab.ctl(primary, "add_user", name, "x")
        lab.ctl(primary, "eval", "application:start(rabbitmq_management).")
        eventually("the log to have it", lambda: not told(lab, primary)["definitions"]["problem"])
        in_sync(lab, applied=True)
        switch_over(lab, backup)
        primary, backup = in_sync(lab)
        publish(lab.nodes[primary].door, name, 10)
    finally:
        for node in (primary, backup):
            lab.ctl(node, "eval", "application:start(rabbitmq_management).")
    eventually("the user on both", lambda: all(("users", name) in listed(lab, node) for node in (primary, backup)))


def test_two_thousand_users(lab: Lab, name: str) -> None:
    primary, backup = in_sync(lab)
    users: Objects = {("users", f"{name}.{number}"): canonical({"password_hash": "", "tags": []}) for number in range(2000)}
    change(lab, primary, users)
    began = time.monotonic()
    publish(lab.nodes[primary].door, name, 10)
    assert time.monotonic() - began < 30
    eventually("the users on the backup", lambda: users.keys() <= listed(lab, backup).keys())
    assert in_sync(lab, applied=True) == (primary, backup)
    change(lab, primary, deletes=list(users))
    eventually("no users on the backup", lambda: not users.keys() & listed(lab, backup).keys())
    for node in (primary, backup):
        lab.kill(f"{node}.sidecar")
        lab.start(f"{node}.sidecar")
    in_sync(lab)
    same(lab)


@pytest.mark.one_version("4.3")
@pytest.mark.full
def test_users_and_vhosts_of_one_version_are_set_at_the_other(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> None:
    """A login goes over with its hash, both ways; what one version does not know is set once, and then counts as equal."""
    labs = {
        series: Lab({"east": 1}, tmp_path_factory.mktemp("two") / series, series, brokers_only=True, plugins=PLUGINS, definitions=REPLICATED)
        for series in ("3.10", "4.3" if broker_version == "3.10" else broker_version)
    }

    async def mirror(source: Lab, sink: Lab) -> None:
        there, here = api(source.nodes["e1"].config), api(sink.nodes["e1"].config)
        try:
            mirror = Mirror(here, REPLICATED)
            wanted = (await there.read()).objects
            await mirror.align(wanted, REPLICATED, leads=True)
            found = (await here.read()).objects
            news = mirror.find_news(wanted, found)
            assert not mirror.refused
            assert not news.deleted
            assert not {key for key in news.set if key in wanted}
        finally:
            await there.close()
            await here.close()

    for lab in labs.values():
        lab.up()
    try:
        for source, sink in itertools.permutations(labs):
            user = f"of-{source}"
            change(labs[source], "e1", everything(user)[0] | {("vhosts", user): canonical({"default_queue_type": "quorum", "description": "d"})})
            asyncio.run(mirror(labs[source], labs[sink]))
            with pika.BlockingConnection(pika.URLParameters(login_url(labs[sink].nodes["e1"].broker, user, user))) as connection:
                connection.channel().queue_declare(f"own.{user}")
            with pytest.raises(LOST):
                pika.BlockingConnection(pika.URLParameters(login_url(labs[sink].nodes["e1"].broker, user, user, "wrong")))
    finally:
        for lab in labs.values():
            lab.down()
