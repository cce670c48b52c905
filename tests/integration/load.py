"""What tests of labs share: waits, questions and commands. Rule: what is known of the end comes from the brokers themselves. Load is in `traffic`."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pika
from history import Broken
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from broker_plugin.log import codec
from lrq_ha.demo import check as checks
from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab, LabError
from lrq_ha.lab.files import python_environment
from lrq_ha.proto import lrq_pb2 as pb

#: pika's words for a node that is gone, also in the moment in which it was reached.
LOST = (AMQPError, AMQPConnectorException, OSError, ValueError)
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.4
QUIET_S = 30.0  # so long nothing comes from a queue only if there is nothing more: a machine may stand still, too


def eventually(what: str, done: Callable[[], bool], timeout_s: float = 120.0, *, seen: Callable[[], object] = lambda: "") -> None:
    """Polls until `done()`, less and less often.

    Args:
        what: Is waited for.
        done: Whether it is so.
        timeout_s: Only where it is what was promised; else the machine may be as busy as it likes.
        seen: What there is instead, for who reads of the failure.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = PAUSE_MIN_S
    while True:
        try:
            if done():
                return
        except (LrqError, KeyError, *LOST):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s {seen()}")
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, PAUSE_MAX_S)


def told(lab: Lab, name: str) -> dict[str, Any]:
    """What the sidecar of a node says of itself, once it answers: a machine may stand still for longer than `Lab.status` waits."""
    found: list[dict[str, Any]] = []
    eventually(f"{name} to answer", lambda: found.append(lab.status(name)) is None)
    return found[-1]


def primary_of(lab: Lab, group: str = "east") -> str:
    """Name of the node of a group that is active, once one says so: likewise."""
    found: list[str] = []

    def known() -> bool:
        found[:] = [name for name in (lab.primary(group),) if name]
        return bool(found)

    eventually(f"a primary of {group}", known)
    return found[0]


class NotInSync(AssertionError):
    """A promotion was refused, and rightly: the machine has held the backup up for so long that it is out of the set."""


_OUT = ("was not in sync", "has heard no primary since it started", "it has not caught up since")
#: What an operator is told who comes too early, or whose nodes are held up. An order that was not answered in time may be carried out all the same.
_AGAIN = ("but it answers", "does not answer", "has not answered", "is taking epoch", "no promise from", "stopped answering", "no answer within",
          "started again meanwhile", "is not running", "primary already")  # fmt: skip
KILLS_MAX = 5


def _try_again(said: str) -> None:
    """Raises NotInSync, or AssertionError if that is no reason to try again."""
    if any(words in said for words in _OUT):
        raise NotInSync(said)
    assert any(words in said for words in _AGAIN), said


def take_over(lab: Lab, node: str, *down: str) -> None:
    """Promotes a node whose others have been killed. What those had sent before may arrive a little later: then they seem to answer.

    Raises:
        NotInSync: It was refused.
    """
    refused = ""

    def done() -> bool:
        nonlocal refused
        try:
            lab.promote(node, down=down)
        except LabError as error:
            refused = str(error)
            _try_again(refused)
        return lab.primary(lab.nodes[node].group) == node

    eventually(f"{node} to take over", done, seen=lambda: refused)


def replace_primary(lab: Lab, primary: str, backup: str) -> None:
    """Kills the primary and promotes the backup. If that is out of the set in this very moment, the primary comes back, and dies later."""
    for _ in range(KILLS_MAX):
        lab.kill(primary)
        try:
            take_over(lab, backup, primary)
            return
        except NotInSync:
            lab.start(primary)
            assert in_sync(lab, applied=True) == (primary, backup)
    raise AssertionError(f"{backup} was out of the set {KILLS_MAX} times")


def in_sync(lab: Lab, *, applied: bool = False) -> tuple[str, str]:
    """Waits until both nodes of group east are in the set, and one is ready to take over. Returns primary and backup.

    Args:
        applied: Wait also until what is in the log then is safe and applied on both. The primary goes on adding entries of its own.
    """
    found: list[tuple[str, str]] = []
    states: list[dict[str, Any]] = []

    def holds() -> bool:
        states.clear()
        primary = lab.primary("east")
        if primary is None:
            return False
        backup = "e2" if primary == "e1" else "e1"
        states[:] = lab.status(primary), lab.status(backup)
        found[:] = [(primary, backup)]
        return set(states[0]["members"]) == {"e1", "e2"} and states[1]["role"] == "ready"

    eventually("both nodes in the set", holds, seen=lambda: states or lab.processes())
    if applied:
        all_applied(lab, *found[0])
    return found[0]


def all_applied(lab: Lab, *names: str) -> None:
    """Waits until what is in the longest log now is safe and applied on all these nodes. A primary goes on adding entries of its own."""
    end = max(told(lab, name)["end"] for name in names)
    eventually("everything applied", lambda: min(lab.status(name)[key] for name in names for key in ("safe", "applied")) >= end)


def applied_records(lab: Lab, name: str) -> list[pb.Applied]:
    """The applied records in a node's stream."""
    node = lab.nodes[name]
    joiner: codec.Joiner[bool] = codec.Joiner()
    stored = checks.read_stream(node.admin, f"LRQ_APPLIED_{node.group}")
    whole = (joiner.take(headers, True, body) for headers, body in stored if codec.OPEN not in headers)
    return [pb.Applied.FromString(found[1]) for found in whole if found is not None]


def on_record(lab: Lab, *names: str) -> None:
    """Waits until what each of these nodes has applied now stands in the record that it starts from; it is written several times a second."""
    for name in names:
        applied = told(lab, name)["applied"]

        def stands(name: str = name, applied: int = applied) -> bool:
            return any(record.applied >= applied for record in applied_records(lab, name)[-1:])

        eventually(f"{applied} in the applied record of {name}", stands)


def same_logs(lab: Lab) -> None:
    """Raises Broken unless the logs of all nodes of group east, which are in sync, are the same so far, batch by batch."""
    nodes = [node for node in lab.nodes.values() if node.group == "east"]
    end = max(told(lab, node.name)["end"] for node in nodes)
    all_applied(lab, *(node.name for node in nodes))
    digests = [checks.log_digest(node.admin, "east", number) for number, node in enumerate(nodes, 1)]
    assert end
    heads = [[batch for batch in digest if batch[2] <= end] for digest in digests]  # a primary goes on adding entries of its own
    if any(head != heads[0] for head in heads):
        other = next(head for head in heads if head != heads[0])
        raise Broken(f"the logs differ: {[pair for pair in itertools.zip_longest(heads[0], other) if pair[0] != pair[1]][:5]}")


def command(*arguments: str, lab: Lab | None = None) -> tuple[int, str]:
    """Exit code of an `lrq-ha` command, run as an operator runs it, and all that it printed. `lab`: whose nodes it is told of."""
    where = ["--dir", str(lab.directory)] if lab is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "lrq_ha.cli.main", *arguments, *where],
        capture_output=True, text=True, env=python_environment(), timeout=300,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said.strip()


def line_of(node: str, said: str) -> str:
    """What `lrq-ha list` says of a node, in one line: its row of the table, and its reason."""
    return " ".join(line.strip() for line in said.splitlines() if line.split()[:1] == [node])


def declare(url: str, queue: str, **arguments: object) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    connection.channel().queue_declare(queue, durable=True, arguments={f"x-{k.replace('_', '-')}": v for k, v in arguments.items()})
    connection.close()


class User(NamedTuple):
    """A user of a broker: (vhost, configure, write, read), and the (exchange, write) of topic permissions in vhost /."""

    name: str
    password: str
    rights: Sequence[tuple[str, str, str, str]]
    topics: Sequence[tuple[str, str]] = ()


def add_users(lab: Lab, node: str, *users: User) -> None:
    """In one go: each word to rabbitmqctl takes a busy machine many seconds."""
    file = lab.directory / node / "users.json"
    file.write_text(json.dumps({
        "users": [{"name": user.name, "password": user.password, "tags": []} for user in users],
        "permissions": [{"user": user.name, "vhost": vhost, "configure": configure, "write": write, "read": read}
                        for user in users for vhost, configure, write, read in user.rights],
        "topic_permissions": [{"user": user.name, "vhost": "/", "exchange": exchange, "write": write, "read": ".*"}
                              for user in users for exchange, write in user.topics],
    }))  # fmt: skip
    lab.ctl(node, "import_definitions", str(file))


def write_down(lab: Lab, *names: str) -> None:
    """RabbitMQ 3.10 writes declarations down 2 s later, on a busy machine later still: a kill before that would lose the queue itself."""
    for name in names:
        lab.ctl(name, "eval", "mnesia:sync_log().")


def set_up(lab: Lab, settings: str) -> None:
    """Gives all sidecars of a lab that is not up yet these lines in [replication], and the tables behind them.

    Where they have the size of the log, no message or transaction may be larger than such a log has room for.
    """
    size = re.search(r"(?m)^log_bytes_max = (\d+)$", settings)
    limits = "".join(f"{key} = {int(size[1]) // 8}\n" for key in ("message_bytes_max", "transaction_bytes_max")) if size else ""
    keys, mark, tables = f"\n{settings.strip()}".partition("\n[")
    lab.prepare()
    for node in lab.nodes.values():
        text = node.config.read_text().replace("[door]\n", f"[door]\n{limits}").replace("[replication]\n", f"[replication]{keys}\n")
        node.config.write_text(f"{text.rstrip()}\n{mark}{tables}\n")


def replication(lab: Lab, **keys: object) -> None:
    """Gives all sidecars these keys of [replication], and no others; they are started again if they had others."""
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    texts = {node.config: f"{node.config.read_text().partition('[replication]')[0]}[replication]\n{table}\n" for node in lab.nodes.values()}
    if all(config.read_text() == text for config, text in texts.items()):
        return
    for config, text in texts.items():
        config.write_text(text)
    for name in lab.nodes:
        lab.kill(f"{name}.sidecar")
    for name in lab.nodes:
        lab.start(f"{name}.sidecar")


def depth(url: str, queue: str) -> int:
    """Messages ready in a queue of a broker."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
    finally:
        connection.close()


def consume(url: str, queue: str, count: int) -> list[int]:
    """Takes and acks up to `count` messages that are numbers, fewer if no more come for a while; in the order they came."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    found: list[int] = []
    for method, _, body in channel.consume(queue, inactivity_timeout=QUIET_S):
        if method is None:
            break
        found.append(int(body))
        channel.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    channel.cancel()
    connection.close()
    return found


def missed(lab: Lab, by: str, node: str) -> None:
    eventually(f"{by} to miss {node}", lambda: not lab.status(by)["peers"][node]["connected"])


def promote(lab: Lab, node: str, down: str) -> None:
    """What the other had sent before it stood still, or was cut off, may arrive a little later: then it seems to answer.

    Raises:
        NotInSync: It was refused.
    """
    def done() -> bool:
        code, said = command("promote", node, "--down", down, lab=lab)
        if code != 0:
            _try_again(said)
        return code == 0 or ("primary already" in said and bool(lab.status(node)["serving"]))

    eventually("a promotion", done)


#: Why an order is refused that is given to a machine that is too slow for the time that it has, or is carried out without an answer in time.
_TOO_SLOW = ("did not become safe", "is not an in-sync backup", "has no in-sync backup", "does not answer", "has not answered", "no answer within",
             "started again meanwhile", "has no primary that answers", "is primary already", "is not primary")  # fmt: skip


def is_too_slow(said: str) -> bool:
    """Whether an order was refused as a slow machine's are."""
    return any(words in said for words in _TOO_SLOW)


def ordered(lab: Lab, *order: str, over: Callable[[], bool] = lambda: False) -> list[str]:
    """Gives an order until it is carried out: again, if the machine was too slow for the time that it has.

    Args:
        over: Whether it has been carried out, though nobody has heard it.

    Returns:
        What was said to each try.
    """
    heard: list[str] = []

    def done() -> bool:
        if heard and over():
            return True
        code, said = command(*order, lab=lab)
        heard.append(said)
        assert code == 0 or is_too_slow(said), said
        return code == 0

    eventually(f"`{order[0]}` to be carried out", done, seen=lambda: heard)
    return heard


def switch_over(lab: Lab, node: str, *options: str) -> list[str]:
    """Hands over to a node in order. Returns what was said to each try."""
    return ordered(lab, "switchover", node, *options, over=lambda: lab.primary(lab.nodes[node].group) == node)


def renew(lab: Lab, *arguments: str) -> str:
    """Renews the log, and returns what is said of it. A broker that stands still for long looks like a queue that gives nothing: then again."""
    again = ("so not everything is in its queue", "was published before is not in its queues", "gives nothing to the sidecar", "does not answer",
             "refuses messages", "consumers hold", "not now: node")  # fmt: skip
    heard: list[str] = []

    def done() -> bool:
        code, said = command("renew", *arguments, lab=lab)
        heard.append(said)
        assert code == 0 or any(words in said for words in again), said
        return code == 0

    eventually("a renewal", done)
    return heard[-1]
