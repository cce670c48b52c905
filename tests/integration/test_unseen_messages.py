"""A renewal (R17) and what a quorum queue holds without a word: it is waited for, or the renewal is given up. It is never left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pika
import pytest
from load import command, consume, declare, depth, eventually, in_sync, primary_of, renew, replace_primary, set_up, told
from pika.adapters.blocking_connection import BlockingChannel
from renewals import SMALL_LOG, discard, empty, equal, fall_off, publish

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("limit: unseen messages")]

HELD_BACK_S, LONG_S = 5, 600


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("unseen") / "lab", broker_version)
    set_up(lab, f"{SMALL_LOG}backup_timeout_s = 10.0\n")
    with lab:
        yield lab


def give_back(door: str, queue: str, kind: str) -> None:
    """A client takes the first message and gives it back, in a way in which this kind of queue holds it back."""
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel: BlockingChannel = connection.channel()
        method, _, _ = channel.basic_get(queue)
        if kind == "failed":
            channel.basic_reject(method.delivery_tag, requeue=True)
        else:
            channel.basic_nack(method.delivery_tag, requeue=True)


def given_up(lab: Lab, reason: str) -> None:
    """A renewal is, and a dry run says so before."""
    for arguments in (("--dry-run",), ()):
        code, said = command("renew", *arguments, lab=lab)
        assert code == 1, said
        assert reason in said, said
        assert ("it would be given up" in said) == bool(arguments), said


def drop(lab: Lab, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
        connection.channel().queue_delete(queue)


@pytest.mark.parametrize("kind", ["all"])  # of which the sidecar, too, gives back what it will not see
def test_what_is_held_back_for_a_retry(lab: Lab, broker_version: str, kind: str) -> None:
    if broker_version.startswith("3"):
        pytest.skip("RabbitMQ 3 has no delayed retries")
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door, queue, long = lab.nodes[primary].door, f"retried-{kind}", f"long-{kind}"
    for name, seconds in ((queue, HELD_BACK_S), (long, LONG_S)):
        declare(door, name, queue_type="quorum", delayed_retry_type=kind, delayed_retry_min=1_000 * seconds, delayed_retry_max=1_000 * seconds)
    publish(lab, queue, range(3))
    publish(lab, long, range(3))
    fall_off(lab, primary, backup)
    discard(lab, backup)

    give_back(door, long, kind)
    eventually("it to be held back", lambda: depth(lab.nodes[primary].broker, long) == 2)
    given_up(lab, f"queue '{long}' in vhost '/' holds back unseen what consumers have given back")
    assert told(lab, backup)["end"] == 0, "nobody joins at a renewal that was given up"
    drop(lab, long)

    give_back(door, queue, kind)
    renew(lab)
    assert in_sync(lab, applied=True) == (primary, backup)
    equal(lab, {queue: 3})
    replace_primary(lab, primary, backup)
    assert sorted(consume(lab.nodes[backup].door, queue, 3)) == [0, 1, 2], "also what was held back"
    lab.start(primary)
    in_sync(lab, applied=True)
    drop(lab, queue)


def test_dead_letters_that_wait(lab: Lab) -> None:
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door = lab.nodes[primary].door
    keeps = {"queue_type": "quorum", "dead_letter_strategy": "at-least-once", "dead_letter_exchange": "", "overflow": "reject-publish"}
    declare(door, "arrived")
    declare(door, "arrives", **keeps, message_ttl=1, dead_letter_routing_key="arrived")
    declare(door, "waits", **keeps, message_ttl=1, dead_letter_routing_key="nowhere")
    publish(lab, "arrives", range(3))
    publish(lab, "waits", range(3))
    eventually("dead letters to arrive", lambda: depth(lab.nodes[primary].broker, "arrived") == 3)
    fall_off(lab, primary, backup)
    discard(lab, backup)

    assert depth(lab.nodes[primary].broker, "waits") == 0, "dead letters that wait are in no length"
    rows = lab.ctl(primary, "list_queues", "name", "messages", "messages_ready").splitlines()
    assert "waits\t3\t0" in rows, "the operator sees them"
    given_up(lab, "has x-dead-letter-strategy at-least-once: dead letters wait in it unseen")
    assert told(lab, backup)["end"] == 0
    drop(lab, "waits")

    given_up(lab, "queue 'arrives' in vhost '/' has x-dead-letter-strategy at-least-once")
    assert command("renew", "--dry-run", "--dead-letters-arrived", lab=lab)[0] == 0
    renew(lab, "--dead-letters-arrived")
    assert in_sync(lab, applied=True) == (primary, backup)
    equal(lab, {"arrives": 0, "arrived": 3})
