"""What tests of renewals (R17) share: nodes that fall off a log, renewals that stand still in the middle, and what all nodes hold in the end."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable
from typing import Any

import pika
from load import QUIET_S, all_applied, command, consume, declare, depth, eventually, missed, primary_of, told
from pika.exceptions import ChannelClosedByBroker

from broker_plugin.log import codec
from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab, probe
from lrq_ha.publisher import Publisher

LOG_BYTES_MAX = 1 << 20
#: Keys of [replication] with which a log loses its beginning soon.
SMALL_LOG = f"log_bytes_max = {LOG_BYTES_MAX}\nmemory_bytes_max = {1 << 20}\napply_delay_s = 0.1\ncheckpoint_entries = 200\n"
DEEP = 1_900  # a quorum queue gives no more than 2,000 to one consumer
FLUSH_S = 120
PORTION = 4
MIDDLE, MIDDLE_S = 200, 240.0
STEP_S = 0.01  # in which a broker that stands still otherwise goes on


def publish(lab: Lab, queue: str, numbers: range, *, size: int = 0, exchange: str = "") -> None:
    properties = pika.BasicProperties(delivery_mode=2)
    with Publisher([lab.nodes[primary_of(lab)].door], producer=f"joining-{time.time_ns()}", client_name="test") as publisher:
        for number in numbers:
            publisher.publish(exchange, queue, b"%d" % number + b" " * size, properties)
        publisher.flush(FLUSH_S)


def empty(lab: Lab, primary: str, *backups: str) -> None:
    """Deletes every queue in vhost /: what a try that failed has left would be renewed, too, or keep a renewal from beginning."""
    left = {queue for name in (primary, *backups) for queue in lab.ctl(name, "list_queues", "name").split()}
    for url in (lab.nodes[primary].door, *(lab.nodes[backup].broker for backup in backups)):
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            for queue in left:
                channel.queue_delete(queue)
        all_applied(lab, primary, *backups)  # so that on the brokers of the others only what is not replicated is left to delete


def peek(url: str, queue: str, count: int) -> list[bytes]:
    """What a broker's queue begins with, in order; it stays there."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=count)
    found = []
    for method, _, body in channel.consume(queue, inactivity_timeout=QUIET_S):
        if method is not None:
            found.append(body)
        if method is None or len(found) == count:
            break
    connection.close()
    return found


def discard(lab: Lab, *backups: str) -> None:
    """These backups begin anew, with nothing."""
    for backup in backups:
        code, said = command("reinit", backup, "--discard", lab=lab)
        assert code == 0, said
    for backup in backups:
        eventually(f"{backup} to be empty", lambda backup=backup: lab.status(backup)["end"] == 0)


def fall_off(lab: Lab, primary: str, *backups: str) -> None:
    """These backups are away while the beginning of the primary's log is dropped, over a queue `churn`."""
    declare(lab.nodes[primary].door, "churn")
    end = max(told(lab, backup)["end"] for backup in backups)
    for backup in backups:
        lab.kill(f"{backup}.sidecar")
        missed(lab, primary, backup)
        code, said = command("remove", backup, lab=lab)
        assert code == 0 or "is not in the set" in said, said
    for _ in range(2 * LOG_BYTES_MAX // (PORTION * 60_000) + 1):  # who stays in the set is not to lose what it has not applied
        publish(lab, "churn", range(PORTION), size=60_000)
        assert consume(lab.nodes[primary].door, "churn", PORTION) == list(range(PORTION))
        all_applied(lab, *told(lab, primary)["members"])
    eventually("the head to have moved on", lambda: lab.status(primary)["head"] > end + 1)
    for backup in backups:
        eventually("the primary to say it", lambda backup=backup: f"{backup} has fallen off the log" in lab.status(primary)["reason"])
        lab.start(f"{backup}.sidecar")
        eventually("the backup to say it", lambda backup=backup: f"lrq-ha reinit {backup} --discard" in lab.status(backup)["reason"])


def part_of_it(lab: Lab, primary: str, queue: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """A renewal is in the middle of this queue, which is a deep one, and stays there: the broker stands still.

    It runs for a moment at a time before, as all of it may take less than a second. `meanwhile`: what clients do from its beginning on.
    """
    broker = f"{primary}.broker"
    deadline = time.monotonic() + MIDDLE_S
    while True:
        reason = told(lab, primary)["reason"]
        found = re.search(rf"queue '{queue}' in vhost '/' stands still, (\d+) messages", reason)
        if found is not None and int(found[1]) >= MIDDLE:
            return
        assert time.monotonic() < deadline, "the renewal does not begin, or was over too soon"
        lab.cont(broker)
        time.sleep(STEP_S)
        lab.stop(broker)
        if "renews its log" in reason:
            meanwhile()


def rest_of_it(lab: Lab, primary: str, queue: str) -> None:
    """The renewal comes to the end of this queue in such short steps of the broker that what the door does then, it does at once."""
    deadline = time.monotonic() + MIDDLE_S
    while f"queue '{queue}'" in told(lab, primary)["reason"]:
        assert time.monotonic() < deadline, "it does not end"
        lab.cont(f"{primary}.broker")
        lab.stop(f"{primary}.broker")


def levels(lab: Lab, name: str) -> dict[str, str]:
    """What a node's sidecar says of the queues in vhost /."""
    rows: Any = probe.get_json(f"{lab.nodes[name].http}/levels")
    return {row["queue"]: row["level"] for row in rows if row["vhost"] == "/"}


def has(url: str, queue: str) -> bool:
    """Whether a broker has this queue."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        try:
            connection.channel().queue_declare(queue, passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return False
        return True


def equal(lab: Lab, queues: dict[str, int]) -> None:
    """All brokers hold so many messages, and what all logs hold is the same."""
    for queue, count in queues.items():
        for name, node in lab.nodes.items():
            url = node.broker
            eventually(f"{count} messages in {queue} at {name}", lambda url=url, queue=queue, count=count: depth(url, queue) == count)
    logs = [batches(lab, name) for name in sorted(lab.nodes)]
    shared = set.intersection(*map(set, logs))
    assert len(shared) > 5
    for log in logs[1:]:
        assert [log[key] for key in shared] == [logs[0][key] for key in shared]


def batches(lab: Lab, name: str) -> dict[tuple[int, int, int], int]:
    """(epoch, first, last) of each batch in a node's stream, and a checksum of what it says."""
    found = {}
    joiner: codec.Joiner[dict[str, Any]] = codec.Joiner()
    for headers, body in checks.read_stream(lab.nodes[name].admin, "LRQ_HA_east"):
        whole = joiner.take(headers, headers, body)
        if whole is not None and codec.LAST in headers:
            found[headers[codec.EPOCH], headers[codec.FIRST], headers[codec.LAST]] = zlib.crc32(whole[1])
    return found
