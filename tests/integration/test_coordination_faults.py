"""A pair that etcd coordinates, over faults of etcd and of the ways to it: none of them is a reason to take over, and what is confirmed stays (G1,
G2, G3, G5, E1-E9). A fault of a node beside one of etcd makes a node take over once, as soon as etcd lets it.

Rules: each node has a way of its own to etcd. The tests of one RabbitMQ version share a lab, and each leaves it whole; those with three members of
etcd have labs of their own. An etcd is needed (scripts/tool etcd).
"""

from __future__ import annotations

import json
import signal
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from etcd_rig import EtcdCluster, Way, close_ways, copy_data
from load import command, eventually, primary_of, told
from sidecar_process import Sidecar
from test_coordination import TAKES_OVER_S, TTL_S, ask_etcd, goes_on, history, in_record, key, loaded, record, takes_over
from traffic import Traffic

from lrq_ha.coordination.register import HISTORY_MAX
from lrq_ha.lab import Lab, etcd
from lrq_ha.lab.ports import free_ports
from lrq_ha.lab.tools import find_tool
from lrq_ha.replication.register import Why

pytestmark = [pytest.mark.broker, pytest.mark.proves("G1", "G2", "G3", "G5", "coordination")]

#: While etcd changes its leader. Requests to one member have a sixth of the lease's time; the rest is for a machine that stands still.
GAP_MAX_S = 10.0
#: What etcd has to move when it is defragmented.
GARBAGE, GARBAGE_BYTES = 60, 1 << 20


@pytest.fixture(scope="module")
def ways() -> Iterator[dict[str, Way]]:
    """The way of each node to the lab's etcd, once there is a lab."""
    found: dict[str, Way] = {}
    yield found
    close_ways(list(found.values()))


@pytest.fixture(scope="module")
def links() -> Iterator[dict[str, Way]]:
    """The way of each node to the other's door, once there is a lab."""
    found: dict[str, Way] = {}
    yield found
    close_ways(list(found.values()))


@pytest.fixture(scope="module")
def lab(broker_version: str, ways: dict[str, Way], links: dict[str, Way], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if find_tool(etcd.KEY) is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    directory = tmp_path_factory.mktemp("coordinated") / "lab"
    found = Lab({"east": 2}, directory, broker_version, coordination={"lease_ttl_s": TTL_S})
    found.prepare()
    close_ways([*ways.values(), *links.values()])  # those of another version
    for name, node in found.nodes.items():
        [other] = {found.nodes[each].door for each in found.nodes if each != name}
        ways[name], links[name] = Way(found.etcd[0]), Way(other)
        text = node.config.read_text().replace(found.etcd[0], ways[name].url)
        node.config.write_text(text.replace(f":{urlsplit(other).port}\"", f":{urlsplit(links[name].url).port}\""))
    with found:
        yield found


@pytest.fixture(autouse=True)
def mended(ways: dict[str, Way], links: dict[str, Way]) -> Iterator[None]:
    yield
    for way in (*ways.values(), *links.values()):
        way.mend()


def goes_on_for(traffic: Traffic, seconds: float) -> None:
    """Confirms come all the time."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        goes_on(traffic, within_s=GAP_MAX_S)


@contextmanager
def longest_gap(traffic: Traffic) -> Iterator[list[float]]:
    """Gives the longest time without a confirm, at the end."""
    found: list[float] = []
    over = threading.Event()

    def watch() -> None:
        confirmed, since, longest = traffic.confirmed, time.monotonic(), 0.0
        while not over.wait(0.01):
            longest = max(longest, time.monotonic() - since)
            if traffic.confirmed != confirmed:
                confirmed, since = traffic.confirmed, time.monotonic()
        found.append(longest)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


# ---- the ways ----------------------------------------------------------------------------------------------------------


def test_the_primary_is_cut_off_from_etcd(lab: Lab, ways: dict[str, Way], tmp_path: Path) -> None:
    """Its lease ends. The backup hears it and leaves it alone; it goes on, and has the lease again when the way is mended (E6)."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        ways[primary].cut()
        goes_on_for(traffic, 2 * TTL_S)
        assert told(lab, backup)["coordination"]["leader"] is None, "its lease has ended"
        ways[primary].mend()
        eventually("the lease to be there again", lambda: lab.status(backup)["coordination"]["leader"] == primary)
        goes_on(traffic)
    assert primary_of(lab) == primary


def test_the_backup_is_cut_off_from_etcd(lab: Lab, ways: dict[str, Way], tmp_path: Path) -> None:
    """Nothing happens. After that, it takes over as ever."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, short=True) as traffic:
        ways[backup].cut()
        goes_on_for(traffic, 2 * TTL_S)
        assert (lab.primary("east"), record(lab)["set"]) == (primary, [1, 2])
        ways[backup].mend()
        lab.kill(f"{primary}.sidecar")
        takes_over(lab, backup)
        goes_on(traffic)
        lab.start(f"{primary}.sidecar")


def test_the_nodes_are_cut_off_from_each_other(lab: Lab, links: dict[str, Way], tmp_path: Path) -> None:
    """Both reach etcd: the primary has the lease, takes the backup out of the set, and goes on alone."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0) as traffic:
        for link in links.values():
            link.cut()
        eventually("the backup to be out of the set", lambda: record(lab)["set"] == [int(primary[1:])])
        goes_on_for(traffic, 2 * TTL_S)
        assert primary_of(lab) == primary
        assert not lab.status(backup)["serving"]
        for link in links.values():
            link.mend()


@pytest.mark.parametrize("end", ["primary", "backup"])
def test_one_nodes_way_to_the_other_is_cut(lab: Lab, links: dict[str, Way], tmp_path: Path, end: str) -> None:
    """In one direction only: no node takes over, and the primary goes on, alone if need be."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0) as traffic:
        links[{"primary": primary, "backup": backup}[end]].cut()
        goes_on_for(traffic, 3 * TTL_S)
        assert primary_of(lab) == primary
        assert not lab.status(backup)["serving"]
        for link in links.values():
            link.mend()


def test_the_primary_is_cut_off_from_everything(lab: Lab, ways: dict[str, Way], links: dict[str, Way], tmp_path: Path) -> None:
    """But from clients: they get no confirm from it that the new primary lacks, and it follows when the ways are mended."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1) as traffic:
        for way in (ways[primary], *links.values()):
            way.cut()
        eventually("the backup to take over", lambda: bool(lab.status(backup)["serving"]), TAKES_OVER_S, seen=lambda: told(lab, backup))
        goes_on(traffic)
        eventually("the former primary to turn clients away", lambda: not lab.status(primary)["serving"], seen=lambda: told(lab, primary))
        assert "another node may lead now" in lab.status(primary)["reason"]
        for way in (ways[primary], *links.values()):
            way.mend()
        assert in_record(lab) == (backup, primary)


def test_a_node_of_priority_0(lab: Lab, tmp_path: Path) -> None:
    """It does not take over by itself, and says why; the former primary goes on when it is back."""
    primary, backup = in_record(lab)
    text = lab.nodes[backup].config.read_text()
    with loaded(lab, tmp_path, takeovers=1, why=Why.RESTART, short=True) as traffic:
        begin_again(lab, backup, text.replace("[coordination]\n", "[coordination]\npriority = 0\n"))
        try:
            in_record(lab)
            lab.kill(f"{primary}.sidecar")
            eventually("the backup to say it", lambda: "its priority is 0" in lab.status(backup)["reason"], seen=lambda: told(lab, backup))
            time.sleep(TTL_S)
            assert lab.primary("east") is None
            lab.start(f"{primary}.sidecar")
            goes_on(traffic)
            assert primary_of(lab) == primary
        finally:
            begin_again(lab, backup, text)


def begin_again(lab: Lab, name: str, text: str) -> None:
    """Gives a sidecar this configuration."""
    lab.nodes[name].config.write_text(text)
    lab.kill(f"{name}.sidecar")
    lab.start(f"{name}.sidecar")


def test_the_primary_is_killed_while_it_is_cut_off(lab: Lab, ways: dict[str, Way], tmp_path: Path) -> None:
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1) as traffic:
        ways[primary].cut()
        goes_on_for(traffic, TTL_S)
        lab.kill(primary)
        takes_over(lab, backup)
        goes_on(traffic)
        ways[primary].mend()
        lab.start(primary)


def test_the_primary_is_killed_while_the_backup_is_cut_off(lab: Lab, ways: dict[str, Way], tmp_path: Path) -> None:
    """Nothing can be taken until the way is mended."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1) as traffic:
        ways[backup].cut()
        goes_on(traffic)
        lab.kill(primary)
        time.sleep(2 * TTL_S)
        assert lab.primary("east") is None
        ways[backup].mend()
        takes_over(lab, backup)
        goes_on(traffic)
        lab.start(primary)


@pytest.mark.parametrize("share", [0.06, 0.5], ids=["in time", "too late"])
def test_etcd_answers_slowly(lab: Lab, ways: dict[str, Way], tmp_path: Path, share: float) -> None:
    """By this share of the lease's time. A request has a sixth of it."""
    primary, _ = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        for way in ways.values():
            way.delay_s = share * TTL_S
        goes_on_for(traffic, 3 * TTL_S)
        for way in ways.values():
            way.mend()
        eventually("etcd to be heard", lambda: lab.status(primary)["coordination"]["etcd"] == "answers")
        goes_on(traffic)
    assert primary_of(lab) == primary


def test_handed_over_while_etcd_is_cut_off_in_the_middle(lab: Lab, ways: dict[str, Way], tmp_path: Path) -> None:
    """To each node and back. The order is carried out, or the primary takes its role back; nothing else happens."""
    with loaded(lab, tmp_path, takeovers=None) as traffic:
        for _ in range(2):
            primary, backup = in_record(lab)
            answers: list[tuple[int, str]] = []
            order = threading.Thread(target=lambda to=backup, answers=answers: answers.append(command("switchover", to, lab=lab)))
            order.start()
            eventually("the order to begin", lambda node=primary: not lab.status(node)["serving"] or "hands over" in lab.status(node)["reason"])
            for way in ways.values():
                way.cut()
            time.sleep(TTL_S)
            for way in ways.values():
                way.mend()
            order.join()
            print(primary, backup, answers)
            goes_on(traffic)
            assert lab.primary("east") in (primary, backup)


# ---- the data of etcd --------------------------------------------------------------------------------------------------


def test_etcd_is_emptied(lab: Lab, tmp_path: Path) -> None:
    """All of it is lost, the leases too. The primary writes the record again (E8)."""
    primary, _ = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True, history_kept=False) as traffic:
        version = record(lab)["v"]
        lab.kill("etcd")
        copy_data_away(lab)
        lab.start("etcd")
        eventually("the record to be there again", lambda: record(lab)["v"] > version)
        eventually("the lease to be there again", lambda: key(lab, "leader") is not None)
        goes_on(traffic)
    assert primary_of(lab) == primary


def copy_data_away(lab: Lab) -> None:
    (lab.directory / "etcd").rename(lab.directory / f"etcd-{time.time_ns()}")


def test_etcd_is_defragmented(lab: Lab, tmp_path: Path) -> None:
    """It answers nothing meanwhile. Confirms go on."""
    primary, _ = in_record(lab)
    for number in range(GARBAGE):
        ask_etcd(lab, "kv/put", key=b64encode(b"/garbage").decode(), value=b64encode(bytes([number]) * GARBAGE_BYTES).decode())
    ask_etcd(lab, "kv/compaction", revision=key(lab, "state")["mod_revision"], physical=True)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic, longest_gap(traffic) as gap:
        for _ in range(3):
            ask_etcd(lab, "maintenance/defragment")
            goes_on(traffic, within_s=GAP_MAX_S)
    print(f"etcd was defragmented: longest time without a confirm {gap[0]:.2f} s")
    assert gap[0] < GAP_MAX_S
    assert primary_of(lab) == primary


def test_etcd_is_restored_from_an_older_snapshot(lab: Lab, tmp_path: Path) -> None:
    """In it, a backup counts that has been taken out since. The primary writes the record again, without it; then the primary may be lost."""
    primary, backup = in_record(lab)
    data, snapshot = lab.directory / "etcd", lab.directory / f"snapshot-{time.time_ns()}"
    with loaded(lab, tmp_path, takeovers=0) as traffic:
        lab.kill("etcd")
        copy_data(data, snapshot)
        lab.start("etcd")
        eventually("etcd to be heard", lambda: lab.status(primary)["coordination"]["etcd"] == "answers")
        lab.kill(backup)
        goes_on(traffic)
        newest = record(lab)
        assert newest["set"] == [int(primary[1:])]
        lab.kill("etcd")
        copy_data(snapshot, data)
        lab.start("etcd")
        eventually("the record to be written again", lambda: record(lab)["v"] > newest["v"] and record(lab)["set"] == newest["set"])
        goes_on(traffic)
        lab.start(backup)


def test_a_record_that_went_back_without_a_primary(lab: Lab, tmp_path: Path) -> None:
    """No node that knows better takes an epoch by itself, and all of them begin again when `coordination repair` has written what they know (E8)."""
    primary, backup = in_record(lab)
    data, snapshot = lab.directory / "etcd", lab.directory / f"snapshot-{time.time_ns()}"
    with loaded(lab, tmp_path, takeovers=None) as traffic:
        lab.kill("etcd")
        copy_data(data, snapshot)
        lab.start("etcd")
        eventually("etcd to be heard", lambda: lab.status(primary)["coordination"]["etcd"] == "answers")
        lab.kill(f"{backup}.sidecar")
        goes_on(traffic)
        lab.start(f"{backup}.sidecar")
        in_record(lab)
        lab.kill("etcd")
        for name in lab.nodes:
            lab.kill(f"{name}.sidecar")
        copy_data(snapshot, data)
        lab.start("etcd")
        for name in lab.nodes:
            lab.start(f"{name}.sidecar")
        eventually("them to say it", lambda: all("is older than the group's log" in lab.status(name)["reason"] for name in lab.nodes),
                   seen=lambda: [told(lab, name) for name in lab.nodes])
        time.sleep(2 * TTL_S)
        assert lab.primary("east") is None
        code, said = command("coordination", "repair", "--config", str(lab.nodes[primary].config))
        assert code == 0, said
        goes_on(traffic)


# ---- what operators do --------------------------------------------------------------------------------------------------


def test_a_pause_outlives_all_sidecars(lab: Lab, tmp_path: Path) -> None:
    """The primary steps down, which pauses the group in the record: no node takes an epoch by itself until the group is resumed."""
    in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, why=None, short=True) as traffic:
        code, said = command("demote", lab=lab)
        assert code == 0, said
        assert record(lab)["paused"]
        for name in lab.nodes:
            lab.kill(f"{name}.sidecar")
        for name in lab.nodes:
            lab.start(f"{name}.sidecar")
        eventually("them to say it", lambda: all("paused" in lab.status(name)["reason"] for name in lab.nodes))
        time.sleep(2 * TTL_S)
        assert lab.primary("east") is None
        code, said = command("resume", lab=lab)
        assert code == 0, said
        goes_on(traffic)
    assert not record(lab)["paused"]


def test_an_operator_goes_on_without_etcd(lab: Lab, tmp_path: Path) -> None:
    """It is refused while etcd answers; etcd has the epoch, and no pause, when it is back (E10)."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, why=Why.OPERATOR) as traffic:
        order = ("promote", backup, "--down", primary)
        command("pause", lab=lab)  # so that the backup does not take over before the test has seen what it is to see
        lab.kill(primary)
        code, said = command(*order, "--without-etcd", "--dry-run", lab=lab)
        assert (code, f"etcd answers {backup}: repeat without" in said) == (1, True), said
        lab.kill("etcd")
        eventually("a word on etcd", lambda: "repeat with --without-etcd" in command(*order, lab=lab)[1])
        code, said = command(*order, "--without-etcd", lab=lab)
        assert (code, "etcd was not asked" in said) == (0, True), said
        goes_on(traffic)
        lab.start("etcd")
        eventually("etcd to have the epoch", lambda: history(lab)[-1]["leader"] == backup)
        goes_on(traffic)
        lab.start(primary)
    assert not record(lab)["paused"]


def test_the_history_keeps_the_last_epochs(lab: Lab, tmp_path: Path) -> None:
    """`lrq-ha history` shows them: who, why, from whom, and how long the recovery took."""
    primary, backup = in_record(lab)
    for epoch in range(HISTORY_MAX + 5):
        told = json.dumps({"epoch": f"{epoch}.1", "leader": "e1", "from": None, "at": "2020-01-01T00:00:00"})
        name = f"/lrq-ha/east/history/{epoch:020d}"
        ask_etcd(lab, "kv/put", key=b64encode(name.encode()).decode(), value=b64encode(told.encode()).decode())
    with loaded(lab, tmp_path, takeovers=None, short=True) as traffic:
        code, said = command("switchover", backup, lab=lab)
        assert code == 0, said
        takes_over(lab, backup)
        goes_on(traffic)
        eventually("the oldest to be gone", lambda: len(history(lab)) == HISTORY_MAX and "steps" in history(lab)[-1])
    code, said = command("history", lab=lab)
    assert code == 0, said
    assert len(said.splitlines()) == HISTORY_MAX + 1
    last = history(lab)[-1]
    assert (last["leader"], last["from"], last["why"]) == (backup, primary, "switchover")
    line = said.splitlines()[-1]
    assert "the leader before handed over" in line
    assert line.split()[-2:] == [str(last["end"]), str(last["steps"]["all"])]


# ---- nodes -------------------------------------------------------------------------------------------------------------


def test_two_sidecars_of_one_node(lab: Lab, tmp_path: Path) -> None:
    """A second sidecar begins beside the primary's broker, with its id: of two writers one is shut out at any time (R3), whoever has the lease."""
    primary, _ = in_record(lab)
    with loaded(lab, tmp_path, takeovers=None) as traffic:
        ports = free_ports()
        text = lab.nodes[primary].config.read_text()
        for url in (lab.nodes[primary].door, lab.nodes[primary].http):
            text = text.replace(f'listen = "127.0.0.1:{urlsplit(url).port}"', f'listen = "127.0.0.1:{next(ports)}"')
        with Sidecar(lab, tmp_path, "east", name=primary, edit=lambda _: text):
            time.sleep(3 * TTL_S)
        ports.close()
        goes_on(traffic)


def test_the_clock_of_a_node_is_an_hour_ahead(lab: Lab, tmp_path: Path) -> None:
    """No node takes over for that. With it, the node takes over, and is replaced, as any other: leases and time-outs hang on no clock."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("libfaketime is not on this machine: apt-get install libfaketime")
    ahead = {"LD_PRELOAD": str(library), "FAKETIME": "+3600", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=2, short=True) as traffic:
        lab.kill(f"{backup}.sidecar")
        text = lab.nodes[backup].config.read_text()
        with Sidecar(lab, tmp_path, "east", name=backup, edit=lambda _: text, environment=ahead):
            assert in_record(lab) == (primary, backup)
            assert lab.status(backup)["time"] > time.time() + 3_000
            goes_on_for(traffic, 2 * TTL_S)
            lab.kill(f"{primary}.sidecar")
            takes_over(lab, backup)
            goes_on(traffic)
            lab.start(f"{primary}.sidecar")
            assert in_record(lab) == (backup, primary)
        takes_over(lab, primary)
        goes_on(traffic)
        lab.start(f"{backup}.sidecar")


@pytest.mark.parametrize("new", [True, False], ids=["new", "with a log"])
def test_two_groups_of_one_name(lab: Lab, broker_version: str, tmp_path: Path, new: bool) -> None:
    """The second is refused, and says what to do; the first goes on."""
    primary, _ = in_record(lab)
    coordination = {"lease_ttl_s": TTL_S, "endpoints": lab.etcd}
    with (loaded(lab, tmp_path, takeovers=0, short=True) as traffic,
          Lab({"east": 1}, tmp_path / "second", broker_version, brokers_only=True, coordination=coordination) as second):
        text = second.nodes["e1"].config.read_text().replace("id = 1\n", f"id = {primary[1:]}\n")  # whose lease it might take for its own
        if not new:
            with Sidecar(second, tmp_path, "east", edit=lambda _: f'{text}namespace = "/elsewhere"\n') as sidecar:
                sidecar.http = urlsplit(second.nodes["e1"].http).netloc
                sidecar.becomes("active")
        with Sidecar(second, tmp_path, "east", edit=lambda _: text) as sidecar:
            sidecar.http = urlsplit(second.nodes["e1"].http).netloc
            sidecar.complains(r"another group under this name.*give each group its own name, or another \[coordination\] namespace")
            goes_on_for(traffic, 2 * TTL_S)
            assert sidecar.status()["role"] != "active"
        assert primary_of(lab) == primary


# ---- three members of etcd -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    if find_tool(etcd.KEY) is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    with EtcdCluster(tmp_path_factory.mktemp("three") / "etcd") as found:
        yield found


@pytest.fixture(scope="module")
def wide(broker_version: str, three: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pair with an etcd of three members."""
    coordination = {"lease_ttl_s": TTL_S, "endpoints": three.endpoints, "namespace": f"/lrq-ha-{broker_version}"}
    with Lab({"east": 2}, tmp_path_factory.mktemp("wide") / "lab", broker_version, coordination=coordination) as found:
        yield found


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_leader_of_etcd(wide: Lab, three: EtcdCluster, tmp_path: Path, fault: str) -> None:
    """No node takes over, and no confirm is much later than others."""
    primary, _ = in_record(wide)
    with loaded(wide, tmp_path, takeovers=0, short=True) as traffic:
        leader = three.leader()
        with longest_gap(traffic) as gap:
            if fault == "killed":
                three.kill(leader)
            else:
                three.signal(leader, signal.SIGSTOP)
            try:
                goes_on_for(traffic, 3 * TTL_S)
            finally:
                if fault == "killed":
                    three.start(leader)
                else:
                    three.signal(leader, signal.SIGCONT)
        print(f"the leader of etcd was {fault}: longest time without a confirm {gap[0]:.2f} s")
        eventually("etcd to be heard", lambda: wide.status(primary)["coordination"]["etcd"] == "answers")
    assert wide.primary("east") == primary


@pytest.mark.parametrize("lost", [(0, 1, 2), (0, 1)], ids=["all", "most"])
def test_etcd_is_lost_and_comes_back(wide: Lab, three: EtcdCluster, tmp_path: Path, lost: tuple[int, ...]) -> None:
    """All of it, or its majority, for three times the lease: confirms have gone on, and no node has taken over (E6)."""
    primary, _ = in_record(wide)
    with loaded(wide, tmp_path, takeovers=0, short=True) as traffic:
        three.kill(*lost)
        try:
            goes_on_for(traffic, 3 * TTL_S)
            assert wide.status(primary)["coordination"]["etcd"] != "answers"
        finally:
            three.start(*lost)
        eventually("the lease to be there again", lambda: wide.status(primary)["coordination"]["leader"] == primary)
        goes_on(traffic)


def test_most_of_etcd_is_lost_and_then_the_primary(wide: Lab, three: EtcdCluster, tmp_path: Path) -> None:
    """Without a majority nothing is taken; with it again, the backup takes over."""
    primary, backup = in_record(wide)
    with loaded(wide, tmp_path, takeovers=1) as traffic:
        three.kill(0, 1)
        goes_on(traffic)
        wide.kill(primary)
        time.sleep(2 * TTL_S)
        assert wide.primary("east") is None
        three.start(0, 1)
        takes_over(wide, backup)
        goes_on(traffic)
        wide.start(primary)
