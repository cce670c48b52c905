"""A slow link between two nodes: what gets on is not taken for silence, however long one batch takes."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pika
import pytest
from load import declare, depth, in_sync, same_logs, set_up, told

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

BACKUP_TIMEOUT_S = 1.5
LINK_BYTES_PER_S = 1 << 20
PIECE_BYTES = 1 << 15
BUFFER_BYTES = 1 << 16
MESSAGE_BYTES = 5 << 20  # takes several times backup_timeout_s


class SlowWay:
    """A way to a node's door by which so many bytes pass in a second; what the door says comes at once. Neither end can write ahead of it."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._server.bind(("127.0.0.1", 0))
        self._server.listen()
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                try:
                    door = socket.create_connection(self._to)
                except OSError:
                    client.close()
                    continue
                for way in ((client, door, PIECE_BYTES / LINK_BYTES_PER_S), (door, client, 0.0)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, to: socket.socket, pause_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                to.sendall(data)
                time.sleep(pause_s * len(data) / PIECE_BYTES)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def pair(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Each way between them is slow."""
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("slow") / "lab", broker_version)
    set_up(lab, f"backup_timeout_s = {BACKUP_TIMEOUT_S}\n")
    ways = []
    for node in lab.nodes.values():
        text = node.config.read_text()
        [port] = re.findall(r'(?s)\[\[peers\]\].*?door = "amqp://[^"]+:(\d+)"', text)
        ways.append(SlowWay(int(port)))
        node.config.write_text(re.sub(rf'(?s)(\[\[peers\]\].*?door = "amqp://[^"]+:){port}"', rf'\g<1>{ways[-1].port}"', text))
    with lab:
        yield lab
    for way in ways:
        way.close()


def publish(lab: Lab, primary: str, queue: str) -> None:
    """A large message, until it is confirmed."""
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"x" * MESSAGE_BYTES, pika.BasicProperties(delivery_mode=2))


def test_a_batch_that_takes_longer_than_the_time_a_backup_has(pair: Lab) -> None:
    primary, backup = in_sync(pair, applied=True)
    queue = f"slow-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue)
    began = time.monotonic()
    publish(pair, primary, queue)
    assert time.monotonic() - began > 2 * BACKUP_TIMEOUT_S, "it is slow, and waited for"
    assert "made no progress" not in pair.nodes[primary].log.read_text()
    assert in_sync(pair, applied=True) == (primary, backup)

    # One that is not in the set comes in, however long what it lacks takes.
    pair.kill(f"{backup}.sidecar")
    publish(pair, primary, queue)
    assert told(pair, primary)["members"] == [primary]
    pair.start(f"{backup}.sidecar")
    assert in_sync(pair, applied=True) == (primary, backup)
    assert pair.nodes[primary].log.read_text().count("made no progress") == 1, "while it was away"
    assert depth(pair.nodes[backup].broker, queue) == 2
    same_logs(pair)
