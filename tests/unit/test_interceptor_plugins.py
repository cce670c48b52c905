"""Finding interceptors by their entry points, making them, and running them: what is wrong is named, and nothing is loaded that is not asked for."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_config import MINIMAL
from pamqp import commands

from broker_plugin.amqp import content_header, encode
from broker_plugin.door.server import Door
from lrq_ha.errors import LrqError
from lrq_ha.interceptors import Accept, Client, Delivery, Enqueue, Interceptor, Message, Outcome, Point, Routed, Routing, Topology
from lrq_ha.interceptors.audit import Audit
from lrq_ha.interceptors.hanging import HANGS_S
from lrq_ha.interceptors.plugins import Interceptors, Settings
from lrq_ha.interceptors.runner import EVENT_BYTES, Runner
from lrq_ha.sidecar.config import Config, ConfigError, load

sys.path.append(str(Path(__file__).parents[1] / "plugins"))
from installed import install

HEADER = content_header.header_payload(5, content_header.properties(content_header.field(b"key", b"value"), content_type="text/plain"))
MESSAGE = Message("x", "key", "", None, 5, HEADER)
CLIENT = Client("app", "/", "127.0.0.1:1", "", 1)
TOLD_S = 60.0


def enqueue() -> Enqueue:
    return Enqueue(0.0, CLIENT, 1, MESSAGE, "")


def routing() -> Routing:
    return Routing(0.0, CLIENT, 1, MESSAGE, b"12345")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a distribution installed in it."""
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("lrq_test_interceptors", None)


def refusal(tmp_path: Path, more: str) -> str:
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL + more)
    with pytest.raises(ConfigError) as caught:
        load(file)
    return str(caught.value)


# -- finding and making


def test_one_is_found_by_its_entry_point(site: Path) -> None:
    found = Interceptors({"gate-a": Settings(options={"word": "no"})})
    assert found
    assert found.refuse
    assert found.points == {Point.ROUTING}
    assert found.ask(routing()) is None
    assert found.ask(routing()._replace(body=b"no")) == ("gate-a", "no no here")


def test_what_is_not_named_is_not_imported(site: Path) -> None:
    assert not Interceptors({})
    Interceptors({"audit": Settings(options={"path": "/tmp/a"})})
    assert "lrq_test_interceptors" not in sys.modules
    Interceptors({"slow": Settings()})
    assert "lrq_test_interceptors" in sys.modules


def test_an_unknown_name_lists_those_that_are_installed(site: Path, tmp_path: Path) -> None:
    said = refusal(tmp_path, "[interceptors.adit]\n")
    assert "interceptors.adit: no interceptor of this name is installed; there are: audit, failing, gate-a, gate-z, hanging, recorder, slow" in said
    assert "lrq_ha.interceptors" in said


def test_the_command_line_says_so(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as an operator checks a configuration; a name that is installed passes."""
    path = ":".join(filter(None, (str(site), str(Path(__file__).parents[2]))))
    for name, code, said in (("nobody", 1, b"there are: audit, failing"), ("slow", 0, b"is valid")):
        (tmp_path / "node.toml").write_text(MINIMAL + f"[interceptors.{name}]\n")
        command = [sys.executable, "-m", "lrq_ha.cli.main", "sidecar", "--check", "--config", str(tmp_path / "node.toml")]
        monkeypatch.setenv("PYTHONPATH", path)
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


def test_two_of_one_name_are_an_error(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "other", {"audit": "Slow", "slow": "Slow"}, "other")))
    assert "that of lrq-ha itself and that of other" in refusal(tmp_path, '[interceptors.audit.options]\npath = "/tmp/a"\n')
    assert "that of lrq_test_interceptors and that of other" in refusal(tmp_path, "[interceptors.slow]\n")


def test_a_distribution_that_is_found_twice_is_one(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    assert Interceptors({"slow": Settings()})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param('[interceptors.audit]\noptions = { path = "here" }\n', "interceptors.audit.options: path must be the absolute path", id="value"),
        pytest.param("[interceptors.audit]\n", "interceptors.audit.options: ", id="missing option"),
        pytest.param('[interceptors.audit]\noptions = { file = "/a" }\n', "'file'", id="unknown option"),
        pytest.param('[interceptors.audit]\npath = "/a"\n', "interceptors.audit.path: unknown key; allowed here: buffer_bytes_max", id="unknown key"),
        pytest.param('[interceptors.audit]\non_overflow = "crash"\n', "interceptors.audit.on_overflow", id="unknown choice"),
        pytest.param("[interceptors.audit]\nerrors_max = 0\n", "interceptors.audit.errors_max: Input should be greater", id="too small"),
        pytest.param("[interceptors]\naudit = 7\n", "interceptors.audit: ", id="no table"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, more: str, said: str) -> None:
    assert said in refusal(tmp_path, more)


@pytest.mark.parametrize(
    ("target", "said"),
    [("Nothing", "it cannot be imported: AttributeError"), ("SECRET", "options: 'str' object is not callable"), ("Enqueue", "options: ")],
)
def test_what_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", {"odd": target})))
    assert f"interceptors.odd{'.' if said.startswith('options') else ': '}{said}" in refusal(tmp_path, "[interceptors.odd]\n")


def test_a_priority_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path / "site", {}, "odd_priority")
    (site / "odd_priority-1.0.dist-info" / "entry_points.txt").write_text("[lrq_ha.interceptors]\nodd = odd_priority:Odd\n")
    (site / "odd_priority.py").write_text("class Odd:\n    priority = 'first'\n    def enqueue(self, event): pass\n")
    monkeypatch.syspath_prepend(str(site))
    assert "interceptors.odd: its priority is no whole number. Set interceptors.odd.priority" in refusal(tmp_path, "[interceptors.odd]\n")
    assert Interceptors({"odd": Settings(priority=1)})


def test_options_are_not_shown(tmp_path: Path) -> None:
    assert "hunter2" not in refusal(tmp_path, '[interceptors.audit]\noptions = "hunter2"\n')


# -- events


def test_properties_are_decoded_when_asked_for() -> None:
    assert MESSAGE.properties == {"content_type": "text/plain", "headers": {"key": "value"}, "delivery_mode": 2}
    assert MESSAGE._replace(header=HEADER[:20]).properties == {}
    assert MESSAGE._replace(header=b"").properties == {}


def test_arguments_are_decoded_when_asked_for() -> None:
    method = encode.method_frame(1, commands.Queue.Declare(queue="q", durable=True, arguments={"x-max-length": 5}))[7:-1]
    event = Topology(0.0, CLIENT, 1, "queue.declare", method, True)
    assert event.arguments["queue"] == "q"
    assert event.arguments["arguments"] == {"x-max-length": 5}
    assert event._replace(method=b"\0\0\0\0").arguments == {}
    assert event._replace(method=method[:8]).arguments == {}


# -- running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """Starts interceptors; they end with the test. What a pause of the machine makes late is not taken for slow."""
    for name in ("CLOSE_S", "SLOW_S"):
        monkeypatch.setattr(f"lrq_ha.interceptors.runner.{name}", TOLD_S)
    runners: list[Runner] = []

    def start(interceptor: Any, **settings: Any) -> Runner:
        given = {"priority": 1, "on_overflow": "drop", "buffer_bytes_max": 1 << 20, "errors_max": 3, "wait_max_s": 60.0, **settings}
        runners.append(Runner("it", interceptor, **given))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


class Blocked(Interceptor):
    """Waits in `enqueue` until it may go on."""

    def __init__(self) -> None:
        self.may, self.entered, self.closed = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def enqueue(self, event: Enqueue) -> None:
        self.entered.release()
        assert self.may.acquire(timeout=TOLD_S)

    def close(self) -> None:
        self.closed.set()


def test_a_full_buffer_drops_and_counts(run: Callable[..., Runner]) -> None:
    blocked = Blocked()
    runner = run(blocked, buffer_bytes_max=2 * EVENT_BYTES)
    for _ in range(2):
        runner.put(Point.ENQUEUE, enqueue())
    for _ in range(5):
        runner.put(Point.ENQUEUE, enqueue())
    assert runner.status()["dropped"] == 5
    assert not runner.full
    blocked.may.release(2)
    runner.close()
    assert blocked.closed.is_set()
    assert runner.status()["events"] == 2


def test_a_full_buffer_holds_up_until_there_is_room(run: Callable[..., Runner]) -> None:
    blocked, room = Blocked(), threading.Event()
    runner = run(blocked, on_overflow="wait", buffer_bytes_max=3 * EVENT_BYTES)
    runner.on_room = room.set
    for _ in range(3):
        runner.put(Point.ENQUEUE, enqueue())
    assert not runner.full
    runner.put(Point.ENQUEUE, enqueue())
    assert runner.full
    runner.check()  # it has had no time to be late
    assert not runner.off
    blocked.may.release(4)
    assert room.wait(TOLD_S)
    assert not runner.full
    runner.close()
    assert (runner.status()["events"], runner.status()["dropped"]) == (4, 0)


def test_what_hangs_is_switched_off(run: Callable[..., Runner]) -> None:
    blocked, room = Blocked(), threading.Event()
    runner = run(blocked, on_overflow="wait", buffer_bytes_max=EVENT_BYTES, wait_max_s=0.0)
    runner.on_room = room.set
    for _ in range(2):
        runner.put(Point.ENQUEUE, enqueue())
    assert blocked.entered.acquire(timeout=TOLD_S)
    runner.check()
    assert "finished nothing" in runner.off
    assert room.is_set()
    runner.put(Point.ENQUEUE, enqueue())
    assert runner.status()["events"] == 0
    blocked.may.release(9)


class Moody(Interceptor):
    """Fails where its mood says so."""

    refuses = True

    def __init__(self) -> None:
        self.mood = ""

    def routing(self, event: Routing) -> Any:
        if self.mood == "exit":
            sys.exit(1)
        return self.mood or None if self.mood != "wrong" else 7

    def enqueue(self, event: Enqueue) -> None:
        raise ValueError("not for the log")


def test_failures_in_a_row_switch_off_and_others_do_not(run: Callable[..., Runner], caplog: pytest.LogCaptureFixture) -> None:
    moody = Moody()
    runner = run(moody)
    for _ in range(4):
        moody.mood = "exit"
        assert runner.ask(routing()) is None
        moody.mood = "wrong"
        assert runner.ask(routing()) is None
        moody.mood = "why not"
        assert runner.ask(routing()) == "why not"
    assert not runner.off
    moody.mood = "wrong"
    for _ in range(3):
        assert runner.ask(routing()) is None
    assert "routing failed 3 times in a row, the last time: TypeError" in runner.off
    moody.mood = "too late"
    assert runner.ask(routing()) is None
    assert runner.status()["refused"] == 4
    assert runner.status()["errors"] == 11
    told = [record.message for record in caplog.records if "routing: errors" in record.message]
    assert len(told) == 1
    assert "SystemExit" in told[0]


class Disk(Audit):
    """The audit trail; each attempt to write is told."""

    def __init__(self, path: str) -> None:
        super().__init__(path=path)
        self.flushed, self.closed = threading.Semaphore(0), False

    def flush(self) -> None:
        try:
            super().flush()
        finally:
            self.flushed.release()

    def close(self) -> None:
        self.closed = True
        super().close()


def test_the_audit_trail_of_a_full_disk_is_switched_off(run: Callable[..., Runner]) -> None:
    """What it is told goes to a buffer of its own, which always succeeds."""
    disk = Disk("/dev/full")
    runner = run(disk)
    for _ in range(3):
        runner.put(Point.ROUTED, Routed(0.0, CLIENT, 1, MESSAGE, "q", Outcome.ACCEPTED, ""))
        assert disk.flushed.acquire(timeout=TOLD_S)
    runner.close()
    assert "flush failed 3 times in a row, the last time: OSError" in runner.off
    assert disk.closed


class Failing(Interceptor):
    """Is slow to be told, and fails when asked."""

    refuses = True

    def __init__(self) -> None:
        self.may = threading.Event()

    def enqueue(self, event: Enqueue) -> None:
        assert self.may.wait(TOLD_S)

    def routing(self, event: Routing) -> str:
        raise ValueError


def test_one_that_is_switched_off_while_its_buffer_fills_holds_up_nobody(run: Callable[..., Runner]) -> None:
    failing = Failing()
    runner = run(failing, on_overflow="wait", buffer_bytes_max=EVENT_BYTES, errors_max=1)
    runner.put(Point.ENQUEUE, enqueue())

    class Meanwhile:
        """A message at which the other thread gets its turn."""

        @property
        def header(self) -> bytes:
            runner.ask(routing())
            return b""

    runner.put(Point.ENQUEUE, enqueue()._replace(message=Meanwhile()))  # type: ignore[arg-type]
    assert runner.off
    assert not runner.full
    failing.may.set()


def of_body(body: bytes) -> Routing:
    return routing()._replace(body=body)


@pytest.mark.parametrize("how", [b"sleeps", b"waits", b"reads", b"computes", b"swallows"])
def test_a_question_that_is_never_answered_is_ended(how: bytes, site: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The door stood still with it: all clients, heartbeats, orders, even SIGTERM; and nobody was told whose fault it was."""
    found = Interceptors({"hanging": Settings(errors_max=2)})
    found.start(lambda: None)
    try:
        began = time.monotonic()
        assert found.ask(of_body(how)) is None
        assert time.monotonic() - began >= HANGS_S
        assert found.ask(of_body(b"x")) is None
        status = found.status()["hanging"]
        assert (status["slow"], status["off"]) == (1, "")
        assert "interceptor hanging, routing: slow: had not returned after 1 s, and was ended: all clients waited" in caplog.text
        for _ in range(2):
            found.ask(of_body(how))
        assert found.status()["hanging"]["off"].startswith("routing failed 2 times in a row")
        assert found.ask(of_body(how)) is None, "it is not asked any more"
    finally:
        found.end_asking()
        found.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_door_closes_them_in_another_thread(site: Path, tmp_path: Path) -> None:
    """It waits for them there; a signal can be given up in the main thread only."""
    told = tmp_path / "told"
    found = Interceptors({"gate-a": Settings(options={"word": "no"}), "slow": Settings(options={"path": str(told)})})
    found.start(lambda: None)
    found.tell(Point.ENQUEUE, enqueue())
    found.end_asking()
    closing = threading.Thread(target=found.close)
    closing.start()
    closing.join(TOLD_S)
    assert told.read_text() == "1"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_door_that_closes_watches_no_interceptor_any_more(site: Path) -> None:
    """An orderly stop with one that refuses ended in a traceback: its timer could not be stopped in the thread that closes it."""
    values = tomllib.loads(MINIMAL)
    values["interceptors"] = {"gate-a": {"options": {"word": "no"}}}
    door = Door(Config.model_validate(values).door_settings)
    door.interceptors.start(lambda: None)
    try:
        assert signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0), "it is watched"
        asyncio.run(door.close())
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        door.interceptors.end_asking()


def test_a_thread_that_is_no_main_thread_watches_nothing(site: Path) -> None:
    """A door in another thread, as of a program that embeds it, works all the same."""
    answers: list[object] = []

    def run() -> None:
        found = Interceptors({"gate-a": Settings(options={"word": "no"})})
        found.start(lambda: None)
        answers.append(found.ask(of_body(b"no")))
        found.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TOLD_S)
    assert answers == [("gate-a", "no no here")]


def test_the_text_of_an_error_is_not_logged(run: Callable[..., Runner], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runner = run(Moody(), errors_max=2)
    for _ in range(2):
        runner.put(Point.ENQUEUE, enqueue())
    runner.close()
    assert "enqueue failed 2 times in a row, the last time: ValueError at runner.py" in runner.off
    assert "not for the log" not in caplog.text


def test_only_the_methods_it_has_are_points() -> None:
    runner = Runner("a", Audit(path="/tmp/a"), priority=1, on_overflow="drop", buffer_bytes_max=1, errors_max=1, wait_max_s=1)
    assert runner.points == {Point.ROUTED, Point.ACCEPT, Point.REJECT, Point.RELEASE}
    runner.close()  # never started


def test_one_without_points_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", {"none": "Interceptor"})))
    assert "it has none of the methods routing, enqueue" in refusal(tmp_path, "[interceptors.none]\n")


def test_priorities_come_from_the_configuration_then_from_the_class_then_names(site: Path) -> None:
    word = {"word": "x"}
    found = Interceptors(
        {
            "gate-z": Settings(options=word),
            "gate-a": Settings(options=word),
            "slow": Settings(priority=1),
            "recorder": Settings(priority=200, options={"path": "/dev/null"}),
        }
    )
    assert list(found.status()) == ["slow", "gate-a", "gate-z", "recorder"]
    assert found.ask(routing()._replace(body=b"x")) == ("gate-a", "no x here")


def test_a_start_that_fails_ends_those_that_began(tmp_path: Path) -> None:
    found = Interceptors({"audit": Settings(options={"path": str(tmp_path / "no" / "folder")})})
    with pytest.raises(LrqError, match=r"interceptors\.audit does not start: .*No such file"):
        found.start(lambda: None)


def test_the_documented_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a stranger would use it: the module and the entry point of docs/interceptors.md."""
    page = (Path(__file__).parents[2] / "docs" / "interceptors.md").read_text("utf-8")
    blocks = {kind: page.partition(f"```{kind}\n{start}")[2].partition("```")[0] for kind, start in (("python", ""), ("toml", "[project]\n"))}
    entry = tomllib.loads("[project]\n" + blocks["toml"])["project"]["entry-points"]["lrq_ha.interceptors"]
    site = install(tmp_path / "site", {}, "our_limits")
    (site / "our_limits.py").write_text(blocks["python"])
    names = "".join(f"{name} = {target}\n" for name, target in entry.items())
    (site / "our_limits-1.0.dist-info" / "entry_points.txt").write_text(f"[lrq_ha.interceptors]\n{names}")
    monkeypatch.syspath_prepend(str(site))
    found = Interceptors({"limits": Settings(options={"size_bytes_max": 4, "exempt": ["batch"]})})
    assert found.ask(routing()) == ("limits", "5 bytes are more than 4")
    assert found.ask(routing()._replace(client=CLIENT._replace(user="batch"))) is None
    found.start(lambda: None)
    found.tell(Point.ACCEPT, Accept(0.0, Delivery(CLIENT, 1, MESSAGE, "q", "", 1, False), False))
    found.close()
    assert "taken: {'app': 1}" in capsys.readouterr().out
