"""`lrq-ha peek` beside real brokers: each kind of queue, at brokers and doors; and its refusals."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from load import User, add_users, eventually, primary_of, set_up
from patience import PATIENT_DOOR

from lrq_ha.cli.main import main
from lrq_ha.lab import Lab
from lrq_ha.lab.files import python_environment
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher

pytestmark = pytest.mark.broker

ROWS, DELTAS = 3, 5
RECEIVED = "LRQ_Recv_stock_east"
CHAIN = ["snapshot start", *["snapshot rows"] * ROWS, "snapshot end", *["delta"] * DELTAS]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """One node as the source and a pair as the sink, which holds a snapshot and deltas."""
    groups = {"east": 1, "west": 2}
    found = Lab(groups, tmp_path_factory.mktemp("peek") / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found, publisher(found) as source:
        eventually("the snapshot", lambda: "snapshot end" in kinds(found, "w1"))
        transmit(source, DELTAS)
        eventually("all at both nodes", lambda: kinds(found, "w1") == kinds(found, "w2") == CHAIN)
        yield found


def publisher(lab: Lab) -> Publisher:
    found = Publisher([lab.nodes["e1"].door], "stock-app", "stock", confirm_timeout_s=60)
    found.on_full_sync(supply)
    return found


def supply(_request: FullSyncRequest, context: FullSyncContext) -> None:
    for number in range(ROWS):
        context.transmit(json.dumps({"row": number}).encode())
    context.complete()


def transmit(source: Publisher, count: int) -> None:
    for number in range(count):
        source.transmit_log_entry_message(json.dumps({"change": number}).encode(), ["west"])
    source.flush(60)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `lrq-ha peek`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["peek", *arguments])
    return code, out.getvalue(), error.getvalue()


def peek(*arguments: str) -> list[dict[str, Any]]:
    """The entries that are shown."""
    code, out, error = run(*arguments, "--format", "json")
    assert (code, error) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    code, out, error = run(*arguments)
    assert (code, out, error.count("\n")) == (1, "", 1)
    return error


def kinds(lab: Lab, node: str) -> list[str]:
    """The types of the entries of the receive queue at a node; empty as long as it is not there."""
    code, out, _ = run(RECEIVED, "--dir", str(lab.directory), "--node", node, "--from", "first", "--count", "100", "--format", "json")
    return [json.loads(line)["type"] for line in out.splitlines()] if code == 0 else []


def size(lab: Lab, node: str) -> tuple[int, int]:
    """(messages, consumers) of the receive queue at a node."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{lab.nodes[node].admin}/lrq"))
    method = connection.channel().queue_declare(RECEIVED, passive=True).method
    connection.close()
    return method.message_count, method.consumer_count


@pytest.mark.quick
def test_each_queue_is_shown_and_stays_as_it_is(lab: Lab) -> None:
    here, primary = ("--dir", str(lab.directory)), primary_of(lab, "west")
    eventually("the broker's count", lambda: size(lab, "w1")[0] > 0)
    before = size(lab, "w1")
    at_broker = peek(RECEIVED, *here, "--node", "w1", "--from", "first", "--payload", "json")
    assert [entry["type"] for entry in at_broker] == CHAIN[:10]
    assert [entry["restart"] for entry in at_broker] == [True] + [False] * 9
    assert not any(entry["repeat"] or entry["hole_after"] for entry in at_broker)
    assert [row["json"] for entry in at_broker for row in entry["payloads"]][:4] == [{"row": 0}, {"row": 1}, {"row": 2}, {"change": 0}]
    at_door = peek(RECEIVED, "--to", lab.nodes[primary].door, "--count", "2")
    assert at_door == [{**entry, "payloads": [{"bytes": entry["bytes"], "destinations": []}]} for entry in at_broker[-2:]]
    third = at_broker[2]["sequence"]
    assert [entry["sequence"] for entry in peek(RECEIVED, *here, "--node", "w2", "--from", str(third), "--count", "1")] == [third]
    assert size(lab, "w1") == before

    deltas = [entry for entry in peek("LRQ_Send_LogEntries", *here, "--group", "east") if entry["type"] == "delta"]
    assert [(entry["sequence"], entry["replication_id"], entry["destinations"]) for entry in deltas] == [
        (entry["sequence"], entry["replication_id"], ["west"]) for entry in at_broker[-DELTAS:]
    ]
    rows = peek("LRQ_Send_SnapSync", "--config", str(lab.nodes["e1"].config), "--count", str(ROWS + 1))
    assert [(entry["type"], entry["request_id"]) for entry in rows] == [(entry["type"], entry["request_id"]) for entry in at_broker[1:5]]
    statuses = peek("LRQ_Status", "--to", lab.nodes["e1"].door, "--from", "first")
    assert [entry["type"] for entry in statuses] == ["client", "full sync requested", "full sync completed"]
    assert (statuses[1]["sequence"], statuses[1]["request_id"]) == (at_broker[0]["sequence"], at_broker[0]["request_id"])


@pytest.mark.quick
def test_refusals_are_one_line_that_says_what_to_do(lab: Lab) -> None:
    here, primary = ("--dir", str(lab.directory)), primary_of(lab, "west")
    backup = "w2" if primary == "w1" else "w1"
    door, backup_door, broker = lab.nodes[primary].door, lab.nodes[backup].door, lab.nodes[primary].broker
    add_users(lab, primary, User("reader", "secret", [("lrq", "", "", "other")]))
    reader = f"amqp://reader:secret@{broker.rpartition('@')[2]}"
    assert f"node {primary} has no queue LRQ_Recv_none_east in vhost lrq" in (said := refused("LRQ_Recv_none_east", *here, "--node", primary))
    assert f"Receive queues there: {RECEIVED}" in said
    assert "node e1 has no queue" in refused(RECEIVED, *here, "--node", "e1")
    assert "there is no entry 99999, and none behind it" in refused(RECEIVED, *here, "--group", "west", "--from", "99999")
    assert f"node {backup} is a backup" in (said := refused(RECEIVED, "--to", backup_door))
    assert "at its broker, with --to" in said
    assert "No door gives it out" in refused("LRQ_Send_LogEntries", "--to", door)
    assert "No door gives it out" in refused("LRQ_Send_LogEntries", "--config", str(lab.nodes[backup].config), "--node", primary)
    assert "Check user and password" in refused(RECEIVED, "--to", reader.replace("secret", "wrong"))
    for place in (reader, f"amqp://reader:secret@{door.rpartition('@')[2]}"):
        assert "refused for user 'reader'" in (said := refused(RECEIVED, "--to", place))
        assert "A reader needs the right to read it" in said


def test_following_shows_what_comes(lab: Lab) -> None:
    arguments = ["peek", RECEIVED, "--dir", str(lab.directory), "--group", "west", "--follow", "--count", "1", "--format", "json"]
    following = subprocess.Popen(
        [sys.executable, "-m", "lrq_ha.cli.main", *arguments], stdout=subprocess.PIPE, text=True, env=python_environment()
    )  # fmt: skip
    assert following.stdout is not None
    last = json.loads(following.stdout.readline())
    with publisher(lab) as source:
        transmit(source, 2)
    shown = [json.loads(following.stdout.readline()) for _ in range(2)]
    assert last["sequence"] < shown[0]["sequence"] < shown[1]["sequence"]
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 130


def test_a_node_that_lacks_a_queue_of_its_group(lab: Lab) -> None:
    """As one that has joined by a renewal."""
    backup = "w2" if primary_of(lab, "west") == "w1" else "w1"
    connection = pika.BlockingConnection(pika.URLParameters(f"{lab.nodes[backup].admin}/lrq"))
    connection.channel().queue_delete(RECEIVED)
    connection.close()
    expected = f"node {backup} has no queue {RECEIVED} in vhost lrq, though the group has it"
    # Its sidecar starts again when it finds the stream gone, and knows nothing for a moment.
    eventually("the refusal", lambda: expected in refused(RECEIVED, "--dir", str(lab.directory), "--node", backup), 60)
    assert run(RECEIVED, "--dir", str(lab.directory), "--group", "west")[0] == 0, "its primary has it"
