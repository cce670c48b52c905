"""G5 on real brokers: a primary that stands still (SIGSTOP), is promoted over, and goes on; and a backup that does, or that is slow.

Rules: the old primary stands still for longer than backup_timeout_s, so that by its own clock it was the others who were silent; what is asserted
of it is read from a connection that was open all the time, byte by byte.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pytest
from history import exactly, span
from load import command, declare, depth, eventually, in_sync, line_of, missed, promote, same_logs, set_up, take_over, told
from raw_client import RawClient, publish
from traffic import Load

from broker_plugin.amqp import content_header, frames
from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("stalls"), pytest.mark.proves("G5")]

BACKUP_TIMEOUT_S = 5.0  # the default, which the shared pair has
COUNT = 300
MANY, WINDOW, LOOKS_EACH = 60_000, 2_000, 1_000
STANDS_S, RUNS_S = 0.09, 0.01
RATE = 500.0  # what was published meanwhile has to be consumed, too


class Witness:
    """A publisher that sends numbered messages with replication IDs, as fast as they go, and reads only when it is told to.

    Attributes:
        confirmed: Numbers that were acked.
        reason: What connection.close said; empty if there was none.
    """

    def __init__(self, url: str, queue: str, producer: str) -> None:
        self.client = RawClient(url, properties={"lrq_producer": producer})
        self.client.open_channel(confirms=True)
        self.confirmed: set[int] = set()
        self.reason = ""
        self._queue, self._producer = queue, producer
        self._sent: list[int] = []

    def send(self, numbers: range) -> None:
        frames_of = (publish(1, self._queue, b"%d" % n, fields=content_header.field(b"x-lrq-id", f"{self._producer}/{n}".encode())) for n in numbers)
        self._sent += numbers
        self.client.send(b"".join(frames_of))

    def read(self, timeout_s: float = 60.0) -> bool:
        """Takes one frame; False when the connection is over. Raises TimeoutError."""
        found = self.client.read(timeout_s)
        if found is None:
            return False
        kind, _, payload = found
        if kind == frames.CONNECTION_CLOSE:
            self.reason = payload[7 : 7 + payload[6]].decode()
            return False
        assert kind != frames.BASIC_NACK
        if kind == frames.BASIC_ACK:
            tag, bits = frames.tag_and_bits(payload)
            self.confirmed |= set(self._sent[:tag]) if bits & 1 else {self._sent[tag - 1]}
        return True

    def all_confirmed(self) -> None:
        while len(self.confirmed) < len(self._sent):
            assert self.read(), f"{len(self._sent) - len(self.confirmed)} are open: {self.reason}"


def begun(lab: Lab, old: str, kind: str, count: int) -> tuple[str, str, Witness]:
    """A queue with a witness, of whose messages `count` are confirmed, and one for load: their names, and the witness."""
    queue, loaded = (f"{each}-{time.time_ns()}" for each in (kind, f"{kind}-load"))
    for name in (queue, loaded):
        declare(lab.nodes[old].door, name)
    witness = Witness(lab.nodes[old].door, queue, queue)
    witness.send(range(1, count + 1))
    witness.all_confirmed()
    return queue, loaded, witness


def bodies(url: str, queue: str) -> list[int]:
    """What a queue gives, acked, until it is empty."""
    found = []
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        while (got := channel.basic_get(queue))[0] is not None:
            found.append(int(got[2]))
            channel.basic_ack(got[0].delivery_tag)
    return found


@pytest.fixture(scope="module")
def pair_with_one_log(pair: Lab) -> Iterator[Lab]:
    """The shared pair, whose logs are the same after all that was done to it here."""
    yield pair
    in_sync(pair, applied=True)
    same_logs(pair)


def equal(lab: Lab, *queues: str) -> None:
    """Both nodes have applied everything, and what was consumed is in neither's queues."""
    in_sync(lab, applied=True)
    for queue in queues:
        eventually(f"{queue} empty on both", lambda queue=queue: all(depth(lab.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))


@pytest.mark.proves("stall")
@pytest.mark.parametrize("part", [".sidecar", ".broker", ""])
def test_a_primary_that_stood_still_and_was_promoted_over(pair_with_one_log: Lab, part: str) -> None:
    """It confirms nothing of what came while it stood still, tells its clients, and follows: its tail was never safe."""
    pair = pair_with_one_log
    old, new = in_sync(pair)
    queue, loaded, witness = begun(pair, old, "stood", COUNT)
    load = Load([pair.nodes[name].door for name in (old, new)], loaded, f"{loaded}-app", rate_per_s=RATE, heartbeat_s=2)  # notices a stall soon
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        witness.send(range(COUNT + 1, 2 * COUNT + 1))  # in flight
        pair.stop(old + part)
        stopped = time.time()
        try:
            witness.send(range(2 * COUNT + 1, 3 * COUNT + 1))
            missed(pair, new, old)
            promote(pair, new, old)
            second = Witness(pair.nodes[new].door, queue, queue)
            second.send(range(2 * COUNT + 1, 4 * COUNT + 1))  # once more what it never heard of, and new ones
            second.all_confirmed()
            time.sleep(max(0.0, stopped + 1.1 * BACKUP_TIMEOUT_S - time.time()))
        finally:
            pair.cont(old + part)
        while witness.read():
            pass
        over = time.time()
        assert "starts again" in witness.reason or "is a backup" in witness.reason, witness.reason
        assert not witness.confirmed & set(range(2 * COUNT + 1, 4 * COUNT + 1)), "confirmed by a primary that was over"
        eventually("it follows", lambda: pair.status(old)["primary"] == new)
        assert in_sync(pair) == (new, old)
        load.finish()
    finally:
        load.stop()
    # What a consumer acked to a primary that stood still, or was over and did not know it yet, was never taken.
    load.check([span(stopped, over)])
    held = Counter(bodies(pair.nodes[new].door, queue))
    exactly(sorted(held.elements()), sorted(held))
    exactly(sorted((witness.confirmed | second.confirmed) - set(held)), [])
    equal(pair, queue, loaded)


@pytest.mark.proves("slow-backup")
@pytest.mark.one_version("4.3")
def test_a_backup_whose_broker_is_slow(pair: Lab) -> None:
    """It slows who publishes at full speed, and says so; so whoever promotes it waits for a part of what was published only, and for a short time."""
    primary, backup = in_sync(pair, applied=True)
    queue, over = f"slow-{time.time_ns()}", threading.Event()
    lags: list[int] = []
    reasons: set[str] = set()
    declare(pair.nodes[primary].door, queue, queue_type="quorum")

    def slow_down() -> None:
        while not over.is_set():
            pair.stop(f"{backup}.broker")
            over.wait(STANDS_S)
            pair.cont(f"{backup}.broker")
            over.wait(RUNS_S)

    def look() -> None:
        status = told(pair, primary)
        assert status["members"] == ["e1", "e2"]
        lags.append(status["peers"][backup]["apply_lag_entries"])
        reasons.add(re.sub(r"\d+ entries", "N entries", told(pair, backup)["reason"]))

    slowing = threading.Thread(target=slow_down)
    slowing.start()
    try:
        began = time.monotonic()
        with Publisher([pair.nodes[primary].door], f"{queue}-app", window=WINDOW) as publisher:
            for number in range(MANY):
                publisher.publish("", queue, b"%d" % number)
                if number % LOOKS_EACH == 0:
                    look()
            publisher.flush(120)
        took_s = time.monotonic() - began
        said = "its queues are N entries behind the log: it takes no more of it for the time being, which slows publishers"
        assert f"in-sync backup of {primary}; {said}" in reasons, reasons
        assert max(lags) < MANY // 3, lags
        pair.kill(primary)
        began = time.monotonic()
        take_over(pair, backup, primary)
        assert time.monotonic() - began < took_s / 2, took_s
    finally:
        over.set()
        slowing.join()
    assert depth(pair.nodes[backup].door, queue) == MANY
    pair.start(primary)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)) as connection:
        connection.channel().queue_delete(queue)


@pytest.mark.proves("stall")
@pytest.mark.parametrize("part", [".sidecar", ".broker"])
def test_a_backup_that_stands_still_is_left_out_and_comes_back(pair_with_one_log: Lab, part: str) -> None:
    """Nobody's connection is lost, nothing is delivered twice, and an operator sees who is out of the set."""
    pair = pair_with_one_log
    primary, backup = in_sync(pair)
    queue = f"left-out-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    load = Load([pair.nodes[primary].door], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        pair.stop(backup + part)
        try:
            eventually("it to be left out", lambda: pair.status(primary)["members"] == [primary])
            confirmed = load.confirmed
            eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)
            assert told(pair, primary)["peers"][backup]["lag_entries"] > 0
            # A sidecar whose broker stands still cannot be told yet that it is out: the place in the set is the primary's word.
            shown = r"no answer .* no .*nothing within" if part == ".sidecar" else r"(ready|catch-up|standalone) .* no "
            eventually("list to show it", lambda: bool(re.search(shown, line_of(backup, command("list", lab=pair)[1]))))
            said = command("list", lab=pair)[1]
            assert f"{backup} was taken out of the set, as it made no progress for 5 s" in line_of(primary, said), said
        finally:
            pair.cont(backup + part)
        assert in_sync(pair) == (primary, backup)
        assert "taken out" not in command("list", lab=pair)[1]
        load.finish()
    finally:
        load.stop()
    load.check([])
    equal(pair, queue)


@pytest.mark.quick
def test_a_broker_that_confirms_nothing_is_told(pair_with_one_log: Lab) -> None:
    """Long before its heartbeats say that it does not answer, or where it goes on answering them: so does one whose disk is full."""
    pair = pair_with_one_log
    primary, _ = in_sync(pair)
    queue = f"told-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    witness = Witness(pair.nodes[primary].door, queue, queue)
    witness.send(range(1, 2))
    witness.all_confirmed()  # its broker was asked whether it may publish there
    pair.stop(f"{primary}.broker")
    try:
        witness.send(range(2, 11))
        shown = r"its broker has confirmed nothing of the log for \d+ s: see its log, and whether its disk is full"
        eventually("it to be told", lambda: bool(re.search(shown, pair.status(primary)["reason"])))
    finally:
        pair.cont(f"{primary}.broker")
    witness.all_confirmed()
    assert "confirmed nothing" not in told(pair, primary)["reason"]
    assert bodies(pair.nodes[primary].door, queue) == list(range(1, 11))
    equal(pair, queue)


@pytest.mark.proves("stall")
def test_a_primary_that_goes_on_where_it_cannot_see_who_was_promoted_diverges(
    new_lab: Callable[..., Lab], broker_version: str, tmp_path: Path
) -> None:
    """The operator's word that it stays down until it has reached the new primary was not true: it confirms alone, keeps that, and says so."""
    lab = new_lab({"east": 2}, broker=broker_version)
    set_up(lab, "backup_timeout_s = 1.0")
    lab.up()
    old, new = in_sync(lab)
    declare(lab.nodes[old].door, "cut")
    witness = Witness(lab.nodes[old].door, "cut", "cut")
    witness.send(range(1, 11))
    witness.all_confirmed()
    lab.stop(f"{old}.sidecar")
    missed(lab, new, old)
    promote(lab, new, old)
    lab.stop(f"{new}.sidecar")
    lab.cont(f"{old}.sidecar")
    witness.send(range(11, 21))
    witness.all_confirmed()
    assert told(lab, old)["members"] == [old]
    lab.cont(f"{new}.sidecar")
    reason = lab.wait_role(old, "diverged")["reason"]
    assert re.search(rf"entries \d+ to \d+ may have been confirmed by this node alone; {new} lacks them", reason), reason
    while witness.read():
        pass
    assert "starts again" in witness.reason
    assert told(lab, new)["members"] == [new]
    assert bodies(lab.nodes[new].door, "cut") == list(range(1, 11))
    tail = tmp_path / "tail.jsonl"
    code, said = command("reinit", old, "--export", str(tail), lab=lab)
    assert code == 0, said
    assert in_sync(lab) == (new, old)
    code, said = command("republish", str(tail), "--to", lab.nodes[new].door)
    assert (code, said.splitlines()[0]) == (0, "10 messages published and confirmed")
    assert bodies(lab.nodes[new].door, "cut") == list(range(11, 21)), "nothing that was confirmed anywhere is lost"
    equal(lab, "cut")
    same_logs(lab)


def test_what_is_given_back_while_the_log_waits(pair: Lab) -> None:
    """It waits behind a publish: neither the queue nor its consumer has it, and yet it has not gone (see `broker_plugin.reconcile.reconciler`)."""
    primary, backup = in_sync(pair)
    queue = f"given-back-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.basic_publish("", queue, b"1", pika.BasicProperties(delivery_mode=2))
        eventually("it to be there", lambda: depth(pair.nodes[backup].broker, queue) == depth(pair.nodes[primary].broker, queue) == 1)
        method, _, _ = channel.basic_get(queue)
        pair.stop(f"{backup}.sidecar")
        try:
            channel.basic_publish("", "nowhere", b"", pika.BasicProperties(delivery_mode=2))
            channel.basic_nack(method.delivery_tag, requeue=True)
            connection.sleep(0.9 * BACKUP_TIMEOUT_S)  # the census looks once a second
        finally:
            pair.cont(f"{backup}.sidecar")
        eventually("it to be back", lambda: depth(pair.nodes[primary].broker, queue) == 1)
    in_sync(pair, applied=True)
    time.sleep(3.0)  # in which a backup takes out what is said to have gone
    eventually("the backup to have it still", lambda: depth(pair.nodes[backup].broker, queue) == 1)
