"""The lab itself: what it starts, what it breaks on request, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from load import in_sync, primary_of, take_over
from pika.exceptions import ChannelClosedByBroker

from lrq_ha.lab import Lab, LabError, keeper, probe
from lrq_ha.lab.files import python_environment
from lrq_ha.sidecar import config

NewLab = Callable[..., Lab]
GONE_TIMEOUT_S = 240.0


def connect(url: str, vhost: str = "/") -> pika.BlockingConnection:
    parameters = pika.URLParameters(url)
    parameters.virtual_host = vhost
    return pika.BlockingConnection(parameters)


def processes_of(directory: Path) -> list[int]:
    """Every live process whose command line or environment names a lab's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(directory) in said and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, as /proc writes them (0100007F is 127.0.0.1)."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


# -- what is started


def test_brokers_are_of_the_version_that_was_asked_for(brokers: Lab, broker_version: str) -> None:
    assert brokers.version.startswith(f"{broker_version}.")
    for node in brokers.nodes.values():
        connection = connect(node.broker)
        assert connection._impl.server_properties["version"] == brokers.version
        connection.close()


def test_plugins_have_all_that_they_need(new_lab: NewLab, broker_version: str) -> None:
    """A broker is given no more than what it needs, which is known before anything starts."""
    lab = new_lab({"east": 1}, broker=broker_version, brokers_only=True, plugins=["rabbitmq_nonsense"])
    with pytest.raises(LabError, match="no plugin rabbitmq_nonsense"):
        lab.up()
    wanted = {"rabbitmq_management", "rabbitmq_shovel", "rabbitmq_stream", "rabbitmq_mqtt"}
    lab = new_lab({"east": 1}, broker=broker_version, brokers_only=True, plugins=sorted(wanted))
    lab.up()
    running = lab.ctl("e1", "eval", "[atom_to_list(A) ++ \" \" || {A, _, _} <- application:which_applications()].")
    assert wanted <= set(re.findall(r"\w+", running))


@pytest.mark.quick
def test_nothing_listens_beyond_loopback(brokers: Lab) -> None:
    for key, pid in brokers.processes().items():
        assert pid is not None
        addresses = listening(pid)
        assert addresses, f"{key} listens nowhere"
        assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}, key


def test_the_ordinary_user_has_the_rights_of_a_client(brokers: Lab) -> None:
    node = brokers.nodes["e1"]
    connection = connect(node.broker)
    channel = connection.channel()
    channel.queue_declare("lab-rights", durable=True)
    channel.queue_delete("lab-rights")
    with pytest.raises(ChannelClosedByBroker, match="user_id"):
        publish_and_confirm(connection.channel(), pika.BasicProperties(user_id="lrq"))
    connection.close()

    connection = connect(node.broker, "lrq")
    stream = {"x-queue-type": "stream"}
    connection.channel().queue_declare("LRQ_lab_rights", durable=True, arguments=stream)
    with pytest.raises(ChannelClosedByBroker, match="ACCESS_REFUSED"):
        connection.channel().queue_declare("other", durable=True, arguments=stream)
    connection.channel().queue_delete("LRQ_lab_rights")
    connection.close()


def test_the_sidecars_user_may_publish_in_anothers_name(brokers: Lab) -> None:
    for vhost in ("/", "lrq"):
        connection = connect(brokers.nodes["e1"].admin, vhost)
        publish_and_confirm(connection.channel(), pika.BasicProperties(user_id="app"))
        connection.close()


def publish_and_confirm(channel: Any, properties: pika.BasicProperties) -> None:
    channel.queue_declare("lab-user", durable=True)
    channel.confirm_delivery()
    try:
        channel.basic_publish("", "lab-user", b"x", properties)
    finally:
        if channel.is_open:
            channel.queue_delete("lab-user")


@pytest.mark.quick
def test_rabbitmqctl_by_the_command(brokers: Lab) -> None:
    """From another process, as in another terminal."""
    def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = lab_command("ctl", "--dir", str(brokers.directory), "e2", *arguments)
        return subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=240)

    listed = ctl("-q", "list_users", "--formatter", "json")
    assert listed.returncode == 0, listed.stderr
    assert {user["user"] for user in json.loads(listed.stdout)} == {"app", "lrq"}
    refused = ctl("list_nobody")
    assert refused.returncode == 64, "rabbitmqctl's own, as when it is run by hand"
    assert "list_nobody" in refused.stderr


@pytest.mark.quick
def test_lab_json_tells_everything(brokers: Lab) -> None:
    file = brokers.directory / "lab.json"
    assert file.stat().st_mode & 0o077 == 0
    groups = json.loads(file.read_text())["groups"]
    assert {group: list(entry["nodes"]) for group, entry in groups.items()} == {"east": ["e1", "e2"], "west": ["w1"]}
    told, node = groups["east"]["nodes"]["e2"], brokers.nodes["e2"]
    assert {"door", "broker", "http", "sidecar_pid", "broker_pid", "config", "log"} <= set(told)
    assert (told["door"], told["broker"], told["http"]) == (node.door, node.broker, node.http)
    assert told["broker_pid"] == node.broker_pid
    assert told["sidecar_pid"] is None
    assert Path(told["config"]).exists()


def test_sidecar_configurations_are_valid(brokers: Lab) -> None:
    east, west = (config.load(brokers.nodes[name].config) for name in ("e2", "w1"))
    assert (east.node.name, east.node.id, east.node.group) == ("e2", 2, "east")
    assert [peer.name for peer in east.peers] == ["e1"]
    assert [(site.remote_id, len(site.doors)) for site in east.sites] == [("west", 1)]
    assert [(site.remote_id, len(site.doors)) for site in west.sites] == [("east", 2)]


def test_node_names_stay_different_where_groups_share_a_letter(new_lab: NewLab) -> None:
    lab = new_lab({"south": 1, "site": 2, "north": 1}, sites={"site": ["north"]})
    lab.prepare()
    assert list(lab.nodes) == ["south1", "site1", "site2", "n1"]
    assert [site.remote_id for site in config.load(lab.nodes["site1"].config).sites] == ["north"]
    assert config.load(lab.nodes["n1"].config).sites == []


def test_groups_with_dots_in_their_names(new_lab: NewLab) -> None:
    """Dots part a node from its broker and sidecar, too, and Erlang takes none in a broker's name."""
    lab = new_lab({"eu.east": 1, "eu.west": 1}, brokers_only=True)
    lab.up()
    assert list(lab.nodes) == ["eu.east1", "eu.west1"]
    lab.kill("eu.east1")
    lab.stop("eu.west1.broker")
    lab.cont("eu.west1")
    assert lab.processes()["eu.east1.broker"] is None
    lab.start("eu.east1.broker")
    connect(lab.nodes["eu.east1"].broker).close()
    for unknown in ("eu", "eu.south1", "eu.east1.sidecar", "eu.east1.door"):
        with pytest.raises(LabError, match=f"The lab has no (node )?'{unknown}'. It has eu.east1"):
            lab.kill(unknown)


# -- faults


def test_kill_start_stop_cont(new_lab: NewLab) -> None:
    lab = new_lab({"east": 1}, brokers_only=True)
    # From a thread that ends at once: what it started must live on.
    starter = threading.Thread(target=lab.up)
    starter.start()
    starter.join()
    node = lab.nodes["e1"]
    port = pika.URLParameters(node.broker).port
    connection = connect(node.broker)
    channel = connection.channel()
    channel.queue_declare("kept", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "kept", b"x", pika.BasicProperties(delivery_mode=2))

    with pytest.raises(LabError, match="is running"):
        lab.start("e1")
    lab.stop("e1.broker")
    assert probe.listens(port), "a stalled broker's port still accepts"
    assert not probe.speaks_amqp(port)
    lab.cont("e1.broker")
    assert wait_for(lambda: probe.speaks_amqp(port), timeout_s=240)

    before = node.broker_pid
    lab.stop("e1")
    lab.kill("e1")
    assert node.broker_pid is None
    assert json.loads((lab.directory / "lab.json").read_text())["groups"]["east"]["nodes"]["e1"]["broker_pid"] is None
    with pytest.raises(LabError, match="not running"):
        lab.kill("e1")

    other_terminal = Lab.attach(lab.directory)
    other_terminal.start("e1.broker")
    assert node.broker_pid not in (None, before)
    assert other_terminal.nodes == lab.nodes
    connection = connect(node.broker)
    assert connection.channel().queue_declare("kept", passive=True).method.message_count == 1
    connection.close()

    for wrong in ("e2", "e1.sidecar", "e1.nothing"):
        with pytest.raises(LabError, match="has no"):
            lab.kill(wrong)
    with pytest.raises(LabError, match=r"runs in .* already"):
        Lab({"east": 1}, lab.directory).up()
    other_terminal.down()
    assert wait_for(lambda: not processes_of(lab.directory), GONE_TIMEOUT_S), "the keeper itself, no child of this process, is the last to go"


def test_a_lab_with_sidecars_follows_a_failover(new_lab: NewLab) -> None:
    lab = new_lab({"east": 2})
    lab.up()

    def told() -> dict[str, Any]:
        east: dict[str, Any] = json.loads((lab.directory / "lab.json").read_text())["groups"]["east"]
        return east

    first = primary_of(lab)
    assert told()["primary"] == first
    second = next(name for name in lab.nodes if name != first)
    assert in_sync(lab) == (first, second)
    assert told()["nodes"][second]["sidecar_pid"] == lab.nodes[second].sidecar_pid
    with pytest.raises(LabError, match="has not become diverged in time"):
        lab.wait_role(second, "diverged", timeout_s=0.2)

    # Only the sidecar: a broker killed within half a second of a stream's creation loses that stream for good (3.10 and 4.3, measured).
    lab.kill(f"{first}.sidecar")
    assert lab.nodes[first].sidecar_pid is None
    assert lab.nodes[first].broker_pid is not None
    assert told()["primary"] is None
    with pytest.raises(LabError, match="does not answer"):
        lab.status(first)
    with pytest.raises(LabError, match=first):
        lab.promote(second)  # without anybody's word that the other one is down
    take_over(lab, second, first)
    assert told()["primary"] == primary_of(lab) == second
    lab.start(first)
    assert lab.wait_role(first, "ready")["group"] == "east"


# -- what does not start


def test_a_taken_port_is_named_and_nothing_is_left(new_lab: NewLab) -> None:
    lab = new_lab({"east": 1}, brokers_only=True)
    lab.prepare()
    port = pika.URLParameters(lab.nodes["e1"].broker).port
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(LabError, match=f"Port {port} of e1.broker is taken") as caught:
            lab.up()
    assert caught.value.retriable
    assert not processes_of(lab.directory)


def test_a_broker_that_does_not_start_shows_its_log_and_nothing_is_left(new_lab: NewLab) -> None:
    lab = new_lab({"east": 1}, brokers_only=True)
    lab.prepare()
    with (lab.directory / "e1" / "rabbitmq.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(LabError, match=r"(?s)e1.broker ended with status .*no_such_setting.*See .*broker.log"):
        lab.up()
    assert not processes_of(lab.directory)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(LabError, match="things in it that no lab wrote"):
        Lab({"east": 1}, tmp_path, brokers_only=True).up()
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"


@pytest.mark.quick
@pytest.mark.parametrize("groups", [{}, {"east": 0}, {"east": 10}, {"a b": 1}])
def test_groups_that_make_no_sense_are_refused(groups: dict[str, int]) -> None:
    with pytest.raises(LabError):
        Lab(groups)


def test_a_version_that_is_not_here_is_refused() -> None:
    with pytest.raises(LabError, match=r"RabbitMQ 2.8 is not on this machine.*scripts/setup --broker 2.8"):
        Lab({"east": 1}, broker="2.8")


# -- nothing is left


@pytest.mark.quick
@pytest.mark.parametrize("victim", ["lab", "keeper"])
def test_nothing_is_left_running_after_sigkill(tmp_path: Path, victim: str) -> None:
    directory = tmp_path / "lab"
    program = f"from lrq_ha.lab import Lab; from pathlib import Path; Lab({{'east': 1}}, Path({str(directory)!r}), brokers_only=True).up(); " \
              "print('up', flush=True); import time; time.sleep(600)"
    lab = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=python_environment())
    try:
        assert lab.stdout is not None
        assert lab.stdout.readline() == b"up\n"
        running = processes_of(directory)
        assert len(running) >= 4, "the lab, its keeper, epmd, the broker and its helpers"
        broker = Lab.attach(directory).processes()["e1.broker"]
        assert broker in running
        if victim == "lab":
            lab.kill()
        else:
            os.kill(next(pid for pid in running if b"lrq_ha.lab.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()), signal.SIGKILL)
        assert wait_for(lambda: set(processes_of(directory)) <= {lab.pid}, GONE_TIMEOUT_S), processes_of(directory)
        if victim == "lab":
            assert not (directory / "lab.json").exists()
    finally:
        lab.kill()
        lab.wait()
        if lab.stdout is not None:
            lab.stdout.close()


def lab_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lrq_ha.cli.main", "lab", *arguments]


def test_the_command_stays_in_the_foreground_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """With TLS, as it says how to connect then; and an application that is told what it says connects."""
    directory = tmp_path / "lab"
    where = ("--dir", str(directory))
    # The tests may run in the background of a shell, where Ctrl-C is ignored and children inherit that.
    up = subprocess.Popen(lab_command("up", "--tls", "--group", "east=1", *where), stdout=subprocess.PIPE, text=True,
                          env=python_environment(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        assert up.stdout is not None
        said = []
        for line in up.stdout:
            said.append(line)
            if "Ctrl-C" in line:
                break
        url = next(word for line in said for word in line.split() if word.startswith("amqps://app:"))
        trust = next(word for line in said for word in line.split() if word.startswith("SSL_CERT_FILE="))
        program = f"import pika; p = pika.URLParameters({url!r}); p.socket_timeout = p.stack_timeout = 120; " \
                  "print(pika.BlockingConnection(p).channel().queue_declare('seen').method.queue)"
        for environment, works in ((dict([trust.split("=")]), True), ({}, False)):
            application = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment)
            assert (application.stdout == "seen\n") == works, application.stderr
            assert ("CERTIFICATE_VERIFY_FAILED" in application.stderr) != works
        assert Lab.attach(directory).ca == Path(trust.split("=")[1])

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(lab_command(*arguments, *where), capture_output=True, text=True, env=python_environment(), timeout=240)

        assert "runs (pid" in run("status").stdout
        assert "stopped (pid" in run("stop", "e1.broker").stdout
        assert "dead" in run("kill", "e1").stdout
        again = run("kill", "e1")
        assert again.returncode == 1
        assert "lrq-ha lab start e1" in again.stderr
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=240) == 0
        assert not directory.exists()
        assert not processes_of(directory)
        after = run("status")
        assert after.returncode == 1
        assert "No lab runs" in after.stderr
    finally:
        up.kill()
        up.wait()
        if up.stdout is not None:
            up.stdout.close()


def test_the_keeper_survives_nonsense(new_lab: NewLab) -> None:
    lab = new_lab({"east": 1}, brokers_only=True)
    lab.prepare()
    process = keeper.start(lab.directory, python_environment())
    try:
        for nonsense in ({"do": "fly"}, {}, {"do": "spawn", "key": "x"}, {"do": "signal", "key": "x", "number": 9}, {"do": "list", "x": 1}):
            with pytest.raises(LabError, match="Error"):
                keeper.ask(lab.directory, **nonsense)
        assert keeper.ask(lab.directory, do="list") == {}
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=120) == 0
        assert process.stdout is not None
        process.stdout.close()
