"""A backup whose broker lacks something that the log needs: clients notice nothing, an operator is told the command, and nothing is missing after it.

Each missing thing made its incarnation end every two or three seconds, and all confirms of the group wait as often.
"""

from __future__ import annotations

import itertools
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from load import all_applied, command, eventually, in_sync, replace_primary, told
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab, LabError

pytestmark = pytest.mark.proves("broker-lacks")

OVER = "this incarnation is over"
LATE_S = 1.0  # no confirm may be later; they waited 2.5 s for a backup that ended one incarnation after the other
LOAD_S = 6.0
APP, SIDECAR = "app", "lrq"


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("lacks"), broker_version, door=PATIENT_DOOR) as found:
        yield found


class Publishing:
    """A client that publishes to one queue, one confirm at a time, in its own name."""

    def __init__(self, url: str, vhost: str, queue: str) -> None:
        self.bodies: list[bytes] = []
        self.worst_s = 0.0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        parameters = pika.URLParameters(url)
        parameters.virtual_host = vhost
        self._thread = threading.Thread(target=self._run, args=(parameters, queue), daemon=True)
        self._thread.start()

    def _run(self, parameters: pika.URLParameters, queue: str) -> None:
        try:
            with pika.BlockingConnection(parameters) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                channel.queue_declare(queue, durable=True)
                properties = pika.BasicProperties(delivery_mode=2, user_id=APP)
                for number in itertools.count():
                    if self._stop.wait(0.01):
                        return
                    began = time.monotonic()
                    channel.basic_publish("", queue, b"%d" % number, properties, mandatory=True)
                    self.worst_s = max(self.worst_s, time.monotonic() - began)
                    self.bodies.append(b"%d" % number)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self.error is None, self.error


def without_permissions(lab: Lab, _primary: str, backup: str) -> str:
    lab.ctl(backup, "clear_permissions", "-p", "/", SIDECAR)
    return "/"


def with_some_permissions(lab: Lab, _primary: str, backup: str) -> str:
    lab.ctl(backup, "set_permissions", "-p", "/", SIDECAR, "^other-", ".*", ".*")
    return "/"


def without_the_tag(lab: Lab, _primary: str, backup: str) -> str:
    lab.ctl(backup, "set_user_tags", SIDECAR, "administrator")
    return "/"


def without_a_vhost(lab: Lab, primary: str, _backup: str) -> str:
    vhost = "only the primary's"
    lab.ctl(primary, "add_vhost", vhost)
    for user in (APP, SIDECAR):
        lab.ctl(primary, "set_permissions", "-p", vhost, user, ".*", ".*", ".*")
    return vhost


FAULTS = [without_permissions, with_some_permissions, without_the_tag, without_a_vhost]


def ends(log: Path) -> int:
    return log.read_text().count(OVER)


def paste(lab: Lab, node: str, lacks: str) -> None:
    """Runs the commands that stand in what a node says."""
    for pasted in lacks.partition(": rabbitmqctl")[2].split(";")[0].split("&&"):
        lab.ctl(node, *shlex.split(pasted.strip().removeprefix("rabbitmqctl ")))


@pytest.mark.quick(only="some permissions")
@pytest.mark.parametrize("take_away", FAULTS, ids=lambda each: each.__name__.replace("_", " "))
def test_nothing_waits_for_it_and_nothing_is_missing(lab: Lab, take_away: Callable[[Lab, str, str], str]) -> None:
    primary, backup = in_sync(lab, applied=True)
    node, queue = lab.nodes[backup], f"lacks-{take_away.__name__}"
    with suppress(LabError):
        lab.ctl(backup, "close_all_user_connections", SIDECAR, "its rights change")  # rights count from the next connection on
    in_sync(lab)
    vhost = take_away(lab, primary, backup)
    before = ends(node.log)
    client = Publishing(lab.nodes[primary].door, vhost, queue)
    eventually("the backup to say what it lacks", lambda: bool(lab.status(backup)["lacks"]))
    time.sleep(LOAD_S)  # in which it ended twice or three times
    client.stop()
    status = told(lab, backup)
    assert ends(node.log) - before <= 1, "one message may be refused before anybody knows"
    assert (status["role"], status["in_set"]) == ("ready", True)
    assert "rabbitmqctl" in told(lab, primary)["reason"], "the primary repeats it"
    assert client.worst_s < LATE_S, f"a confirm took {client.worst_s:.1f} s"
    code, said = command("switchover", backup, "--dry-run", lab=lab)
    assert (code, "are not whole" in said) == (1, True), said
    paste(lab, backup, status["lacks"])
    if vhost != "/":
        lab.ctl(backup, "set_permissions", "-p", vhost, APP, ".*", ".*", ".*")
    eventually("it to lack nothing", lambda: not lab.status(backup)["lacks"], seen=lambda: lab.status(backup)["lacks"])
    all_applied(lab, primary, backup)
    replace_primary(lab, primary, backup)
    parameters = pika.URLParameters(node.door)
    parameters.virtual_host = vhost
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        found = [body for _, _, body in (channel.basic_get(queue, auto_ack=True) for _ in client.bodies)]
        channel.queue_delete(queue)
    assert found == client.bodies
    lab.start(primary)
    in_sync(lab)
