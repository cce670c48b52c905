"""The demo's applications and their brokers."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pika
import pytest

from lrq_ha.demo.apps import ConsumerApp
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("3.10"), pytest.mark.proves("G1", "G3", "G6")]


@pytest.mark.quick
def test_a_node_that_stands_still_is_passed_by(brokers: Lab, tmp_path: Path) -> None:
    """It takes connections, and then says nothing."""
    url, queue = brokers.nodes["e1"].broker, f"flights-{time.monotonic_ns()}"
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True)
        for number in (1, 2, 3):
            channel.basic_publish("", queue, b"{}", pika.BasicProperties(headers={"x-lrq-id": f"app/{number}"}))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            app = ConsumerApp([f"amqp://app:app@127.0.0.1:{silent.getsockname()[1]}", url], queue, 3, tmp_path / "consumer.json")
            app.run()
        channel.queue_delete(queue)
    report = json.loads((tmp_path / "consumer.json").read_text())
    assert report == {"consumed": 3, "twice": [], "order_breaks": 0, "done": True}
