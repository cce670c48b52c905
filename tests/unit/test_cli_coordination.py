"""`lrq-ha coordination repair` asks the node with the longest log, if all answer and none leads; `lrq-ha history` as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served_node import Node, serving

from lrq_ha.cli.main import main
from lrq_ha.overview.history import history_table
from lrq_ha.overview.text import align_table
from lrq_ha.replication.roles import Role

ETCD = {"etcd": "answers", "leader": None, "set": ["e1"]}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    """Serves two backups; gives them, and their lab's options, to the test."""
    with serving() as serve:

        def make(coordinated: bool = True) -> list[Node]:
            nodes = [serve(Node(name)) for name in ("e1", "e2")]
            for node in nodes:
                node.coordination = ETCD if coordinated else None
            described = {"groups": {"east": {"primary": None, "nodes": {node.name: {"http": node.url} for node in nodes}}}}
            (tmp_path / "lab.json").write_text(json.dumps(described))
            return nodes

        yield make


REPAIR = ["coordination", "repair"]


@pytest.mark.parametrize("longer", [0, 1])
def test_the_longest_log_is_asked(pair: Callable[..., list[Node]], tmp_path: Path, longer: int) -> None:
    nodes = pair()
    nodes[longer].end += 1
    assert main([*REPAIR, "--dir", str(tmp_path), "--dry-run"]) == 0
    assert nodes[longer].told == [("promote", [], False, False, True)]
    assert nodes[1 - longer].told == []


def test_an_epoch_counts_more_than_a_length(pair: Callable[..., list[Node]], tmp_path: Path) -> None:
    e1, e2 = pair()
    e1.end, e2.epoch = 1000, e2.epoch + 0x100
    assert main([*REPAIR, "--dir", str(tmp_path)]) == 0
    assert (e1.told, e2.told) == ([], [("promote", [], False, False, False)])


def test_a_primary_needs_no_repair(pair: Callable[..., list[Node]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = pair()
    e2.role = Role.ACTIVE
    assert main([*REPAIR, "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "e2 is primary, and keeps etcd's record by itself: nothing is to be done\n"
    assert e1.told == e2.told == []


def test_all_nodes_must_answer(pair: Callable[..., list[Node]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = pair()
    e2.error = RuntimeError("away")
    assert main([*REPAIR, "--dir", str(tmp_path)]) == 1
    assert "not all nodes of group east answer: e2 (" in capsys.readouterr().err
    assert e1.told == []


def test_a_group_without_etcd(pair: Callable[..., list[Node]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(coordinated=False)
    assert main([*REPAIR, "--dir", str(tmp_path)]) == 1
    assert "group east is not coordinated by etcd" in capsys.readouterr().err
    assert main(["history", "--dir", str(tmp_path)]) == 1
    assert "Name one with --config FILE" in capsys.readouterr().err


def test_the_history_as_a_table() -> None:
    told: list[dict[str, Any]] = [
        {"epoch": "1.1", "leader": "e1", "from": None, "at": "2026-03-02T08:00:12.123+00:00"},
        {"epoch": "2.2", "leader": "e2", "from": "e1", "at": "2026-03-07T23:41:50.001+00:00", "why": "lease", "end": 48113, "steps": {"all": 79}},
        {"epoch": "3.1", "leader": "e1", "from": "e2", "at": "2026-03-08T09:15:03.999+00:00", "why": "of a newer version", "end": 5},
    ]
    table = history_table(told)
    assert align_table(table.headings, table.rows) == [
        "SINCE                EPOCH  LEADER  BEFORE  WHY                                      LOG END  MS",
        "2026-03-02 08:00:12  1.1    e1      -       -                                              -   -",
        "2026-03-07 23:41:50  2.2    e2      e1      the lease of the leader before was gone    48113  79",
        "2026-03-08 09:15:03  3.1    e1      e2      of a newer version                             5   -",
    ]
