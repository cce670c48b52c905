"""SIGTERM in the middle of a stream: every confirmed publish is in the queue once, what was taken is not lost, clients are told, the log says so."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

import pika
import pytest
from load import eventually, primary_of
from pamqp import commands
from patience import PATIENT_DOOR
from raw_client import RawClient, publish

from broker_plugin.amqp import encode, frames
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

NewLab = Callable[..., Lab]


def bodies(lab: Lab, queue: str) -> list[int]:
    """What the broker's queue holds."""
    found: list[int] = []
    with pika.BlockingConnection(pika.URLParameters(lab.nodes["e1"].broker)) as connection:
        channel = connection.channel()
        while True:
            method, _, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                return found
            found.append(int(body))


class Stream:
    """Publishes numbers as fast as they go, until it reads connection.close, which it answers."""

    def __init__(self, url: str, queue: str, *, confirms: bool) -> None:
        self.client = RawClient(url)
        self.client.open_channel(confirms=confirms)
        self.sent = 0
        self.confirmed: set[int] = set()
        self.reason = ""
        self._queue = queue
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._write), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        while not self._closing.is_set():
            try:
                self.client.send(b"".join(publish(1, self._queue, b"%d" % (self.sent + i)) for i in range(20)))
            except OSError:
                return
            self.sent += 20
            time.sleep(0.002)

    def _read(self) -> None:
        upto = 0
        while (found := self.client.read()) is not None:
            kind, _, payload = found
            if kind == frames.BASIC_ACK:
                tag, bits = frames.tag_and_bits(payload)
                self.confirmed |= set(range(upto, tag)) if bits & 1 else {tag - 1}
                while upto in self.confirmed:
                    upto += 1
            elif kind == frames.CONNECTION_CLOSE:
                self._closing.set()
                self._threads[0].join()
                code = struct.unpack_from(">H", payload, 4)[0]
                self.reason = f"{code} {payload[7 : 7 + payload[6]].decode()}"
                self.client.send(encode.method_frame(0, commands.Connection.CloseOk()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(240)
            assert not thread.is_alive()
        self.client.socket.close()


@pytest.mark.quick(only=r"-2\]")
@pytest.mark.parametrize("nodes", [1, 2])
def test_sigterm_in_the_middle_of_a_stream(broker_version: str, new_lab: NewLab, nodes: int) -> None:
    lab = new_lab({"east": nodes}, broker=broker_version, door=PATIENT_DOOR | {"stop_timeout_s": 60.0, "drain_timeout_s": 60.0})
    lab.up()
    assert primary_of(lab) == "e1"
    url = lab.nodes["e1"].door
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        for queue in ("with", "without"):
            connection.channel().queue_declare(queue, durable=True)
    streams = {"with": Stream(url, "with", confirms=True), "without": Stream(url, "without", confirms=False)}
    eventually("the stream", lambda: len(streams["with"].confirmed) > 500)
    pid = lab.nodes["e1"].sidecar_pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    for stream in streams.values():
        stream.join()
        assert stream.reason == "320 this sidecar stops"
    eventually("its end", lambda: lab.nodes["e1"].sidecar_pid is None)
    said = lab.nodes["e1"].log.read_text()
    assert "2 clients are told that this sidecar stops" in said
    assert "all clients are gone" in said

    held = Counter(bodies(lab, "with"))
    assert set(held.values()) <= {1}, "twice"
    assert streams["with"].confirmed <= set(held), "confirmed and lost"
    assert set(held) <= set(range(streams["with"].sent))
    assert bodies(lab, "without") == list(range(streams["without"].sent)), "what was written before the close was seen is there, in order"


@pytest.mark.parametrize("stop_timeout_s", [1.0, 600.0])
def test_a_client_that_does_not_answer_holds_the_stop_up_for_a_moment_only(new_lab: NewLab, broker_version: str, stop_timeout_s: float) -> None:
    lab = new_lab({"east": 1}, broker=broker_version, door=PATIENT_DOOR | {"stop_timeout_s": stop_timeout_s})
    lab.up()
    with RawClient(lab.nodes["e1"].door) as client:
        client.open_channel()
        os.kill(lab.nodes["e1"].sidecar_pid or 0, signal.SIGTERM)
        eventually("its end", lambda: lab.nodes["e1"].sidecar_pid is None)  # long before 600 s
        assert client.closed()
        assert frames.CONNECTION_CLOSE in [kind for kind, *_ in client.got]
    said = "have not gone in time" if stop_timeout_s < 2 else "all clients are gone"
    assert said in lab.nodes["e1"].log.read_text()
