"""The publisher through real doors: sequences that go on after a restart, one process per name, failover without loss or repeats."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pika
import pytest

from lrq_ha.lab import Lab
from lrq_ha.publisher import FencedError, FullSyncContext, FullSyncRequest, NackedError, Publisher

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(groups={"east": 2, "west": 1}, directory=tmp_path_factory.mktemp("door") / "lab") as found:
        yield found


def doors(lab: Lab) -> list[str]:
    return [node.door for node in lab.nodes.values() if node.group == "east"]


def declare(lab: Lab, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[str(lab.primary("east"))].door)) as connection:
        connection.channel().queue_declare(queue, durable=True)


def drain(lab: Lab, queue: str, count: int) -> list[str]:
    """Replication IDs of `count` messages, and of whatever comes within a second after them."""
    found: list[str] = []
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[str(lab.primary("east"))].door)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        for method, properties, _ in channel.consume(queue, inactivity_timeout=1.0):
            if method is None:
                if len(found) >= count:
                    break
                continue
            found.append(properties.headers["x-lrq-id"])
            channel.basic_ack(method.delivery_tag)
    return found


def test_a_restart_continues_both_sequences(lab: Lab) -> None:
    declare(lab, "again")
    for start in (0, 3):
        with Publisher(doors(lab), "restarts", "orders") as p:
            assert [p.publish("", "again", b"").result(20) for _ in range(3)] == [f"restarts/{start + n}" for n in (1, 2, 3)]
            last = p.transmit_log_entry_message(b"", ["west"]).result(20)
    assert last == "restarts.lrq/4", "each process announced the client first"
    assert drain(lab, "again", 6) == [f"restarts/{n}" for n in range(1, 7)]


def test_an_unknown_destination_is_refused_by_name(lab: Lab) -> None:
    with Publisher(doors(lab), "lost", "orders") as p, pytest.raises(NackedError, match="destination 'nowhere' is not known"):
        p.transmit_log_entry_message(b"", ["nowhere"]).result(20)


def test_the_server_asks_for_a_full_sync(lab: Lab) -> None:
    served: list[FullSyncRequest] = []

    def provide(request: FullSyncRequest, context: FullSyncContext) -> None:
        for number in range(10):
            context.transmit(b"%d" % number)
        context.complete().result(20)
        served.append(request)

    with Publisher(doors(lab), "full", "catalog") as p:
        p.on_full_sync(provide)
        p.transmit_log_entry_message(b"delta", ["west"]).result(20)
        deadline = time.monotonic() + 20
        while not served:
            assert time.monotonic() < deadline, "the server asked for nothing"
            time.sleep(0.05)
    assert [(request.client_name, request.destination) for request in served] == [("catalog", "west")]


def test_failover_loses_and_repeats_nothing_and_tells_two_of_one_name(lab: Lab) -> None:
    declare(lab, "failover")
    declare(lab, "twice")
    first = Publisher(doors(lab), "twin")
    first.publish("", "twice", b"").result(20)
    with Publisher(doors(lab), "twin") as second:
        assert second.publish("", "twice", b"").result(20) == "twin/2"
    with Publisher(doors(lab), "mover") as p:
        old = str(lab.primary("east"))
        new = next(name for name in ("e1", "e2") if name != old)
        confirms = [p.publish("", "failover", b"x" * 1024) for _ in range(3000)]
        confirms[500].result(20)
        lab.kill(old)
        lab.promote(new, down=[old])
        confirms += [p.publish("", "failover", b"x" * 1024) for _ in range(1000)]
        assert [confirm.result(60) for confirm in confirms] == [f"mover/{n}" for n in range(1, 4001)]
    assert drain(lab, "failover", 4000) == [f"mover/{n}" for n in range(1, 4001)]

    deadline = time.monotonic() + 10
    while first._failure is None:  # it has to log in again, and then learns that its name was used
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(FencedError, match="'twin' is in use elsewhere"):
        first.publish("", "twice", b"")
    first.close()
