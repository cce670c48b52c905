"""The publisher through real doors: sequences that go on after a restart, one process per name, failover without loss or repeats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pika
import pytest
from publisher_api import inside

from lrq_ha.lab import Lab
from lrq_ha.publisher import FencedError, FullSyncRequest, NackedError, NoPrimary

pytestmark = pytest.mark.broker

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    with Lab({"east": 2, "west": 1}, tmp_path_factory.mktemp("door") / "lab", broker_version) as found:
        yield found


@pytest.fixture
def name() -> str:
    """Of a producer and a queue of this test alone."""
    return f"n{uuid.uuid4().hex[:12]}"


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


def test_a_restart_continues_both_sequences(lab: Lab, api: Make, name: str) -> None:
    declare(lab, name)
    for start in (0, 3):
        with api(doors(lab), name, "orders") as p:
            assert [p.publish("", name, b"").result(20) for _ in range(3)] == [f"{name}/{start + n}" for n in (1, 2, 3)]
            last = p.transmit_log_entry_message(b"", ["west"]).result(20)
    assert last == f"{name}.lrq/4", "each process announced the client first"
    assert drain(lab, name, 6) == [f"{name}/{n}" for n in range(1, 7)]


def test_an_unknown_destination_is_refused_by_name(lab: Lab, api: Make, name: str) -> None:
    with api(doors(lab), name, "orders") as p, pytest.raises(NackedError, match="destination 'nowhere' is not known"):
        p.transmit_log_entry_message(b"", ["nowhere"]).result(20)


def test_only_the_backup_is_known(lab: Lab, api: Make, name: str) -> None:
    backup = next(node for node in ("e1", "e2") if node != lab.primary("east"))
    with pytest.raises(NoPrimary, match="primary is") as caught:
        api([lab.nodes[backup].door], name, connect_timeout_s=3.0)
    ((address, answer),) = caught.value.answers.items()
    assert lab.nodes[backup].door.endswith(address)
    assert answer.startswith(f"320 node {backup} is a backup")


def test_wrong_credentials(lab: Lab, api: Make, name: str) -> None:
    wrong = [url.replace("app:", "app:not-", 1) for url in doors(lab)]
    with pytest.raises(NoPrimary, match="ACCESS_REFUSED") as caught:
        api(wrong, name, connect_timeout_s=3.0)
    assert len(caught.value.answers) == 2
    assert "not-" not in str(caught.value)


def test_the_server_asks_for_a_full_sync(lab: Lab, api: Make, name: str) -> None:
    served: list[FullSyncRequest] = []

    def provide(request: FullSyncRequest, context: Any) -> None:
        for number in range(10):
            context.transmit(b"%d" % number)
        context.complete().result(20)
        served.append(request)

    with api(doors(lab), name, name) as p:
        p.on_full_sync(provide)
        p.transmit_log_entry_message(b"delta", ["west"]).result(20)
        deadline = time.monotonic() + 20
        while not served:
            assert time.monotonic() < deadline, "the server asked for nothing"
            time.sleep(0.05)
    assert [(request.client_name, request.destination) for request in served] == [(name, "west")]


def test_failover_loses_and_repeats_nothing_and_tells_two_of_one_name(lab: Lab, api: Make, name: str) -> None:
    twins, mover = f"{name}-twin", f"{name}-mover"
    declare(lab, twins)
    declare(lab, mover)
    first = api(doors(lab), twins)
    first.publish("", twins, b"").result(20)
    with api(doors(lab), twins) as second:
        assert second.publish("", twins, b"").result(20) == f"{twins}/2"
    with api(doors(lab), mover) as p:
        old = str(lab.primary("east"))
        new = next(name for name in ("e1", "e2") if name != old)
        confirms = [p.publish("", mover, b"x" * 1024) for _ in range(3000)]
        confirms[500].result(20)
        lab.kill(old)
        lab.promote(new, down=[old])
        confirms += [p.publish("", mover, b"x" * 1024) for _ in range(1000)]
        assert [confirm.result(60) for confirm in confirms] == [f"{mover}/{n}" for n in range(1, 4001)]
    assert drain(lab, mover, 4000) == [f"{mover}/{n}" for n in range(1, 4001)]

    deadline = time.monotonic() + 10
    while inside(first)._failure is None:  # it has to log in again, and then learns that its name was used
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(FencedError, match="twin' is in use elsewhere"):
        first.publish("", twins, b"")
    first.close()
    lab.start(old)
    lab.wait_role(old, "ready", 60)
