"""What an interrupted test run leaves behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import docker
import janitor
import pytest
from container_lab import ContainerLab, _labels, bare_image, programs, root_folders, volumes, why_not
from load import eventually

pytestmark = [pytest.mark.docker, pytest.mark.quick]

#: A test process: makes a container with a label, says so, and goes on for ever.
MAKES_ONE = """
import signal, sys, time, docker, janitor
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it
image, label, value, volumes = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
janitor.watch(f"{label}={value}")
docker.from_env().containers.run(image, ["/usr/bin/sleep", "600"], detach=True, labels={label: value}, volumes=volumes, network_mode="none")
print("made", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_containers_go_with_the_run_that_made_them(tmp_path: Path, number: signal.Signals) -> None:
    if reason := why_not(tmp_path):
        pytest.skip(reason)
    label, value = "lrq-ha.test-janitor", uuid.uuid4().hex
    with closing(docker.from_env(timeout=60)) as client:
        seen = str(volumes([*programs(), *root_folders()], tmp_path))
        command = [sys.executable, "-c", MAKES_ONE, bare_image(client), label, value, seen]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as run:
            assert run.stdout is not None
            assert run.stdout.readline() == b"made\n"
            filters = {"label": f"{label}={value}"}
            assert len(client.containers.list(all=True, filters=filters)) == 1
            os.killpg(run.pid, number)
        eventually("its container to go", lambda: not client.containers.list(all=True, filters=filters))


def test_a_lab_of_containers_is_watched_before_it_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []
    monkeypatch.setattr(janitor, "watch", watched.append)
    lab = ContainerLab.__new__(ContainerLab)
    lab.nodes, lab._plans = {}, {}
    lab._begin(0.0)
    [(label, value)] = _labels().items()
    assert watched == [f"{label}={value}"]
