"""What load balancers, orchestrators and people are told of a node: each probe, for each standing of a node, by GET, HEAD and OPTIONS.

`python tests/unit/test_probes.py` writes the table of standings in docs/operations/monitoring.md.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from served_node import TIMEOUT_S, Node, call, serving
from test_node import follower

from broker_plugin.door.server import Door
from lrq_ha.errors import MalformedInput
from lrq_ha.replication.events import Heartbeat, PeerDisconnected, Push
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.retention import RECORD_BYTES
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.http import probes
from lrq_ha.sidecar.incarnation import Incarnation

DOC = Path(__file__).parents[2] / "docs" / "operations" / "monitoring.md"
SOME = {"entries": 10, "bytes": 5_000_000, "seconds": 2.0}
MANY = {"entries": 20_001, "bytes": 90_000_000, "seconds": 40.0}


def backup(role: Role, *, primary: str | None = "e2", lag: dict[str, float] | None = SOME, blocked: str = "") -> Node:
    node = Node("e1", role)
    node.primary, node.lag, node.blocked = primary, lag, blocked
    return node


def primary(role: Role, *, opened: bool, closed: str = "", blocked: str = "", leads: bool = True) -> Node:
    node = Node("e1", role)
    node.opened, node.closed_because, node.blocked, node.primary = opened, closed, blocked, "e1" if leads else None
    return node


PRIMARY, IN_SYNC = "/primary / /read-write", "/replica /synchronous /sync"
READY = "/ready /read-only"
#: A node by its standing, and the paths that answer 200.
STANDINGS: dict[str, tuple[Node, str]] = {
    "serves": (primary(Role.ACTIVE, opened=True), f"{PRIMARY} /leader {READY} /readiness /health /liveness"),
    "serves, confirms wait for backups": (primary(Role.RECOVERING, opened=True), f"{PRIMARY} /leader {READY} /readiness /health /liveness"),
    "serves, its broker has an alarm": (
        primary(Role.ACTIVE, opened=True, blocked="memory"), f"{PRIMARY} /leader {READY} /readiness /liveness"
    ),
    "hands over": (primary(Role.ACTIVE, opened=True, closed="node e1 hands over to e2"), "/leader /health /liveness"),
    "leads, its door is closed": (primary(Role.RECOVERING, opened=False), "/leader /health /liveness"),
    "wants to lead": (primary(Role.RECOVERING, opened=False, leads=False), "/health /liveness"),
    "in-sync backup": (backup(Role.READY), f"{IN_SYNC} {READY} /readiness /health /liveness"),
    "in-sync backup that lacks much": (backup(Role.READY, lag=MANY), f"{IN_SYNC} {READY} /health /liveness"),
    "in-sync backup, its broker is silent": (backup(Role.READY, blocked="silent"), f"{IN_SYNC} {READY} /readiness /liveness"),
    "backup that has lost its primary": (backup(Role.READY, primary=None, lag=None), "/health /liveness"),
    "catching up": (backup(Role.CATCH_UP), "/asynchronous /async /health /liveness"),
    "joining": (backup(Role.JOINING), "/asynchronous /async /health /liveness"),
    "waits for a primary": (backup(Role.CATCH_UP, primary=None, lag=None), "/health /liveness"),
    "diverged": (backup(Role.DIVERGED), "/health /liveness"),
    "does not run": (backup(Role.STANDALONE, primary=None, lag=None), "/liveness"),
}  # fmt: skip


@pytest.mark.parametrize("standing", STANDINGS)
def test_every_probe_for_every_standing(standing: str) -> None:
    node, expected = STANDINGS[standing]
    for probe in probes.PROBES:
        code, body = probes.answer(probe, node.status(), node.refusal(), None)
        for path in probe.paths:
            assert code == (200 if path in expected.split() else 503), path
        assert (body["node"], body["role"], body["group"], body["epoch"]) == ("e1", node.role.value, "east", 0x301)
        assert body["state"] == ("stopped" if standing == "does not run" else "running")
    assert set(expected.split()) <= {path for probe in probes.PROBES for path in probe.paths}


def test_every_role_is_among_the_standings() -> None:
    assert {node.role for node, _ in STANDINGS.values()} == set(Role)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_every_method_gives_the_code(method: str) -> None:
    def code(path: str) -> int:
        request = urllib.request.Request(node.url + path, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code

    with serving() as serve:
        for standing in ("serves", "in-sync backup", "does not run"):
            node, expected = STANDINGS[standing]
            serve(node)
            assert {path for probe in probes.PROBES for path in probe.paths if code(path) == 200} == set(expected.split())


@pytest.mark.parametrize(
    ("lag", "holds"),
    [
        ("9", False), ("10", True), ("4999999B", False), ("5MB", True), ("4MiB", False), ("5MiB", True), ("1s", False), ("2s", True),
        ("1999ms", False), ("5000kB", True), ("0.005GB", True), ("0", False),
    ],
)  # fmt: skip
def test_the_limit_on_the_lag(lag: str, holds: bool) -> None:
    with serving() as serve:
        node = serve(backup(Role.READY))
        for path in ("/replica", "/readiness"):
            assert call(f"{node.url}{path}?lag={lag}")[0] == (200 if holds else 503)


def test_a_lag_that_is_not_known_exceeds_each_limit() -> None:
    for probe in probes.PROBES:
        if probe.limit:
            assert probes.answer(probe, backup(Role.READY, lag=None).status(), "a backup", "1000000")[0] == 503


@pytest.mark.parametrize("lag", ["", "ten", "-1", "5 s", "1e3", "10MBs", "inf", "٣"])
def test_a_limit_that_is_none_is_told(lag: str) -> None:
    with pytest.raises(MalformedInput, match="is no limit"):
        probes.parse_limit(lag)


def test_a_wrong_limit_is_a_bad_request() -> None:
    with serving() as serve:
        node = serve(backup(Role.READY))
        for path, said in (("/replica?lag=much", "'much' is no limit"), ("/primary?lag=5s", "/primary takes no lag")):
            code, answer = call(node.url + path)
            assert code == 400
            assert said in answer["text"]


def documented_standings() -> str:
    """The table of standings for docs/operations/monitoring.md."""
    paths = [probe.paths[0] for probe in probes.PROBES]
    rows = [
        f"| {standing} | `{node.role.value}` | {' | '.join('200' if path in expected.split() else '503' for path in paths)} |"
        for standing, (node, expected) in STANDINGS.items()
    ]
    heads = " | ".join(f"`{path}`" for path in paths)
    return "\n".join([f"| node | role | {heads} |", f"|---|---|{'---|' * len(paths)}", *rows]) + "\n"


def test_the_tables_in_the_documentation() -> None:
    text = DOC.read_text("utf-8")
    assert probes.documented() in text, "copy it from lrq_ha.sidecar.http.probes.documented()"
    assert documented_standings() in text, "run: python tests/unit/test_probes.py"


def test_the_lag_of_a_backup_by_what_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries by the primary's heartbeat, bytes by the mean size of an entry, seconds by this node's own clock."""

    async def go() -> None:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings))
        node, status = incarnation._node, incarnation.status
        clock = [0.0]
        monkeypatch.setattr("lrq_ha.sidecar.status.time.monotonic", lambda: clock[0])

        def lag() -> Any:
            return status.tell()["follower_lag"]

        for number in range(1, 11):
            node.log.accept(BatchHeader(0x102, number, number, 0x102 if number > 1 else 0, 0x102, ()))
            incarnation._log.watch.appended(number, 1000 - RECORD_BYTES)
        assert lag() is None, "it follows none"
        node.following, node.leader_epoch, node._follower.leader_end = True, 0x102, 10
        status.ticked()
        assert lag() == {"entries": 0, "bytes": 0, "seconds": 0.0}
        clock[0], node._follower.leader_end = 5.0, 14
        status.ticked()
        clock[0] = 7.5
        assert lag() == {"entries": 4, "bytes": 4000, "seconds": 2.5}
        node.leader_epoch, node._follower.leader_end = 0x202, 11
        clock[0] = 8.0
        status.ticked()
        clock[0] = 9.0
        assert lag() == {"entries": 1, "bytes": 1000, "seconds": 1.0}, "the former primary's end does not count any more"

    asyncio.run(go())


def test_a_follower_knows_the_end_of_its_primarys_log() -> None:
    """By the call, by pushes and by heartbeats of the primary that it follows; of no other."""
    d = follower()
    node, end = d.node, d.node.log.end
    assert node.leader_end == end
    d.hear(1, Heartbeat(node.leader_epoch, end, end + 5, 0))
    assert node.leader_end == end + 5
    d.hear(1, Heartbeat(node.leader_epoch - 1, end, end + 90, 0))
    assert node.leader_end == end + 5
    d.feed(Push(1, BatchHeader(node.leader_epoch, end + 1, end + 7, node.log.last_epoch, node.leader_epoch), end, b""))
    assert node.leader_end == end + 7
    d.feed(PeerDisconnected(1))
    assert node.leader_end is None


if __name__ == "__main__":
    DOC.write_text(re.sub(r"\| node \| role \| `/primary.*?\n\n", lambda _: documented_standings() + "\n", DOC.read_text("utf-8"), flags=re.DOTALL))
