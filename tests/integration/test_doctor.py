"""`lrq-ha doctor` with each fault put in: the check names it, and the hint, run as printed, makes the check `ok`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pika
import pytest
from load import command, eventually, in_sync
from patience import PATIENT_DOOR

from lrq_ha.cli.doctor.check import Checked, Finding, Level
from lrq_ha.cli.doctor.command import examine
from lrq_ha.lab import Lab, LabError
from lrq_ha.sidecar import config as configuration

pytestmark = pytest.mark.broker
PLUGINS = ["rabbitmq_management"]
#: What a version does not tell.
SILENT = {"3.10": {"listeners"}, "4.3": set[str]()}


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("doctor") / "lab", broker_version, plugins=PLUGINS, door=PATIENT_DOOR) as found:
        yield found


def run_hint(lab: Lab, node: str, hint: str, folder: Path) -> None:
    """Runs a command as it was printed, on a node's machine: rabbitmqctl and rabbitmq-plugins are its broker's. A password is that of broker.url."""
    program, environment = lab._rabbitmqctl(node)
    for name in ("rabbitmqctl", "rabbitmq-plugins"):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(str(Path(program).with_name(name)))} "$@"\n')
        tool.chmod(0o700)
    url = urlsplit(tomllib.loads(lab.nodes[node].config.read_text())["broker"]["url"])
    path = f"{folder}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", hint], input=f"{unquote(url.password or '')}\n", env=environment | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, (hint, done.stdout, done.stderr)


def findings(path: Path, check: str) -> list[Checked]:
    return [each for each in examine(path) if each.check == check]


def bad(path: Path, check: str) -> list[Checked]:
    """The findings of a check that are not ok."""
    return [each for each in findings(path, check) if each.finding.level is not Level.OK]


@dataclass(frozen=True)
class Fault:
    """A fault at node e2.

    Attributes:
        check: The check that finds it.
        level: The level that it gets.
        says: A part of the text.
        make: Puts it in.
    """

    check: str
    level: Level
    says: str
    make: Callable[[Lab], object]


def ctl(*arguments: str) -> Callable[[Lab], object]:
    return lambda lab: lab.ctl("e2", *arguments)


FAULTS = {
    "readable": Fault("files", Level.FAIL, "other users may use it", lambda lab: lab.nodes["e2"].config.chmod(0o644)),
    "no permissions": Fault("rights", Level.FAIL, "no permissions in vhost '/'", ctl("clear_permissions", "-p", "/", "lrq")),
    "some permissions": Fault("rights", Level.FAIL, "lacks permissions in vhost '/'", ctl("set_permissions", "-p", "/", "lrq", "^a", ".*", ".*")),
    "no tag": Fault("rights", Level.FAIL, "may not publish for other users", ctl("set_user_tags", "lrq", "administrator")),
    "new vhost": Fault("rights", Level.FAIL, "no permissions in vhost 'the shop'", ctl("add_vhost", "the shop")),
    "password": Fault("broker", Level.FAIL, "user or password was refused", ctl("change_password", "lrq", "another")),
    "no administrator": Fault("management", Level.SKIPPED, "does not let user 'lrq' in", ctl("set_user_tags", "lrq", "impersonator")),
    "small messages": Fault(
        "message-size", Level.WARN, "refuses a message of 16777216 bytes",
        ctl("eval", "application:set_env(rabbit, max_message_size, 1000000), persistent_term:put(max_message_size, 1000000)."),
    ),
    "unseen policy": Fault(
        "policies", Level.WARN, "policy 'the old' in / sets expires, max-length",
        ctl("set_policy", "the old", "^old-", '{"expires": 900000, "max-length": 9, "max-age": "1D"}', "--apply-to", "queues"),
    ),
}  # fmt: skip


@pytest.mark.quick
def test_a_missing_right_is_named_and_given(pair: Lab, tmp_path: Path) -> None:
    """Brokers without the management API, too."""
    mend(pair, FAULTS["no permissions"], tmp_path)
    assert [each.finding.level for each in findings(pair.nodes["e2"].config, "management")] == [Level.SKIPPED]
    in_sync(pair)


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_the_hint_mends_the_fault(lab: Lab, name: str, tmp_path: Path) -> None:
    mend(lab, FAULTS[name], tmp_path)
    with suppress(LabError):
        lab.ctl("e2", "delete_vhost", "the shop")


@pytest.mark.full
def test_a_log_that_was_made_for_another_size_gets_its_size(lab: Lab, tmp_path: Path) -> None:
    in_sync(lab)
    config = lab.nodes["e2"].config
    before = config.read_text()
    size = configuration.load(config).replication.log_bytes_max
    try:
        config.write_text(before.replace("[replication]\n", f"[replication]\nlog_bytes_max = {2 * size}\n"))
        [found] = bad(config, "log-size")
        assert f"was made for {size} bytes, and replication.log_bytes_max is {2 * size}" in found.finding.text
        run_hint(lab, "e2", found.finding.command, tmp_path)
        eventually("it is mended", lambda: not bad(config, "log-size"), seen=lambda: findings(config, "log-size"))
    finally:
        config.write_text(before)
        with suppress(LabError):
            lab.ctl("e2", "clear_policy", "-p", "lrq", "lrq-size")


@pytest.mark.full
def test_a_user_with_a_widely_known_password_is_deleted(lab: Lab, tmp_path: Path) -> None:
    """Where other machines reach the door."""
    in_sync(lab)
    door = tomllib.loads(lab.nodes["e2"].config.read_text())["door"]["listen"]
    config = tmp_path / "e2.toml"
    config.write_text(lab.nodes["e2"].config.read_text().replace(f'"{door}"', f'"0.0.0.0:{door.rpartition(":")[2]}"\nloopback_users = []'))
    config.chmod(0o600)
    lab.ctl("e2", "add_user", "guest", "guest")
    try:
        eventually("it is found", lambda: bool(bad(config, "guest")), seen=lambda: findings(config, "guest"))
        [found] = bad(config, "guest")
        assert found.finding.level is Level.FAIL
        run_hint(lab, "e2", found.finding.command, tmp_path)
        eventually("it is mended", lambda: not bad(config, "guest"), seen=lambda: findings(config, "guest"))
    finally:
        with suppress(LabError):
            lab.ctl("e2", "delete_user", "guest")


def mend(lab: Lab, fault: Fault, tmp_path: Path) -> None:
    """Puts a fault in, and runs the hint of the check that finds it."""
    config = lab.nodes["e2"].config
    in_sync(lab)
    try:
        fault.make(lab)
        eventually(f"{fault.check} finds it", lambda: bool(bad(config, fault.check)), seen=lambda: examine(config))
        [found] = bad(config, fault.check)
        assert (found.finding.level, fault.says in found.finding.text) == (fault.level, True), found
        assert found.finding.command, found
    finally:
        hints = [each.finding.command for each in bad(config, fault.check)]
        for hint in hints:
            run_hint(lab, "e2", hint, tmp_path)
    eventually("it is mended", lambda: not bad(config, fault.check), seen=lambda: findings(config, fault.check))


@pytest.mark.full
def test_a_sound_node_has_no_fault(lab: Lab, broker_version: str) -> None:
    """All that is not ok is named here, so that a check which cries wolf fails this test."""
    in_sync(lab)
    config = lab.nodes["e1"].config
    code, said = command("doctor", "--config", str(config), "--format", "json")
    told = json.loads(said)
    wrong = {each["check"]: each for each in told["checks"] if each["level"] != "ok"}
    assert set(wrong) <= {"etcd", "open-files", "memory", *SILENT[broker_version]}, wrong
    assert (code, told["code"]) == (1 if {"open-files", "memory"} & set(wrong) else 0,) * 2
    lines = command("doctor", "--config", str(config))[1].splitlines()
    assert lines[0] == f"ok       config           {config} is valid: node e1 of group east"
    assert any(line.startswith('skipped  etcd             replication.coordination is "static"') for line in lines)
    assert not [queue for queue in lab.ctl("e1", "list_queues", "-p", "lrq", "name").split() if queue.startswith(("lrq-doctor", "lrq-rights"))]


@contextmanager
def nothing(_: Lab) -> Iterator[None]:
    yield


@contextmanager
def client_around(lab: Lab) -> Iterator[None]:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes["e2"].broker)):
        yield


@contextmanager
def queue_around(lab: Lab) -> Iterator[None]:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes["e2"].broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("a stray", durable=True, arguments={"x-overflow": "reject-publish-dlx"})
        yield
        channel.queue_delete("a stray")


@contextmanager
def user_here_only(lab: Lab) -> Iterator[None]:
    lab.ctl("e2", "add_user", "ann", "secret")
    yield
    lab.ctl("e2", "delete_user", "ann")


@contextmanager
def stopped(lab: Lab) -> Iterator[None]:
    lab.stop("e2.broker")
    yield
    lab.cont("e2.broker")


@contextmanager
def full_disk(lab: Lab) -> Iterator[None]:
    lab.ctl("e2", "set_disk_free_limit", "1000000GB")
    yield
    lab.ctl("e2", "set_disk_free_limit", "10MB")


#: The changed texts of the configuration of e2, a fault while which it is looked at, the check, its level, and a part of the text.
CASES: dict[str, tuple[dict[str, str], Callable[[Lab], AbstractContextManager[None]], str, Level, str]] = {
    "client": ({}, client_around, "clients", Level.WARN, "1 clients are connected to the broker itself"),
    "stray": ({}, queue_around, "strays", Level.WARN, "'a stray in /'"),
    "refused kind": ({}, queue_around, "queues", Level.WARN, "'a stray in /'"),
    "login": ({}, user_here_only, "logins", Level.WARN, "only e2 has the users 'ann'"),
    "silent broker": ({}, stopped, "broker", Level.FAIL, "within"),
    "alarm": ({}, full_disk, "alarms", Level.FAIL, "disk alarm"),
    "mode": ({'"available"': '"strict"'}, nothing, "settings", Level.FAIL, 'replication.mode is "strict" in'),
    "peer's id": ({"id = 1": "id = 3"}, nothing, "nodes", Level.FAIL, "e1 has id 1 and [[peers]] here says 3"),
    "peer's name": ({'"e1"': '"e9"'}, nothing, "nodes", Level.FAIL, "is node e1 of group east, and no e9 of group east"),
    "syntax": ({"[node]": "[nodes]"}, nothing, "config", Level.FAIL, "nodes: unknown key"),
    "log size": ({'mode = "available"': f'mode = "available"\nlog_bytes_max = {2 << 30}'}, nothing, "log-size", Level.WARN, "was made for"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_found(lab: Lab, case: str, tmp_path: Path) -> None:
    changes, during, check, level, says = CASES[case]
    in_sync(lab)
    text = lab.nodes["e2"].config.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "e2.toml"
    config.write_text(text)
    config.chmod(0o600)

    def is_found() -> bool:
        return any(each.finding.level is level and says in each.finding.text for each in findings(config, check))

    with during(lab):
        eventually(f"{check} finds it", is_found, seen=lambda: findings(config, check))
    if not changes:
        eventually("it is over", lambda: not bad(config, check), seen=lambda: findings(config, check))


@pytest.mark.full
def test_before_the_first_start(broker_version: str, new_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """A broker as it was installed: each hint, run as printed, until nothing fails. A dozen runs of rabbitmqctl take a minute."""
    lab = new_lab({"east": 2}, broker=broker_version, brokers_only=True, plugins=PLUGINS)
    lab.up()
    config = lab.nodes["e1"].config
    lab.ctl("e1", "delete_vhost", "lrq")
    lab.ctl("e1", "delete_user", "lrq")
    seen = []
    for _ in range(8):
        wrong = [each for each in examine(config) if each.finding.level is Level.FAIL]
        if not wrong:
            break
        seen += [each.check for each in wrong]
        for hint in dict.fromkeys(each.finding.command for each in wrong):
            run_hint(lab, "e1", hint, tmp_path)
    assert not wrong, seen
    assert seen[0] == "broker"
    assert {each.check for each in examine(config) if each.finding.level is Level.SKIPPED} >= {"sidecar", "links"}
    port = int(urlsplit(f"//{tomllib.loads(config.read_text())['door']['listen']}").port or 0)
    with socket.create_server(("127.0.0.1", port)):
        [found] = bad(config, "addresses")
        assert f"door.listen = 127.0.0.1:{port} cannot be listened on: address already in use" in found.finding.text


@pytest.mark.full
def test_a_broker_that_listens_at_every_address(broker_version: str, tmp_path: Path) -> None:
    """In a network of its own, which has nothing but loopback: no other machine reaches that broker."""
    apart = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("ip") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the test needs `ip`, and the right to make a network: apt-get install iproute2; run it as root")
    named = ["amqp"] if "listeners" in SILENT[broker_version] else ["amqp", "http"]
    script = Path(__file__).with_name("exposed_broker.py")
    command_line = [*apart, sys.executable, str(script), str(tmp_path / "lab"), broker_version, str(len(named))]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    warned = [text.split()[3] for level, text, _ in said["before"] if level == "warn"]
    assert warned == named, said
    assert all(level in ("ok", "skipped") for level, _, _ in said["after"]), said


@pytest.mark.full
def test_plugins_of_one_broker_only(lab: Lab, tmp_path: Path) -> None:
    """Without the management plugin, what needs it is skipped, and says why."""
    config = lab.nodes["e2"].config
    run_hint(lab, "e2", "rabbitmq-plugins disable rabbitmq_management", tmp_path)
    try:
        found = findings(config, "management")
        assert [each.finding.command for each in found] == ["rabbitmq-plugins enable rabbitmq_management"], found
        skipped = {each.check for each in examine(config) if each.finding.level is Level.SKIPPED}
        assert skipped >= {"listeners", "clients", "disk", "strays", "plugins", "logins"}
    finally:
        run_hint(lab, "e2", found[0].finding.command, tmp_path)
    eventually("it is mended", lambda: not bad(config, "management"))


#: Other kinds of nodes, and the checks that are not ok there. The certificates of a lab are valid for 30 days.
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "tls": ({"tls": True}, {"certificates", "etcd"}),
    "etcd": ({"coordination": {}}, set()),
    "proxy protocol": ({"proxy_protocol": True}, {"clients", "etcd"}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_node_of_another_kind(broker_version: str, new_lab: Callable[..., Lab], kind: str) -> None:
    options, not_ok = KINDS[kind]
    with new_lab({"east": 2}, broker=broker_version, plugins=PLUGINS, **options) as lab:
        in_sync(lab)
        config = lab.nodes["e1"].config
        wrong: dict[str, Finding] = {}

        def is_told() -> bool:
            """A broker that has just started tells of its disk and of its peers some seconds later."""
            wrong.clear()
            wrong.update((each.check, each.finding) for each in examine(config) if each.finding.level is not Level.OK)
            return set(wrong) - {"open-files", "memory"} == not_ok | SILENT[broker_version]

        eventually("nothing else is wrong", is_told, seen=lambda: wrong)
        if lab.etcd:
            lab.kill("etcd")
            assert [each.finding.level for each in bad(config, "etcd")] == [Level.WARN, Level.FAIL]
