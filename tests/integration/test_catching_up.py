"""A backup that is away for long: the log is kept for it up to its size, over restarts too, and operators see what is left.

Rule: the log is small, so that its size matters within seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise

import pika
import pytest
from load import command, consume, declare, depth, eventually, in_sync, line_of, primary_of, promote, replace_primary, same_logs, set_up, told

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("away")]

LOG_BYTES_MAX = 32 << 20
BACKUP_TIMEOUT_S = 1.0
RUNS_MIN_S, STANDS_S = 0.03, 0.7
SEVERAL = 4
SETTINGS = f"""\
log_bytes_max = {LOG_BYTES_MAX}
memory_bytes_max = {1 << 20}
apply_lag_bytes_max = {4 << 20}
backup_timeout_s = {BACKUP_TIMEOUT_S}
"""


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("catching-up") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with lab:
        yield lab


def publish(lab: Lab, queue: str, numbers: range, *, size: int = 0, exchange: str = "") -> None:
    properties = pika.BasicProperties(delivery_mode=2)
    with Publisher([lab.nodes[primary_of(lab)].door], producer=f"away-{time.time_ns()}") as publisher:
        for number in numbers:
            publisher.publish(exchange, queue, b"%d" % number + b" " * size, properties)
        publisher.flush(120)


def leave(lab: Lab, primary: str, backup: str) -> None:
    lab.kill(f"{backup}.sidecar")
    eventually("it to be out of the set", lambda: lab.status(primary)["members"] == [primary])


def stored(lab: Lab, name: str) -> int:
    """Bytes of the log's stream in a broker's files."""
    return sum(file.stat().st_size for file in (lab.directory / name).glob("data/**/*LRQ_HA_east_*/*.segment"))


def gauge(lab: Lab, primary: str, backup: str) -> tuple[int, int]:
    """Bytes of the log that the backup lacks, and that are left."""
    peer = told(lab, primary)["peers"][backup]
    return int(peer["log_bytes_behind"]), int(peer["log_bytes_left"])


def listed(lab: Lab) -> str:
    code, said = command("list", lab=lab)
    assert code == 0, said
    return said


def test_the_log_is_kept_for_who_is_away_up_to_its_size(lab: Lab) -> None:
    primary, backup = in_sync(lab, applied=True)
    queue, size = f"kept-{time.time_ns()}", 60_000
    declare(lab.nodes[primary].door, queue)
    eventually("it to lack nothing", lambda: gauge(lab, primary, backup) == (0, LOG_BYTES_MAX * 7 // 8))

    # Away for less than the log holds, in entries large and small: what is said to be lacking is what the broker has written.
    leave(lab, primary, backup)
    at = [(stored(lab, primary), gauge(lab, primary, backup)[0])]
    publish(lab, queue, range(100), size=size)
    at.append((stored(lab, primary), gauge(lab, primary, backup)[0]))
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(100, 400):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    behind, left = gauge(lab, primary, backup)
    at.append((stored(lab, primary), behind))
    for before, after in pairwise(at):
        written, said = after[0] - before[0], after[1] - before[1]
        assert 0.99 * written <= said < 2 * written, at
    assert left == LOG_BYTES_MAX * 7 // 8 - behind
    found = re.search(r" no answer .* no .* ([\d.]+) MiB ", line_of(backup, listed(lab)))
    assert found
    assert abs(float(found[1]) * 2**20 - left) < 0.1 * 2**20
    assert "in danger" not in told(lab, primary)["reason"]
    lab.start(f"{backup}.sidecar")
    assert in_sync(lab, applied=True) == (primary, backup)
    assert depth(lab.nodes[backup].broker, queue) == 400

    # More than half of it: operators are warned. The primary's restart changes nothing of that.
    leave(lab, primary, backup)
    publish(lab, queue, range(400, 400 + LOG_BYTES_MAX * 5 // 8 // size), size=size)
    warning = rf"{backup} is in danger of falling off the log: it lacks \d+ bytes, and after \d+ more the broker drops what it needs next"
    eventually("the warning", lambda: bool(re.search(warning, lab.status(primary)["reason"])))
    assert re.search(warning, line_of(primary, listed(lab)))
    eventually("it in the log", lambda: bool(re.search(warning, lab.nodes[primary].log.read_text())))
    behind, left = gauge(lab, primary, backup)
    lab.kill(f"{primary}.sidecar")
    lab.start(f"{primary}.sidecar")
    eventually("it to wait for the other", lambda: "waiting for the other nodes" in lab.status(primary)["reason"])
    promote(lab, primary, backup)
    assert re.search(warning, line_of(primary, listed(lab)))
    behind_now, left_now = gauge(lab, primary, backup)
    assert behind - size <= behind_now <= behind + LOG_BYTES_MAX // 16, "what is known of the log's size is in its checkpoints"
    assert left_now <= left + size
    lab.start(f"{backup}.sidecar")
    assert in_sync(lab, applied=True) == (primary, backup)
    assert "in danger" not in told(lab, primary)["reason"]
    count = 400 + LOG_BYTES_MAX * 5 // 8 // size
    assert depth(lab.nodes[backup].broker, queue) == count
    same_logs(lab)
    replace_primary(lab, primary, backup)
    assert consume(lab.nodes[backup].door, queue, count) == list(range(count))
    lab.start(primary)
    in_sync(lab, applied=True)


def changes(lab: Lab, primary: str) -> int:
    """So often the set has been changed, as the primary's log says."""
    return len(re.findall("in the set: ", lab.nodes[primary].log.read_text()))


def test_catching_up_takes_longer_than_the_time_a_backup_has(lab: Lab) -> None:
    """Its broker runs a moment now and then. Confirms come while it stands still, and it comes into the set once, when it has everything."""
    primary, backup = in_sync(lab, applied=True)
    queue, size, count = f"long-{time.time_ns()}", 60_000, LOG_BYTES_MAX // 2 // 60_000
    declare(lab.nodes[primary].door, queue)
    leave(lab, primary, backup)
    publish(lab, queue, range(count), size=size)
    before = changes(lab, primary)
    stood, runs_s = 0, RUNS_MIN_S
    lab.stop(f"{backup}.broker")
    try:
        lab.start(f"{backup}.sidecar")
        with Publisher([lab.nodes[primary].door], producer=f"long-{time.time_ns()}") as publisher:
            while backup not in told(lab, primary)["members"]:
                lab.cont(f"{backup}.broker")
                time.sleep(runs_s)
                lab.stop(f"{backup}.broker")
                time.sleep(STANDS_S)  # what it said before it stood still has come
                if backup not in told(lab, primary)["members"]:
                    publisher.publish("", queue, b"%d" % count).result(60)  # while it stands still
                    count, stood, runs_s = count + 1, stood + 1, 1.1 * runs_s  # a busy machine gives it little of that
    finally:
        lab.cont(f"{backup}.broker")
    assert stood * STANDS_S > SEVERAL * BACKUP_TIMEOUT_S, "it was too fast to be a test"
    assert in_sync(lab, applied=True) == (primary, backup)
    assert changes(lab, primary) == before + 1, "it was taken in and thrown out again"
    for name in lab.nodes:
        eventually(f"all of it at {name}", lambda name=name: depth(lab.nodes[name].broker, queue) == count)
    same_logs(lab)
    assert consume(lab.nodes[primary].door, queue, count) == list(range(count))
