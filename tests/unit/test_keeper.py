"""A lab that is asked: one that does not answer is not taken for one that is gone, and no other one ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrq_ha.cli.main import main
from lrq_ha.lab import Lab, LabError, files, keeper
from lrq_ha.lab.errors import NoLab


def test_a_keeper_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lab runs: nobody may use its folder for another one."""
    with pytest.raises(NoLab, match="No lab runs in"):
        keeper.ask(tmp_path, do="list")
    monkeypatch.setattr(keeper, "_ANSWER_TIMEOUT_S", 0.01)
    (tmp_path / "kept").touch()
    with socket.socket(socket.AF_UNIX) as listener, keeper._address(tmp_path) as address:
        listener.bind(address)
        listener.listen()
        for look in (lambda: keeper.ask(tmp_path, do="list"), lambda: keeper.wait_gone(tmp_path, 60.0), Lab({"east": 1}, tmp_path).prepare):
            with pytest.raises(LabError, match=r"has not answered within 0\.01 s") as caught:
                look()
            assert not isinstance(caught.value, NoLab)
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize("group", ["ea st", "-east", "east_1", ""])
def test_a_group_is_named_as_a_sidecar_takes_it(group: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="A group's name has 1 to 64 letters, digits, dots or hyphens"):
        Lab({group: 1}, tmp_path)
    Lab({"north-east.2": 1}, tmp_path)


@pytest.mark.parametrize("below", ["", "lab"], ids=["a file", "below a file"])
def test_what_cannot_be_a_folder_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    directory = tmp_path / "file" / below
    with pytest.raises(LabError, match=f"{directory} cannot be a lab's folder: (File exists|Not a directory)"):
        Lab({"east": 1}, directory).prepare()
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`lab up` takes them for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder of a lab that runs, and its keeper."""
    directory = tmp_path / "lab"
    Lab({"east": 1}, directory, brokers_only=True).prepare()
    process = keeper.start(directory, files.python_environment())
    yield directory, process
    process.communicate(timeout=60)


def test_a_second_lab_does_not_end_the_one_that_runs(running: tuple[Path, subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]) -> None:
    """`make lab` in a second terminal was refused, and killed the brokers of the first."""
    directory, process = running
    before = sorted(directory.rglob("*"))
    with pytest.raises(LabError, match="A lab runs in"):
        Lab({"east": 1}, directory).prepare()
    assert sorted(directory.rglob("*")) == before
    for _ in range(2):
        assert keeper.ask(directory, do="list") == {}
        assert main(["lab", "up", "--brokers-only", "--dir", str(directory)]) == 1
        assert f"A lab runs in {directory} already" in capsys.readouterr().err
    refused = Lab({"east": 1}, directory)
    refused.down()
    refused.remove()
    assert keeper.ask(directory, do="list") == {}
    assert process.poll() is None
    assert sorted(directory.rglob("*")) == before
    Lab({"east": 1}).down()  # its folder is its own


def test_a_folder_that_was_never_claimed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C came before the lab had looked whose it is, and it was removed with all that was in it."""

    def interrupted(directory: Path, do: str) -> None:
        raise KeyboardInterrupt if do == "list" else NoLab("none")

    (tmp_path / "thesis").write_text("kept")
    monkeypatch.setattr(keeper, "ask", interrupted)
    assert main(["lab", "up", "--brokers-only", "--dir", str(tmp_path)]) == 0
    assert "Ending the lab" in capsys.readouterr().out
    assert (tmp_path / "thesis").read_text() == "kept"


@pytest.fixture
def broker(running: tuple[Path, subprocess.Popen[bytes]]) -> list[str]:
    """A program that stands for the broker of node e1 of that lab, and one for its rabbitmqctl; options that make a command find the lab."""
    directory, _ = running
    node = dict.fromkeys(("door", "broker", "http", "config", "log", "broker_log"), "amqp://127.0.0.1:1")
    (directory / keeper.LAB_FILE).write_text(json.dumps({"groups": {"east": {"primary": None, "nodes": {"e1": node}}}}))
    for name, does in (("rabbitmq-server", "exec sleep 600"), ("rabbitmqctl", 'echo "$0" "$@" of "$WHOSE"; echo warned >&2; exit 64')):
        (directory / name).write_text(f"#!/bin/sh\n{does}\n")
        (directory / name).chmod(0o700)
    environment = {"WHOSE": "e1", "PATH": "/usr/bin:/bin"}
    keeper.ask(directory, do="spawn", key="e1.broker", argv=[str(directory / "rabbitmq-server")], env=environment, cwd="/", log="/dev/null")
    return ["--dir", str(directory)]


def test_rabbitmqctl_of_a_nodes_broker(broker: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """All that follows the node's name is rabbitmqctl's, and all that comes of it is the caller's."""
    for given in (["-q", "list_queues", "--dir", "name"], ["--help"], []):
        assert main(["lab", "ctl", *broker, "e1", *given]) == 64
        said = capfd.readouterr()
        assert said.out.split() == [f"{broker[1]}/rabbitmqctl", *given, "of", "e1"]
        assert said.err == "warned\n"
    assert main(["lab", "ctl", *broker, "e1", "--", "status"]) == 64
    assert capfd.readouterr().out.split()[1:] == ["status", "of", "e1"]


def test_rabbitmqctl_ended_by_a_signal(broker: list[str]) -> None:
    Path(broker[1], "rabbitmqctl").write_text("#!/bin/sh\nkill -TERM $$\n")
    assert main(["lab", "ctl", *broker, "e1", "status"]) == 143


def test_rabbitmqctl_where_there_is_no_broker(broker: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert main(["lab", "ctl", *arguments, "status"]) == 1
        return capfd.readouterr().err

    assert told(*broker, "e2") == "lrq-ha: The lab has no node 'e2'. It has e1\n"
    assert told("--dir", str(tmp_path), "e1").startswith(f"lrq-ha: No lab runs in {tmp_path}. Start one with `lrq-ha lab up`")
    Lab.attach(Path(broker[1])).kill("e1.broker")
    assert told(*broker, "e1") == "lrq-ha: The broker of e1 is not running. Start it: lrq-ha lab start e1.broker\n"
