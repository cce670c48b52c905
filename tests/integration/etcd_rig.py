"""An etcd of three members for a test, and ways to servers that can be cut or slowed. Rule: all of it ends with its `with`."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from load import eventually

from lrq_ha.lab import etcd, keeper
from lrq_ha.lab.ports import free_ports
from lrq_ha.lab.tools import find_tool

MEMBERS = 3


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    """The answer of one member of etcd. Raises OSError."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v3/{path}", json.dumps(body).encode()), timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


class EtcdCluster:
    """Three members on this machine, each with its data below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._ports = free_ports()
        self.endpoints = [f"http://127.0.0.1:{next(self._ports)}" for _ in range(MEMBERS)]
        peers = [f"http://127.0.0.1:{next(self._ports)}" for _ in range(MEMBERS)]
        together = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self._folder = folder
        self._commands = [
            [str(find_tool(etcd.KEY)), "--name", f"m{number}", "--data-dir", str(folder / f"m{number}"), "--log-level", "warn",
             "--listen-client-urls", endpoint, "--advertise-client-urls", endpoint, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", together]
            for number, (endpoint, peer) in enumerate(zip(self.endpoints, peers, strict=True))]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self.start(*range(MEMBERS))
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self._running)
        self._ports.close()

    def start(self, *members: int) -> None:
        """Starts members again, and returns when all of etcd has a leader."""
        for member in members:
            with (self._folder / f"m{member}.log").open("ab") as log:
                self._running[member] = subprocess.Popen(self._commands[member], stdout=log, stderr=log, preexec_fn=keeper.end_with_parent)
        eventually("etcd to have a leader", lambda: self.leader() in self._running)

    def kill(self, *members: int) -> None:
        for member in members:
            process = self._running.pop(member)
            process.kill()
            process.wait()

    def signal(self, member: int, number: int) -> None:
        self._running[member].send_signal(number)

    def leader(self) -> int:
        """The member that leads etcd, as one that answers says. Raises OSError."""
        said = post(self.endpoints[next(iter(self._running))], "maintenance/status")
        names = {post(self.endpoints[member], "maintenance/status")["header"]["member_id"]: member for member in self._running}
        return names[said["leader"]]


class Way:
    """A way to a server. `cut`: nothing passes in either direction until it is mended, and what was sent arrives then. `delay_s`: of each answer."""

    def __init__(self, to: str) -> None:
        url = urlsplit(to)
        self._to = (str(url.hostname), int(url.port or 0))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.delay_s = 0.0
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self.delay_s = 0.0
        self._whole.set()

    def close(self) -> None:
        self.mend()
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[client], daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._whole.wait()
        try:
            there = socket.create_connection(self._to)
        except OSError:
            client.close()
            return
        threading.Thread(target=self._pass_on, args=[client, there, False], daemon=True).start()
        self._pass_on(there, client, True)

    def _pass_on(self, source: socket.socket, to: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.delay_s:
                    time.sleep(self.delay_s)
                self._whole.wait()
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def close_ways(ways: Sequence[Way]) -> None:
    for way in ways:
        way.close()


def copy_data(source: Path, to: Path) -> None:
    """Copies the data of an etcd that does not run, in the place of what is there."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)
