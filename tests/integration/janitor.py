"""Removes containers, networks and volumes of a test process when that has ended, however it ended: a run that is interrupted cannot do so itself.

It is a process of its own, which reads from a pipe that nobody writes to: the pipe's end is the end of the process that holds it. A signal to the
test run's group, as Ctrl-C sends it, does not reach it.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, suppress

import docker
from docker.errors import APIError

_watching: dict[str, subprocess.Popen[bytes]] = {}


def watch(label: str) -> None:
    """From now on, what carries this label (`NAME=VALUE`) goes when this process ends."""
    if label not in _watching:
        command = [sys.executable, __file__, label]
        _watching[label] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )


def remove(label: str) -> None:
    """Removes what carries this label."""
    with closing(docker.from_env(timeout=120)) as client:
        for container in client.containers.list(all=True, filters={"label": label}):
            with suppress(APIError):
                container.remove(force=True, v=True)
        for network in client.networks.list(filters={"label": label}):
            with suppress(APIError):
                network.remove()
        for volume in client.volumes.list(filters={"label": label}):
            with suppress(APIError):
                volume.remove(force=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
