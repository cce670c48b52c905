"""A pair whose brokers do not have what the log speaks of: a vhost that was deleted on both, a plugin that only one of them has, a right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pika
import pytest
from load import command, consume, declare, depth, eventually, in_sync, on_record, renew, switch_over, told

from lrq_ha.lab import Lab, brokers

pytestmark = pytest.mark.broker
PLUGIN, TYPE = "rabbitmq_jms_topic_exchange", "x-jms-topic"
EXTRA_MADE = [f"extra{number}" for number in range(4)]  # more than there are runs: each deletes one
EXTRA_LEFT = iter(EXTRA_MADE)


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 2}, tmp_path_factory.mktemp("unequal") / "lab", broker_version, vhosts=EXTRA_MADE)
    found.prepare()
    folder = found.directory / "e1"
    for application in brokers.find(broker_version).applications([PLUGIN]):
        if not (folder / "plugins" / application.name).exists():
            (folder / "plugins" / application.name).symlink_to(application)
    (folder / "enabled_plugins").write_text(f"[{PLUGIN}].\n")
    with found:
        yield found


def publish(url: str, queue: str, numbers: range) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.confirm_delivery()
    for number in numbers:
        channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    connection.close()


def create(lab: Lab, name: str, vhost: str) -> None:
    if vhost not in lab.ctl(name, "list_vhosts").split():
        lab.ctl(name, "add_vhost", vhost)
    for user in ("app", "lrq"):
        lab.ctl(name, "set_permissions", "-p", vhost, user, ".*", ".*", ".*")


def test_an_exchange_of_a_plugin_that_the_backup_lacks(lab: Lab) -> None:
    """RabbitMQ 3.10 closes the connection over its declaration, not the channel; the backup goes on all the same, and says what to do."""
    primary, backup = in_sync(lab)
    if primary != "e1":
        switch_over(lab, "e1")
        primary, backup = in_sync(lab)
    before = told(lab, backup)["generation"]
    connection = pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door))
    connection.channel().exchange_declare("jms", TYPE, durable=True)
    connection.close()
    declare(lab.nodes[primary].door, "plain")
    publish(lab.nodes[primary].door, "plain", range(10))
    assert in_sync(lab, applied=True) == (primary, backup)
    assert told(lab, backup)["generation"] == before, "it has not started again"
    assert depth(lab.nodes[backup].admin, "plain") == depth(lab.nodes[primary].admin, "plain") >= 10
    said = "enable these plugins on every node's broker"
    eventually("it to be told", lambda: said in lab.status(backup)["lacks"] and said in lab.status(primary)["reason"])
    code, text = command("switchover", backup, "--dry-run", lab=lab)
    assert (code, said in text) == (1, True), text
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        connection.channel().exchange_delete("jms")
    eventually("nothing to be missing", lambda: not lab.status(backup)["lacks"])


def test_a_vhost_that_is_deleted(lab: Lab) -> None:
    """What the log has for it must not keep a node from applying the rest, nor a group from having a primary."""
    primary, backup = in_sync(lab, applied=True)
    vhost = next(EXTRA_LEFT)
    kept = f"kept-{vhost}"
    door, extra = lab.nodes[primary].door, f"{lab.nodes[primary].door}/{vhost}"
    declare(door, kept)
    declare(extra, "lost")
    declare(extra, "expiring", expires=60_000)
    publish(extra, "lost", range(10))
    in_sync(lab, applied=True)
    consume(extra, "lost", 5)
    on_record(lab, backup)  # that it has had the vhost
    lab.kill(f"{backup}.sidecar")
    publish(door, kept, range(10))
    publish(extra, "lost", range(10, 20))
    declare(extra, "later")
    publish(door, kept, range(10, 20))
    for name in lab.nodes:
        lab.ctl(name, "delete_vhost", vhost)
    lab.start(f"{backup}.sidecar")
    primary, backup = in_sync(lab, applied=True)
    publish(lab.nodes[primary].door, kept, range(20, 30))
    for name in lab.nodes:
        lab.kill(f"{name}.sidecar")
    for name in lab.nodes:
        lab.start(f"{name}.sidecar")
    primary, backup = in_sync(lab, applied=True)
    eventually("the same on both", lambda: {depth(node.admin, kept) for node in lab.nodes.values()} == {30})
    switch_over(lab, backup)
    lab.wait_role(backup, "active")
    assert sorted(consume(lab.nodes[backup].door, kept, 30)) == list(range(30))
    assert f"this broker has no vhost '{vhost}'" in "".join(node.log.read_text() for node in lab.nodes.values())
    primary, backup = in_sync(lab, applied=True)
    renew(lab)
    code, said = command("reinit", backup, "--discard", lab=lab)
    assert code == 0, said
    eventually("it to begin anew", lambda: "everything in it was deleted from its broker" in lab.nodes[backup].log.read_text())
    create(lab, backup, vhost)  # what it has had, it does not know any more; and the log still speaks of it
    assert in_sync(lab, applied=True) == (primary, backup)


def test_a_vhost_that_the_backup_never_had(lab: Lab) -> None:
    """It must not count as in sync without what was confirmed there; when it has the vhost, it gets all of it."""
    primary, backup = in_sync(lab, applied=True)
    vhost = f"late{time.time_ns()}"

    create(lab, primary, vhost)
    door = f"{lab.nodes[primary].door}/{vhost}"
    declare(door, "late")
    publish(door, "late", range(10))
    eventually("it to say so", lambda: f"rabbitmqctl add_vhost {vhost} && rabbitmqctl set_permissions" in lab.status(backup)["lacks"])
    create(lab, backup, vhost)
    assert in_sync(lab, applied=True) == (primary, backup)
    eventually("all of it", lambda: depth(f"{lab.nodes[backup].broker}/{vhost}", "late") == 10)  # its sweeper may just have them


@pytest.mark.parametrize("closed", ["no rights", "down"])
def test_a_renewal_where_a_vhost_cannot_be_entered(lab: Lab, closed: str) -> None:
    """It is given up. It used to end the primary's incarnation, and that of whoever led next, for ever."""
    primary, backup = in_sync(lab, applied=True)
    vhost = f"closed{time.time_ns()}"
    for name in lab.nodes:
        create(lab, name, vhost)
    door = f"{lab.nodes[primary].door}/{vhost}"
    declare(door, "shut")
    publish(door, "shut", range(10))
    in_sync(lab, applied=True)
    before = told(lab, primary)["generation"]
    if closed == "down":
        lab.ctl(primary, "eval", f'rabbit_vhost_sup_sup:delete_on_all_nodes(<<"{vhost}">>).')
    else:
        lab.ctl(primary, "clear_permissions", "-p", vhost, "lrq")
    for arguments in (("--dry-run",), ()):
        code, said = command("renew", *arguments, lab=lab)
        assert (code, f"vhost '{vhost}' cannot be entered" in said) == (1, True), said
    assert told(lab, primary)["generation"] == before, "it has not started again"
    if closed == "down":
        lab.ctl(primary, "restart_vhost", "--vhost", vhost)
    else:
        create(lab, primary, vhost)
    renew(lab)
    assert in_sync(lab, applied=True) == (primary, backup)
    eventually("all of it", lambda: depth(f"{lab.nodes[backup].broker}/{vhost}", "shut") == 10)
