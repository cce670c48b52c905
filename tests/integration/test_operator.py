"""What an operator does and sees, on a pair with a short backup_timeout: list, promote and its refusals, restarts, stalls, a forced promotion.

Rules: commands run as an operator runs them (`lrq-ha …`); each test mends what it breaks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from load import all_applied, command, declare, depth, eventually, is_too_slow, line_of, primary_of, replace_primary, same_logs, told, write_down
from pika.exceptions import AMQPError, ConnectionClosedByBroker
from raw_client import RawClient
from raw_client import publish as raw_publish
from test_bad_input import consumed

from broker_plugin.amqp.content_header import field
from lrq_ha.lab import Lab, LabNode, keeper
from lrq_ha.publisher import Confirm, Publisher

pytestmark = [pytest.mark.broker, pytest.mark.proves("G5")]

BACKUP_TIMEOUT_S = 2.0
CONFIRM_S = 120.0
SETTINGS = f"""\
backup_timeout_s = {BACKUP_TIMEOUT_S}
expected_backups = 1
expected_backups_timeout_s = 1.0
"""
NODES = {"e1", "e2"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 2}, tmp_path_factory.mktemp("operator") / "lab")
    found.prepare()
    for node in found.nodes.values():
        audit = f'[interceptors.audit]\non_overflow = "wait"\noptions = {{ path = "{trail_of(node)}" }}\n'
        node.config.write_text(node.config.read_text() + SETTINGS + audit)
    with found:
        yield found


def trail_of(node: LabNode) -> Path:
    return node.log.with_name("audit.jsonl")


def run(lab: Lab, *arguments: str) -> tuple[int, str]:
    """Exit code of a command, and all that it printed, checked for passwords."""
    code, said = command(*arguments, lab=lab)
    assert not any(str(pika.URLParameters(url).credentials.password) in said for node in lab.nodes.values() for url in (node.door, node.admin))
    return code, said


def refused(lab: Lab, pattern: str, *arguments: str) -> None:
    """This is why an order is, once those answer that run."""
    before = {name: _fixed(lab, name) for name in NODES}
    heard: list[str] = []

    def said_so() -> bool:
        code, said = run(lab, *arguments)
        heard.append(said)
        assert code == 1, said
        assert len(said.splitlines()) == 1
        assert re.search(pattern, said) or is_too_slow(said), said
        return bool(re.search(pattern, said))

    eventually(f"`{arguments[0]}` to be refused", said_so, seen=lambda: heard)
    # A backup that is held up for longer than backup_timeout leaves the set, and comes back.
    eventually("all to be as before: a refusal changes nothing", lambda: {name: _fixed(lab, name) for name in NODES} == before)


def _fixed(lab: Lab, name: str) -> dict[str, Any]:
    """What only an operator's command would change; empty of a node that does not run."""
    if lab.nodes[name].sidecar_pid is None:
        return {}
    status = told(lab, name)
    return {key: status[key] for key in ("role", "epoch", "members", "primary")}


def publisher(lab: Lab, *first: str) -> Publisher:
    order = [*first, *(NODES - set(first))]
    return Publisher([lab.nodes[name].door for name in order], f"operator-{time.time_ns()}", confirm_timeout_s=CONFIRM_S)


def publish(lab: Lab, queue: str, count: int) -> None:
    """`count` confirmed messages."""
    with publisher(lab) as p:
        confirms = [p.publish("", queue, b"%d" % number) for number in range(count)]
        for confirm in confirms:
            confirm.result(CONFIRM_S)


def refusal(door: str) -> str:
    """What a client is told that may not come in."""
    with pytest.raises((ConnectionClosedByBroker, AMQPError)) as caught:
        pika.BlockingConnection(pika.URLParameters(door)).close()
    return repr(caught.value)


def usable(lab: Lab, names: tuple[str, str]) -> None:
    eventually("a primary and an in-sync backup", lambda: {lab.status(n)["role"] for n in names} == {"active", "ready"})


# ---- looking


@pytest.mark.quick
def test_list(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    code, said = run(lab, "list")
    rows = {line.split()[0]: line.split() for line in said.splitlines()[:3]}
    assert code == 0
    assert rows["NODE"][1:6] == ["GROUP", "ROLE", "EPOCH", "IN", "SYNC"]
    assert rows[primary][1:3] == ["east", "active"]
    assert rows[backup][1:3] == ["east", "ready"]
    assert all(rows[name][4] == "yes" for name in names)
    assert rows[primary][3] == rows[backup][3], "the same epoch"
    code, said = run(lab, "list", "--format", "json")
    found = {node["name"]: node for node in json.loads(said)}
    assert code == 0
    assert found[primary]["status"]["role"] == "active"
    for name in names:
        status = found[name]["status"]
        assert (status["members"], status["primary"], status["in_set"]) == (["e1", "e2"], primary, True)

    lab.kill(f"{backup}.sidecar")
    code, said = run(lab, "list")
    assert code == 0, "the others are shown"
    assert re.search(r" no answer .* tried http://127.0.0.1:\d+/status: connection refused$", line_of(backup, said))
    assert " active " in line_of(primary, said)
    lab.start(f"{backup}.sidecar")
    usable(lab, names)


# ---- refusals


def test_promotions_that_make_no_sense_are_refused(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    refused(lab, rf"{primary} is primary already \(epoch ", "promote", primary)
    refused(lab, rf"{primary} is primary already", "promote", primary, "--force")
    refused(lab, rf"{primary} is primary and answers", "promote", backup)
    refused(lab, rf"{primary} is primary and answers", "promote", backup, "--force")
    refused(lab, rf"{primary} is said to be down, but it answers: stop it first", "promote", backup, "--down", primary)
    refused(lab, rf"{primary} is said to be down, but it answers", "promote", backup, "--down", primary, "--dry-run")
    refused(lab, r"there is no node e9\. Known nodes: e1, e2", "promote", "e9")
    refused(lab, r"there is no node e9\. Known nodes: e1, e2", "promote", backup, "--down", "e9")
    refused(lab, f"{backup} is said to be down, but it is to be promoted", "promote", backup, "--down", backup)
    refused(lab, r"there is no node e9", "remove", "e9")
    refused(lab, f"{primary} is primary: only a backup can be removed", "remove", primary)
    refused(lab, f"{primary} is primary: only a backup can be removed", "remove", primary, "--dry-run")
    request = urllib.request.Request(f"{lab.nodes[backup].http}/promote", b'{"down": ["e9"]}', {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    with caught.value as answer:
        assert answer.code == 409
        assert json.load(answer)["text"] == "e9: no such node in group east; known: e1, e2"


def test_the_door_of_a_backup_names_the_primary(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    said = refusal(lab.nodes[backup].door)
    assert f"(320) 'node {backup} is a backup; primary is {primary}'" in said
    assert said.startswith("ProbableAccessDeniedError"), "as docs/clients.md says"


# ---- restarts


def test_the_sidecars_get_another_password(lab: Lab, names: tuple[str, str]) -> None:
    """As docs/operations/maintenance.md has it."""
    declare(lab.nodes[names[0]].door, queue := f"password-{time.time_ns()}")
    publish(lab, queue, 3)
    password, new = str(urlsplit(lab.nodes["e1"].admin).password), "an0ther"
    for name, node in lab.nodes.items():
        for file in (node.config, lab.directory / name / "definitions.json"):
            file.write_text(file.read_text().replace(password, new))
        assert command("sidecar", "--config", str(node.config), "--check")[0] == 0
    for name in lab.nodes:
        lab.ctl(name, "change_password", "lrq", new)
    for name in lab.nodes:
        lab.kill(f"{name}.sidecar")
    for name in lab.nodes:
        lab.start(f"{name}.sidecar")
    usable(lab, names)
    publish(lab, queue, 3)
    eventually("all of it everywhere", lambda: all(depth(node.broker, queue) == 6 for node in lab.nodes.values()))


@pytest.mark.quick
def test_a_dry_run_says_the_stakes_and_a_restarted_primary_goes_on_by_itself(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    declare(lab.nodes[primary].door, queue := f"stakes-{time.time_ns()}")
    publish(lab, queue, 7)
    eventually("the backup to have them", lambda: depth(lab.nodes[backup].broker, queue) == 7)
    epoch = told(lab, primary)["epoch"]
    lab.kill(f"{primary}.sidecar")
    eventually("the backup to miss it", lambda: not lab.status(backup)["peers"][primary]["connected"])
    refused(lab, rf"{primary} does not answer: if it is down, say so with --down {primary}", "promote", backup)
    before = _fixed(lab, backup)
    code, said = run(lab, "promote", backup, "--down", primary, "--dry-run")
    assert code == 0
    assert re.search(rf"would promote {backup}; it heard its primary [\d.]+ s ago and was in sync then; its log ends at \d+", said), said
    again = re.search(r"; what is live comes as redelivered: about (\d+) messages$", said)
    assert again, said
    assert int(again[1]) >= 7
    assert _fixed(lab, backup) == before
    lab.start(f"{primary}.sidecar")
    assert lab.wait_role(primary, "active")["epoch"] > epoch
    usable(lab, names)


def test_a_restarted_primary_without_its_backup_stays_closed(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    lab.kill(backup)
    lab.kill(f"{primary}.sidecar")
    lab.start(f"{primary}.sidecar")
    reason = rf"waiting for the other nodes.*{backup}: .*cannot be reached"
    eventually("its reason", lambda: bool(re.search(reason, lab.status(primary)["reason"])))
    time.sleep(1)
    assert told(lab, primary)["role"] == "catch-up"
    assert re.search(rf"\(320\) 'node {primary} is catch-up \(waiting for the other nodes", refusal(lab.nodes[primary].door))
    code, said = run(lab, "list")
    assert re.search(r" catch-up .*waiting for the other nodes", line_of(primary, said)), said
    code, said = run(lab, "promote", primary, "--down", backup)
    assert code == 0
    open_ = r"( and its door is open|; recovering: .* its door is open, confirms wait: .*)"
    at_stake = rf"; it has heard no primary since it started and was in sync .*; if {backup} went on without it since, .* is lost.*"
    assert re.fullmatch(rf"{primary} has taken epoch \S+{open_}{at_stake}", said), said
    assert told(lab, primary)["members"] == [primary]
    declare(lab.nodes[primary].door, queue := f"alone-{time.time_ns()}")
    publish(lab, queue, 1)  # after expected_backups_timeout_s
    assert re.search(f"after 1 s it went on with 0 of 1 expected backups; {backup}: .* cannot be reached", told(lab, primary)["reason"])
    lab.start(backup)
    usable(lab, names)
    assert primary_of(lab) == primary


def test_a_primary_that_cannot_log_in_at_its_backup_says_so(lab: Lab, names: tuple[str, str]) -> None:
    """Its backup waited for it, and nobody said why."""
    primary, backup = names
    config = lab.nodes[primary].config
    before = config.read_text()
    lab.kill(f"{primary}.sidecar")
    config.write_text(re.sub(r'(?s)(\[\[peers\]\].*?door = "amqp://lrq:)[^@]+', r"\1wrong", before))
    cause = rf"{backup}: .*user or password was refused"
    try:
        lab.start(f"{primary}.sidecar")
        eventually("its reason", lambda: bool(re.search(cause, lab.status(primary)["reason"])))
        eventually("it to be heard", lambda: bool(lab.status(backup)["peers"][primary]["problem"] == ""))
        refused(lab, f"{backup} does not answer {primary}, but is not down: {primary} hears it", "promote", primary, "--down", backup, "--force")
        lab.kill(f"{backup}.sidecar")
        code, said = run(lab, "promote", primary, "--down", backup)
        assert code == 0, said
        lab.start(f"{backup}.sidecar")
        eventually("it to serve, and the cause", lambda: lab.status(primary)["serving"] and bool(re.search(cause, lab.status(primary)["reason"])))
        code, said = run(lab, "list")
        assert code == 0
        assert re.search(f" {cause}", line_of(primary, said)), said
        assert f"no link to {backup}: " in lab.nodes[primary].log.read_text()
    finally:
        lab.kill(f"{primary}.sidecar")
        config.write_text(before)
        lab.start(f"{primary}.sidecar")
        usable(lab, names)


def test_nobody_is_promoted_over_a_primary_that_he_hears_and_cannot_log_in_at(lab: Lab, names: tuple[str, str]) -> None:
    """Only one of the two connections stands. The primary goes on alone; two would have confirmed."""
    primary, backup = names
    config = lab.nodes[backup].config
    before = config.read_text()
    lab.kill(f"{backup}.sidecar")
    config.write_text(re.sub(r'(?s)(\[\[peers\]\].*?door = "amqp://lrq:)[^@]+', r"\1wrong", before))
    try:
        lab.start(f"{backup}.sidecar")
        eventually("its reason", lambda: bool(re.search(rf"{primary}: .*user or password was refused", lab.status(backup)["reason"])))
        eventually("the primary to go on", lambda: lab.status(primary)["members"] == [primary])
        eventually("its own link to stand", lambda: lab.status(primary)["peers"][backup]["problem"] == "")
        for force in ((), ("--force",)):
            refused(lab, f"{primary} does not answer {backup}, but is not down: {backup} hears it", "promote", backup, "--down", primary, *force)
        assert told(lab, primary)["serving"]
    finally:
        lab.kill(f"{backup}.sidecar")
        config.write_text(before)
        lab.start(f"{backup}.sidecar")
        usable(lab, names)
    assert primary_of(lab) == primary


@pytest.mark.proves("promotion")
@pytest.mark.parametrize("order", [("e1", "e2"), ("e2", "e1")])
def test_both_nodes_killed_and_started_in_either_order(lab: Lab, names: tuple[str, str], order: tuple[str, str]) -> None:
    queue = f"both-{time.time_ns()}"
    declare(lab.nodes[names[0]].door, queue)
    publish(lab, queue, 200)
    eventually("the backup to have them", lambda: all(depth(lab.nodes[n].broker, queue) == 200 for n in names))
    write_down(lab, *names)
    for name in names:
        lab.kill(name)
    first, second = order
    lab.start(first)
    eventually("what it has to be read", lambda: lab.status(first)["role"] == "catch-up")
    time.sleep(1)
    assert told(lab, first)["role"] == "catch-up", "the other may know more"
    lab.start(second)
    usable(lab, names)
    assert consumed(lab.nodes[primary_of(lab)].door, queue, 200) == list(range(200))
    publish(lab, queue, 10)


# ---- stalls and orderly ends


def test_a_stalled_backup_is_taken_out_and_comes_back(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    queue = f"stalled-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    with publisher(lab, primary) as p:
        p.publish("", queue, b"").result(CONFIRM_S)
        lab.stop(backup)
        try:
            began = time.monotonic()
            late: Confirm = p.publish("", queue, b"")
            late.result(CONFIRM_S)
            assert time.monotonic() - began > BACKUP_TIMEOUT_S / 2, "nothing is confirmed without it before it is out of the set"
            assert told(lab, primary)["members"] == [primary]
            assert told(lab, primary)["peers"][backup]["lag_seconds"] >= BACKUP_TIMEOUT_S / 2
            p.publish("", queue, b"").result(CONFIRM_S)
            code, said = run(lab, "list")
            assert code == 0
            assert re.search(r" (no answer|catch-up|ready) .* no ", line_of(backup, said)), said
        finally:
            lab.cont(backup)
        p.publish("", queue, b"").result(CONFIRM_S)
    usable(lab, names)
    assert primary_of(lab) == primary
    eventually("the backup's copy", lambda: depth(lab.nodes[backup].broker, queue) == 4)
    eventually("no lag", lambda: lab.status(primary)["peers"][backup]["lag_seconds"] == 0.0)


def test_sigterm_ends_a_sidecar_in_order(lab: Lab, names: tuple[str, str]) -> None:
    primary, _ = names
    connection = pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door))
    for name in names:
        pid = lab.nodes[name].sidecar_pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        eventually("its end", lambda name=name: keeper.ask(lab.directory, do="list")[f"{name}.sidecar"]["exit"] is not None, 60)
        assert keeper.ask(lab.directory, do="list")[f"{name}.sidecar"]["exit"] == 0
        log = lab.nodes[name].log.read_text()
        assert "stopping" in log
        assert "Traceback" not in log
        assert "never retrieved" not in log
    with pytest.raises(ConnectionClosedByBroker, match="320"):
        connection.process_data_events(60)
    for name in names:
        lab.start(f"{name}.sidecar")
    usable(lab, names)


# ---- the worst choices


def test_a_backup_that_has_heard_nobody_since_its_start_cannot_vouch_for_itself(lab: Lab, names: tuple[str, str]) -> None:
    """Its log says that it is in the set; but the primary may have taken it out, and confirmed alone, after it was killed."""
    primary, backup = names
    queue = f"vouch-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    lab.kill(f"{backup}.sidecar")
    publish(lab, queue, 10)
    assert told(lab, primary)["members"] == [primary]
    lab.kill(f"{primary}.sidecar")
    lab.start(f"{backup}.sidecar")
    eventually("its reason", lambda: "waiting" in lab.status(backup)["reason"])
    try:
        refused(lab, "would be lost.*--force", "promote", backup, "--down", primary, "--dry-run")
    finally:
        lab.start(f"{primary}.sidecar")
        usable(lab, names)


def test_the_last_copy_is_not_made_anew(lab: Lab, names: tuple[str, str], tmp_path: Path) -> None:
    """With its primary dead, a backup that was in sync deleted what nobody else had any more."""
    primary, backup = names
    queue = f"last-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    publish(lab, queue, 5)
    all_applied(lab, *names)
    lab.kill(f"{primary}.sidecar")
    try:
        eventually("the backup to miss it", lambda: lab.status(backup)["primary"] is None)
        for arguments in (("--discard",), ("--discard", "--dry-run")):
            refused(lab, f"no primary answers {backup}, so what it holds may be the last copy", "reinit", backup, *arguments)
        code, said = run(lab, "reinit", backup, "--discard", "--force", "--dry-run")
        assert (code, said.endswith("no primary answers, so this may be the last copy of them")) == (0, True), said
        assert depth(lab.nodes[backup].broker, queue) == 5
    finally:
        lab.start(f"{primary}.sidecar")
        usable(lab, names)


def test_the_audit_trail_over_a_failover(lab: Lab, names: tuple[str, str]) -> None:
    """Between them, the trails of both nodes tell of every publish and take; the new primary's of each that it had to do with, once."""
    primary, backup = names
    doors = [lab.nodes[name].door for name in names]
    queue = f"audited-{time.time_ns()}"
    declare(doors[0], queue)

    def trail(name: str, what: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in trail_of(lab.nodes[name]).read_text().split("\n")[:-1] if queue in line]
        return [line for line in lines if line["what"] == what]

    def ids(name: str, what: str) -> list[int]:
        return [int(line["id"].rpartition("/")[2]) for line in trail(name, what)]

    with publisher(lab, primary) as p:
        for confirm in [p.publish("", queue, b"%d" % number) for number in range(1, 31)]:
            confirm.result(CONFIRM_S)
        with pika.BlockingConnection(pika.URLParameters(doors[0])) as connection:
            channel = connection.channel()
            for _ in range(10):
                channel.basic_ack(channel.basic_get(queue)[0].delivery_tag)
        eventually("the first trail", lambda: (len(ids(primary, "publish")), len(ids(primary, "take"))) == (30, 10))
        all_applied(lab, *names)
        write_down(lab, *names)
        under_way = [p.publish("", queue, b"%d" % number) for number in range(31, 61)]
        replace_primary(lab, primary, backup)
        for confirm in under_way + [p.publish("", queue, b"%d" % number) for number in range(61, 71)]:
            confirm.result(CONFIRM_S)
    assert consumed(doors[1], queue, 60) == list(range(11, 71))
    first = trail_of(lab.nodes[primary]).read_text()

    eventually("the second trail", lambda: len(ids(backup, "take")) >= 60 and 70 in ids(backup, "publish"))
    published = ids(backup, "publish")
    assert published == list(range(published[0], 71)), "all from the first that had no confirm on, each once"
    assert 31 <= published[0] <= 61
    assert {line["outcome"] for line in trail(backup, "publish")} <= {"accepted", "repeat"}
    assert sorted(ids(backup, "take")) == list(range(11, 71))
    assert {line["outcome"] for line in trail(backup, "take")} == {"accept"}
    assert ids(primary, "publish")[:30] == list(range(1, 31))
    assert ids(primary, "take") == list(range(1, 11))
    # A position joins the two, on whichever node they were; a sidecar that is killed takes the last lines of its trail with it.
    positions = {line["id"]: line["position"] for name in names for line in trail(name, "publish") if line["outcome"] == "accepted"}
    for line in trail(backup, "take"):
        assert positions.get(line["id"], line["position"]) == line["position"]
    assert len({line["position"] for line in trail(backup, "take")}) == 60
    lab.start(primary)
    usable(lab, names)
    all_applied(lab, *names)
    assert trail_of(lab.nodes[primary]).read_text() == first, "what it gets as a backup is no client's doing"


def publish_with_ids(door: str, producer: str, numbers: range, *, bodies_from: int = 1) -> None:
    """To a queue of the producer's name."""
    with RawClient(door, properties={"lrq_producer": producer}) as client:
        client.open_channel(confirms=True)
        ids = [field(b"x-lrq-id", f"{producer}/{number}".encode()) for number in numbers]
        client.send(b"".join(raw_publish(1, producer, b"%d" % body, fields=identity) for body, identity in enumerate(ids, bodies_from)))
        assert client.confirmed(len(ids)) == set()


@pytest.mark.proves("republish")
def test_a_forced_promotion_and_the_diverged_node(lab: Lab, names: tuple[str, str], tmp_path: Path) -> None:
    primary, backup = names
    queue = f"forced-{time.time_ns()}"
    producer = f"{queue}-producer"
    declare(lab.nodes[primary].door, queue)
    declare(lab.nodes[primary].door, producer)
    declare(lab.nodes[primary].door, cache := f"{queue}-cache", lrq_replicate="configuration")
    publish(lab, queue, 10)
    eventually("the backup to have them", lambda: depth(lab.nodes[backup].broker, queue) == 10)
    write_down(lab, *names)
    lab.kill(backup)
    publish(lab, queue, 10)  # the first of them waits for backup_timeout
    publish_with_ids(lab.nodes[primary].door, producer, range(1, 6))
    publish(lab, cache, 2)
    status = told(lab, primary)
    assert status["members"] == [primary]
    lab.kill(primary)
    lab.start(backup)
    eventually("its reason", lambda: "waiting" in lab.status(backup)["reason"])
    refused(lab, rf"{backup} .*(would be lost|what it lost is unknown).*--force", "promote", backup, "--down", primary)
    code, said = run(lab, "promote", backup, "--down", primary, "--force", "--dry-run")
    assert code == 0
    assert re.search(rf"would promote {backup}, although: .*--force.*; it has heard no primary since it started .*its log ends at \d+", said), said
    assert told(lab, backup)["role"] == "catch-up"
    code, said = run(lab, "promote", backup, "--down", primary, "--force")
    assert code == 0, said
    assert consumed(lab.nodes[backup].door, queue, 10) == list(range(10))
    publish(lab, queue, 5)
    publish_with_ids(lab.nodes[backup].door, producer, range(1, 4), bodies_from=101)  # started anew, it has been told that the group has none
    lab.start(primary)
    reason = lab.wait_role(primary, "diverged")["reason"]
    found = re.search(rf"entries (\d+) to (\d+) may have been confirmed by this node alone; {backup} lacks them", reason)
    assert found, reason
    assert int(found[2]) - int(found[1]) >= 9, "the ten messages"
    assert int(found[2]) >= status["end"]
    assert re.search("320.*(diverged|primary is)", refusal(lab.nodes[primary].door))
    code, said = run(lab, "list")
    assert re.search(r" diverged .*entries \d+ to \d+ may have been confirmed by this node alone", line_of(primary, said)), said
    publish(lab, queue, 5)
    assert told(lab, backup)["members"] == [backup]
    assert consumed(lab.nodes[backup].door, queue, 10) == [*range(5), *range(5)]

    # It begins anew: what it alone held is saved, and published again.
    tail = tmp_path / "tail.jsonl"
    refused(lab, f"{backup} is primary: only a backup can be rebuilt", "reinit", backup, "--discard")
    (tmp_path / "other").touch()
    for dry_run in ((), ("--dry-run",)):
        refused(lab, f"{backup} is active, not diverged", "reinit", backup, "--export", str(tail), *dry_run)
        refused(lab, "other exists already", "reinit", primary, "--export", str(tmp_path / "other"), *dry_run)
    code, said = run(lab, "reinit", primary, "--export", str(tail), "--dry-run")
    assert (code, f"would drop entries {found[1]} to {found[2]}" in said) == (0, True), said
    alone = f"; 2 messages in '{cache}' (configuration) are deleted, and are in no export"
    assert alone in said
    assert not tail.exists()
    code, said = run(lab, "reinit", primary, "--discard", "--dry-run")
    assert code == 0
    assert f"would drop entries {found[1]} to {found[2]}, which it alone may hold" in said
    code, said = run(lab, "reinit", primary, "--export", str(tail))
    assert (code, alone in said) == (0, True), said
    lines = [json.loads(line) for line in tail.read_text().splitlines()]
    assert [line["sequence"] for line in lines] == list(range(int(found[1]), int(found[2]) + 1))
    publishes = [line for line in lines if line["kind"] == "publish"]
    assert len(publishes) == 15
    assert [(line["user"], line["replication_id"]) for line in publishes[10:]] == [("app", f"{producer}/{n}") for n in range(1, 6)]
    lab.wait_role(primary, "ready")
    assert set(told(lab, backup)["members"]) == {primary, backup}
    for _ in range(2):  # whoever is not sure does it again
        code, said = command("republish", str(tail), "--to", lab.nodes[backup].door)
        assert code == 1
        assert said.startswith("12 messages published and confirmed, 3 have numbers that the group has already: they are there, unless "), said
        assert re.search(f"whose publishers must have stopped: .*{producer}", said)
    for _ in range(2):
        code, said = command("republish", str(tail), "--to", lab.nodes[backup].door, "--new-ids")
        assert (code, said.splitlines()[0]) == (0, "15 messages published and confirmed")
    all_applied(lab, primary, backup)
    same_logs(lab)
    for name in (primary, backup):
        eventually(f"10 messages at {name}", lambda url=lab.nodes[name].broker: depth(url, queue) == 10)
        assert depth(lab.nodes[name].broker, producer) == 8
    assert consumed(lab.nodes[backup].door, queue, 10) == list(range(10))
    came = consumed(lab.nodes[backup].door, producer, 8)
    assert came == [101, 102, 103, 4, 5, 1, 2, 3], "what was new, what was not there, what others had the numbers of"
    lab.kill(f"{primary}.sidecar")
    eventually("it to be out of the set", lambda: told(lab, backup)["members"] == [backup])
    before = tail.read_bytes()
    refused(lab, "exists already", "reinit", primary, "--export", str(tail))
    assert tail.read_bytes() == before, "it is the only copy"
    lab.start(f"{primary}.sidecar")


def test_a_backup_that_lacks_a_queue_says_so(lab: Lab, names: tuple[str, str]) -> None:
    """Somebody had deleted it at the backup's broker: everything published to it since was missing after a failover, and nobody was told."""
    primary, backup = names
    deleted, early = f"deleted-{time.time_ns()}", f"early-{time.time_ns()}"
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", early, b"before it is there")
        channel.queue_declare(early, durable=True)
        channel.queue_declare(deleted, durable=True)
        all_applied(lab, *names)
        with pika.BlockingConnection(pika.URLParameters(lab.nodes[backup].broker)) as behind:
            behind.channel().queue_delete(deleted)
        said = f"queue '{deleted}' in vhost '/' is not on this node, and what is published to it not either: run lrq-ha reinit {backup} --discard"

        def told_of_it() -> bool:
            for queue in (early, deleted):
                channel.basic_publish("", queue, b"1")
            return said in lab.status(backup)["reason"]

        eventually("it to be told", told_of_it)
    assert f"'{early}'" not in told(lab, backup)["reason"], "it was not there on the primary either, for the first one"
    code, listed = run(lab, "list")
    assert code == 0
    assert said in line_of(backup, listed), listed
    code, text = run(lab, "reinit", backup, "--discard")
    assert code == 0, text
    usable(lab, names)
    all_applied(lab, *names)
    assert told(lab, backup)["reason"] == f"in-sync backup of {primary}"
    assert depth(lab.nodes[backup].broker, deleted) == depth(lab.nodes[primary].broker, deleted)
