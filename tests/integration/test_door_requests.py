"""Requests with direct reply-to (`amq.rabbitmq.reply-to`) and their answers: what a backup holds, and how often an answer comes."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from door_rig import Rig
from pamqp import commands
from talk import Talk

pytestmark = [pytest.mark.broker, pytest.mark.proves("client: direct reply-to")]

B, Tx = commands.Basic, commands.Tx
ASK = "amq.rabbitmq.reply-to"


def client(url: str) -> Talk:
    return Talk(url, uuid.uuid4().hex[:10], "classic")


@pytest.mark.quick("3.10", "4.3")
def test_requests_are_on_the_backup(rig: Rig) -> None:
    """An answer from there goes nowhere; who asks for that is told."""
    requests = [b"request %d" % i for i in range(30)]
    queue = rig.declare(rig.channel())
    with client(rig.url) as t:
        t.open(confirms=True)
        t.do(B.Consume(queue=ASK, no_ack=True))
        for body in requests:
            t.publish(queue, body, reply_to=ASK, correlation_id="c", headers={"a": "b"}, message_id="m")
        t.confirms()
        rig.both_hold(queue, requests)
    with client(rig.broker_url(rig.backup)) as worker:
        worker.open(confirms=True)
        worker.do(B.Consume(queue=queue))
        asked = [m.properties for m in worker.deliveries(len(requests))]
        assert {(p.reply_to, p.correlation_id, p.message_id, p.headers["a"]) for p in asked} == {(f"{ASK}.gone", "c", "m", "b")}
        heard = worker.heard[1]
        for mandatory, told in ((False, ["basic.ack"]), (True, ["basic.return", "basic.ack"])):
            heard.clear()
            worker.publish(asked[0].reply_to, b"answer", mandatory=mandatory)
            worker.confirms()
            worker.quiet()
            assert [event[0] for event in heard] == told


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_an_answer_that_names_further_queues(rig: Rig, header: str) -> None:
    """Who asked hears it, and it is in those queues, on the backup too."""
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with client(url) as t:
            t.open(confirms=True)
            queue = t.queue()
            t.do(B.Consume(queue=ASK, no_ack=True))
            t.publish(queue, b"request", reply_to=ASK)
            asked = t.do(B.Get(queue=queue, no_ack=True))
            t.publish(asked.properties.reply_to, b"answer", headers={header: [queue]})
            t.confirms()
            t.quiet()
            heard.append([event[3] for event in t.heard[1] if event[0] == "basic.deliver"])
            if url == rig.url:
                rig.both_hold(queue, [b"answer"])
            heard.append(t.do(B.Get(queue=queue, no_ack=True)).body)
            t.do(commands.Queue.Delete(queue=queue))
    assert heard == 2 * [[b"answer"], b"answer"]


def test_answers_in_a_transaction(rig: Rig) -> None:
    """An answer comes once, at the commit, as everything of a transaction."""
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with client(url) as t, client(url) as worker:
            t.open()
            worker.open()
            queue = t.queue()
            t.do(B.Consume(queue=ASK, no_ack=True))
            t.publish(queue, b"request", reply_to=ASK)
            worker.do(B.Consume(queue=queue))
            address = worker.deliveries(1)[0].properties.reply_to
            worker.select()
            counts = []
            for end in (Tx.Rollback(), Tx.Commit()):
                worker.publish(address, b"answer")
                worker.publish(queue, b"beside")
                worker.do(end)
                t.quiet()
                counts.append([event[0] for event in t.heard[1]].count("basic.deliver"))
            heard.append(counts)
            t.do(commands.Queue.Delete(queue=queue))
    at_once = rig.lab.version.startswith("3.")  # RabbitMQ 3 does not wait for the commit
    assert heard == [[1, 2] if at_once else [0, 1], [0, 1]]


def test_an_answer_in_a_transaction_beside_a_consumer_without_acks(rig: Rig) -> None:
    """For such a consumer the door gives acks, which must count at once: so what the broker was shown of the transaction is shown again."""
    with client(rig.url) as t, client(rig.url) as worker:
        t.open()
        worker.open()
        queue = t.queue()
        t.do(B.Consume(queue=ASK, no_ack=True))
        t.publish(queue, b"request", reply_to=ASK)
        worker.do(Tx.Select())
        worker.do(B.Consume(queue=queue, no_ack=True))
        address = worker.deliveries(1)[0].properties.reply_to
        counts = []
        for end in (Tx.Rollback(), Tx.Commit()):
            worker.publish(address, b"answer")
            for _ in range(3):
                t.publish(queue, b"more")
                worker.deliveries(1)
                worker.quiet()
            worker.do(end)
            t.quiet()
            counts.append([event[0] for event in t.heard[1]].count("basic.deliver"))
        rig.both_hold(queue, [])
        t.do(commands.Queue.Delete(queue=queue))
    assert counts == [0, 1]


def test_an_answer_in_a_transaction_that_the_broker_refuses(rig: Rig) -> None:
    """At once, in the broker's words, whatever is wrong with it."""
    heard = []
    wrong: tuple[dict[str, Any], ...] = ({"user_id": "somebody-else"}, {"expiration": "1.5"})
    for url in (rig.broker_url(rig.primary), rig.url):
        with client(url) as t:
            for properties in wrong:
                t.open()
                t.select()
                t.publish(f"{ASK}.token", b"answer", **properties)
                assert t.hear() is None
            heard.append(t.transcript())
    assert heard[0] == heard[1]
