"""A pair that etcd coordinates: real faults under load, and no operator. A backup takes over by itself, once, with all that was confirmed; what is
no fault of a node's makes nobody take over (G1, G2, G3, G5, E1-E9).

Rules: the tests of one RabbitMQ version share a lab, and each leaves it whole. An etcd is needed (scripts/tool etcd).
"""

from __future__ import annotations

import json
import os
import signal
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from etcd_rig import post
from history import span
from load import command, declare, eventually, in_sync, primary_of, same_logs, told
from test_faults import SETTLE_S
from test_three_nodes import all_in_sync, equal
from traffic import Load, Traffic

from lrq_ha.lab import Lab, etcd
from lrq_ha.lab.tools import find_tool
from lrq_ha.overview.history import WHY_TEXTS
from lrq_ha.replication.register import Why
from lrq_ha.sidecar import config

pytestmark = [pytest.mark.broker, pytest.mark.proves("G1", "G2", "G3", "G5", "coordination")]

TTL_S = 3.0
RATE_PER_S = 100.0
#: From a fault to the first confirm, on a machine that may stand still meanwhile: a failover that waits for anything else takes longer.
TAKES_OVER_S = 30.0


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if find_tool(etcd.KEY) is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    directory = tmp_path_factory.mktemp("coordinated") / "lab"
    with Lab({"east": 2}, directory, broker_version, coordination={"lease_ttl_s": TTL_S}) as found:
        yield found


def ask_etcd(lab: Lab, path: str, **body: Any) -> dict[str, Any]:
    """Raises OSError if no member answers."""
    for url in lab.etcd[:-1]:
        with suppress(OSError):
            return post(url, path, **body)
    return post(lab.etcd[-1], path, **body)


def key(lab: Lab, name: str) -> dict[str, Any]:
    """A key of the group in etcd. Raises KeyError if it is not there."""
    [found] = ask_etcd(lab, "kv/range", key=b64encode(f"{namespace(lab)}/east/{name}".encode()).decode())["kvs"]
    return found  # type: ignore[no-any-return]


def namespace(lab: Lab) -> str:
    table = config.load(next(iter(lab.nodes.values())).config).coordination
    assert table is not None
    return table.namespace


def record(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(b64decode(key(lab, "state")["value"]))
    return found


def history(lab: Lab) -> list[dict[str, Any]]:
    begin, end = (b64encode(f"{namespace(lab)}/east/history{after}".encode()).decode() for after in "/0")
    kvs = ask_etcd(lab, "kv/range", key=begin, range_end=end)["kvs"]
    return [json.loads(b64decode(each["value"])) for each in kvs]


def in_record(lab: Lab) -> tuple[str, str]:
    """Primary and backup, when both are in the set, in etcd, too."""
    primary, backup = in_sync(lab)
    eventually("both nodes in the set in etcd", lambda: record(lab)["set"] == [1, 2])
    return primary, backup


@contextmanager
def loaded(lab: Lab, tmp_path: Path, *, takeovers: int | None, why: Why | None = Why.LEASE, short: bool = False,
           history_kept: bool = True) -> Iterator[Traffic]:
    """Load before, while and after a fault, and the checks of the fault tests: nothing lost, nothing twice, both nodes equal; so many takeovers.

    `takeovers`: None: any number. `why`: of each takeover, as `lrq-ha history` tells it; None: any. `short`: no broker is killed, so nothing has to
    settle before, and the logs are not read and compared. `history_kept`: etcd is not emptied.
    """
    primary, _ = in_record(lab)
    queue = f"coordinated-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue, queue_type="quorum" if time.time_ns() % 2 else "classic")
    time.sleep(0.0 if short else SETTLE_S)
    before = len(history(lab))
    doors, history_file = [node.door for node in lab.nodes.values()], tmp_path / "history.jsonl"
    traffic = Traffic(doors, [queue], [f"{queue}-app"], rate_per_s=RATE_PER_S, history=history_file)
    traffic.start()
    try:
        eventually("the load to flow", lambda: traffic.confirmed > 100)
        began = time.time()
        yield traffic
        goes_on(traffic)
        ended = time.time()
        in_record(lab)
        traffic.finish()
        traffic.check([span(began, ended)] if takeovers != 0 else [])
        if not short:
            same_logs(lab)
        if takeovers is not None and history_kept:
            assert len(history(lab)) == before + takeovers
            assert why is None or whys(lab, takeovers) == [why.value] * takeovers
    finally:
        traffic.stop()


def whys(lab: Lab, last: int) -> list[str]:
    """Why the last leaders lead, as `lrq-ha history` tells it."""
    if not last:
        return []
    code, said = command("history", lab=lab)
    assert code == 0, said
    return [next((why for why, text in WHY_TEXTS.items() if text in line), line) for line in said.splitlines()[-last:]]


def goes_on(traffic: Traffic | Load, *, within_s: float = 120.0) -> None:
    confirmed = traffic.confirmed
    eventually("confirms to go on", lambda: traffic.confirmed > confirmed + 50, within_s)


def takes_over(lab: Lab, node: str) -> None:
    eventually(f"{node} to take over by itself", lambda: lab.primary("east") == node, TAKES_OVER_S, seen=lambda: told(lab, node))


@pytest.mark.quick(only="sidecar")
@pytest.mark.parametrize("part", [".sidecar", ".broker", ""])
def test_the_primary_is_killed(lab: Lab, tmp_path: Path, part: str) -> None:
    """Its host, its broker or its sidecar: the backup takes over; what was killed comes back as backup."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, short=part == ".sidecar") as traffic:
        lab.kill(primary + part)
        takes_over(lab, backup)
        goes_on(traffic)
        lab.start(primary + part)
    assert history(lab)[-1]["leader"] == backup
    assert history(lab)[-1]["from"] == primary


@pytest.mark.parametrize("part", ["", ".broker", ".sidecar"])
def test_the_primary_stands_still(lab: Lab, tmp_path: Path, part: str) -> None:
    """For two times the lease: the backup takes over, and the former primary follows it when it goes on."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1) as traffic:
        lab.stop(primary + part)
        began = time.monotonic()
        try:
            takes_over(lab, backup)
            goes_on(traffic)
            time.sleep(max(0.0, began + 2 * TTL_S - time.monotonic()))
        finally:
            lab.cont(primary + part)


@pytest.mark.quick(only="sidecar")
@pytest.mark.parametrize("part", ["", ".broker", ".sidecar"])
def test_the_primary_stands_still_for_half_its_lease(lab: Lab, tmp_path: Path, part: str) -> None:
    """That is no reason to take over."""
    primary, _ = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        eventually("a new renewal", lambda: lab.status(primary)["coordination"]["lease_remaining_s"] > 0.8 * TTL_S)
        lab.stop(primary + part)
        try:
            time.sleep(TTL_S / 2)
        finally:
            lab.cont(primary + part)
        goes_on(traffic)
        assert primary_of(lab) == primary


def test_the_backup_is_killed(lab: Lab, tmp_path: Path) -> None:
    """It is out of the set in etcd before anything is confirmed without it, and in it again when it has caught up. Nobody takes over."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0) as traffic:
        lab.kill(backup)
        goes_on(traffic)
        assert record(lab)["set"] == [int(primary[1:])]
        lab.start(backup)


def test_etcd_is_killed_and_comes_back(lab: Lab, tmp_path: Path) -> None:
    """For two times the lease: confirms go on without it, and nobody takes over (E6)."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        lab.kill("etcd")
        began = time.monotonic()
        try:
            while time.monotonic() < began + 2 * TTL_S:
                goes_on(traffic, within_s=10.0)
            assert lab.status(primary)["coordination"]["etcd"] != "answers"
            code, said = command("switchover", backup, lab=lab)
            assert (code, "etcd does not answer" in said) == (1, True), said
        finally:
            lab.start("etcd")
        eventually("etcd to be heard", lambda: lab.status(primary)["coordination"]["etcd"] == "answers")


def test_a_backup_is_lost_while_etcd_is_away(lab: Lab, tmp_path: Path) -> None:
    """It cannot be taken out: confirms wait until etcd is back, and go on by themselves then."""
    _, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0) as traffic:
        lab.kill("etcd")
        try:
            goes_on(traffic)
            lab.kill(backup)
            time.sleep(1.0)
            confirmed = traffic.confirmed
            time.sleep(2 * TTL_S + 2.0)
            assert traffic.confirmed == confirmed, "confirmed without a member that etcd counts in"
        finally:
            lab.start("etcd")
        goes_on(traffic)
        lab.start(backup)


@pytest.mark.quick
def test_the_lease_is_revoked_by_hand(lab: Lab, tmp_path: Path) -> None:
    """Its leader is heard, and goes on: it writes its key again."""
    primary, _ = in_record(lab)
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        for _ in range(3):
            ask_etcd(lab, "lease/revoke", ID=key(lab, "leader")["lease"])
            eventually("the leader's key to be there again", lambda: bool(key(lab, "leader")))
            goes_on(traffic)
        assert primary_of(lab) == primary


def test_a_record_that_went_back_is_written_again(lab: Lab, tmp_path: Path) -> None:
    """etcd is emptied under a primary that serves (E8)."""
    with loaded(lab, tmp_path, takeovers=0, short=True) as traffic:
        version = record(lab)["v"]
        ask_etcd(lab, "kv/deleterange", key=b64encode(b"/lrq-ha/east/state").decode())
        eventually("the record to be there again", lambda: record(lab)["v"] > version)
        goes_on(traffic)


def test_handed_over_to_each_node_and_back(lab: Lab, tmp_path: Path) -> None:
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=2, why=Why.SWITCHOVER, short=True) as traffic:
        for node in (backup, primary):
            code, said = command("switchover", node, lab=lab)
            assert code == 0, said
            takes_over(lab, node)
            goes_on(traffic)
            in_record(lab)


def test_the_sidecar_is_stopped_in_order(lab: Lab, tmp_path: Path) -> None:
    """SIGTERM gives the lease back: the backup does not wait for its end."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1) as traffic:
        pid = lab.nodes[primary].sidecar_pid
        assert pid is not None

        os.kill(pid, signal.SIGTERM)
        takes_over(lab, backup)
        goes_on(traffic)
        eventually("the sidecar to end", lambda: lab.nodes[primary].sidecar_pid is None)
        lab.start(primary)


def test_the_right_to_lead_is_given_back_for_a_killed_sidecar(lab: Lab, tmp_path: Path) -> None:
    """As a unit's ExecStopPost does. A backup has nothing to give back."""
    primary, backup = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, short=True) as traffic:
        release = ("coordination", "release", "--config")
        assert command(*release, str(lab.nodes[backup].config)) == (0, f"{backup} has no right to lead")
        lab.kill(f"{primary}.sidecar")
        assert command(*release, str(lab.nodes[primary].config)) == (0, f"{primary} has given the right to lead back")
        takes_over(lab, backup)
        goes_on(traffic)
        lab.start(f"{primary}.sidecar")


@pytest.mark.quick(only="sidecar")
@pytest.mark.parametrize("part", ["", ".broker", ".sidecar"])
def test_all_nodes_are_killed(lab: Lab, tmp_path: Path, part: str) -> None:
    """They begin again without an operator. Where the brokers went down, no member's log is whole for sure: all must answer and promise (E1)."""
    names = in_record(lab)
    short = part == ".sidecar"
    with loaded(lab, tmp_path, takeovers=1, why=Why.RESTART if short else Why.ALL, short=short) as traffic:
        for name in names:
            lab.kill(name + part)
        for name in names:
            lab.start(name + part)
        goes_on(traffic)


def test_all_hosts_and_etcd_are_killed(lab: Lab, tmp_path: Path) -> None:
    """As where the power fails, but that no disk forgets: the group begins again by itself when etcd and all of its nodes are back."""
    names = in_record(lab)
    with loaded(lab, tmp_path, takeovers=1, why=Why.ALL) as traffic:
        for name in ("etcd", *names):
            lab.kill(name)
        for name in (*names, "etcd"):
            lab.start(name)
        goes_on(traffic)


def test_ten_failovers_in_a_row(lab: Lab, tmp_path: Path) -> None:
    with loaded(lab, tmp_path, takeovers=10) as traffic:
        for _ in range(10):
            primary, backup = in_record(lab)
            lab.kill(primary)
            takes_over(lab, backup)
            goes_on(traffic)
            lab.start(primary)


@pytest.mark.one_version("4.3")
def test_three_nodes(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """The primary's host, broker or sidecar is killed, or its host stands still, and one of the two others takes over; a handover reaches the node
    that was named, and no other.
    """
    if find_tool(etcd.KEY) is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    with new_lab({"east": 3}, broker=broker_version, coordination={"lease_ttl_s": TTL_S}) as lab:
        primary = all_in_sync(lab)[0]
        queue = "coordinated-three"
        declare(lab.nodes[primary].door, queue)
        time.sleep(SETTLE_S)
        load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE_PER_S)
        load.start()
        outages = []
        try:
            goes_on(load)
            faults = [(lab.kill, "", lab.start), (lab.kill, ".broker", lab.start), (lab.kill, ".sidecar", lab.start), (lab.stop, "", lab.cont)]
            for break_part, part, mend_part in faults:
                primary = all_in_sync(lab)[0]
                began, before = time.time(), len(history(lab))
                break_part(primary + part)
                try:
                    eventually("another to take over", lambda before=before: len(history(lab)) > before, TAKES_OVER_S)
                    goes_on(load)
                finally:
                    mend_part(primary + part)
                assert [len(history(lab)) - before, lab.primary("east") == primary] == [1, False]
                outages.append(span(began, time.time()))
            for node in ("e1", "e2", "e3", "e1"):
                primary = all_in_sync(lab)[0]
                eventually("all nodes in the set in etcd", lambda: record(lab)["set"] == [1, 2, 3])
                if node != primary:
                    before = len(history(lab))
                    code, said = command("switchover", node, lab=lab)
                    assert code == 0, said
                    takes_over(lab, node)
                    assert len(history(lab)) == before + 1
                    goes_on(load)
            load.finish()
        finally:
            load.stop()
        load.check(outages)
        equal(lab, queue)
