"""When a CHECKPOINT is due, and what operators are told of ones that are too large, and of applied records. No broker: nothing is written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from node_config import MINIMAL
from pyroaring import BitMap64

from broker_plugin.door.server import Door
from lrq_ha.replication.applied import QueueRecord
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.sidecar.config import load
from lrq_ha.sidecar.counts import Counts
from lrq_ha.sidecar.node import log_writer
from lrq_ha.sidecar.node.core import Core
from lrq_ha.sidecar.node.log_writer import LogWriter
from lrq_ha.sidecar.node.task_scope import TaskScope

MIB = 1 << 20
CONFIG = MINIMAL.replace("[http]", "message_bytes_max = {largest}\ntransaction_bytes_max = {largest}\n[http]") + """\
[replication]
log_bytes_max = {log_bytes_max}
checkpoint_entries = 1000
checkpoint_bytes = {checkpoint_bytes}
"""


async def alive() -> TaskScope:
    return TaskScope()


class Log(LogWriter):
    """Of a node whose log is as long as it is said to be."""

    def __init__(self, folder: Path, *, log_bytes_max: int = 1_024 * MIB, checkpoint_bytes: int = 64 * MIB) -> None:
        file = folder / "node.toml"
        file.write_text(CONFIG.format(largest=log_bytes_max // 8, log_bytes_max=log_bytes_max, checkpoint_bytes=checkpoint_bytes))
        config = load(file)
        life = asyncio.run(alive())
        self.core = Core(Node(config.settings()), Levels({"^.*$": "all"}), life, lambda _effect: None)
        self.door = Door(config.door_settings)
        super().__init__(config, self.core, life, 0, lambda _reason: None, Counts())

    def due(self, entries: int, size: int, *, last: int = 0) -> bool:
        """With so many entries and bytes since the last one, which took `last` bytes."""
        self._node.log.end = self._tried_at + entries
        self._grown = size
        self.core.replica.checkpoint_bytes = last
        return self._checkpoint_due()


def test_a_checkpoint_is_due_by_entries_or_bytes(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert not log.due(999, 64 * MIB - 1)
    assert log.due(1_000, 1)
    assert log.due(2, 64 * MIB)
    assert not log.due(1, 64 * MIB), "nothing has come since but itself"
    log._tried_at = 5_000
    assert not log.due(999, 1), "one that is too large is not tried again at once"


def test_a_log_is_not_made_of_checkpoints(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert not log.due(1_000_000, 40 * MIB - 1, last=10 * MIB)
    assert log.due(1_000, 40 * MIB, last=10 * MIB)
    assert not log.due(2, 79 * MIB, last=20 * MIB)
    assert log.due(2, 80 * MIB, last=20 * MIB)


def test_in_each_quarter_of_a_log_there_is_one(tmp_path: Path) -> None:
    log = Log(tmp_path, log_bytes_max=16 * MIB)
    assert not log.due(2, 4 * MIB - 1)
    assert log.due(2, 4 * MIB)
    assert log.due(2, 4 * MIB, last=2 * MIB), "however large it is"
    assert log.core.replica.checkpoint_bytes_max == 2 * MIB
    assert log.door.buffered_bytes_max == 4 * MIB


@pytest.mark.parametrize(
    ("last", "told"), [(0, ""), (MIB, ""), (MIB + 1, "checkpoints become too large"), (2 * MIB + 1, "gets no checkpoints any more")]
)
def test_operators_are_told_before_there_is_none(tmp_path: Path, last: int, told: str) -> None:
    log = Log(tmp_path, log_bytes_max=16 * MIB)
    log.core.replica.checkpoint_bytes = last
    assert told in log.trouble()
    assert bool(told) == bool(log.trouble())


@pytest.mark.parametrize(("share", "told"), [(0.5, ""), (0.6, "applied records become too large"), (1.1, "applied records are too large")])
def test_operators_are_told_of_an_applied_record_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, share: float, told: str
) -> None:
    log = Log(tmp_path)
    replica, nothing = log.core.replica, BitMap64().serialize()
    known = {"few": BitMap64([1]), "many": BitMap64(range(0, 10_000, 2))}
    records = [QueueRecord("/", name, done.serialize(), nothing, nothing, 0, ()) for name, done in known.items()]
    replica.index.filter = DeliveryFilter.restored(replica.index.generations, records, b"")
    written: list[bytes] = []

    async def write(body: bytes) -> None:
        written.append(body)

    monkeypatch.setattr(log.streams, "write_applied", write)
    asyncio.run(log.record())
    monkeypatch.setattr(log_writer, "APPLIED_RECORD_BYTES_MAX", int(len(written[0]) / share))
    asyncio.run(log.record())
    asyncio.run(log.record())
    assert told in log.record_trouble()
    assert bool(told) == bool(log.record_trouble()) == ("most is of 'many' in vhost '/'" in log.record_trouble())
    assert [record.message for record in caplog.records] == [log.record_trouble()] * bool(told), "it is said once"


@pytest.mark.parametrize(
    ("made", "held", "told"),
    [
        (None, 200, False),
        (64, 50, True),
        (64, 79, True),
        (64, 81, False),  # it has become larger than it was made for: there is a policy
        (2_048, 1_200, False),
        (2_048, 1_300, True),  # it is larger than it was to be: there is none
    ],
)
def test_a_log_that_was_made_with_another_size_is_told_until_it_is_seen_to_have_the_right_one(
    tmp_path: Path, made: int | None, held: int, told: bool
) -> None:
    log = Log(tmp_path, log_bytes_max=1_024 * MIB)
    if made is not None:
        log.streams.declarer.made_with[log.streams.log_queue] = made * MIB
    log.watch.retention.appended(1, 7 * MIB)
    log.watch.retention.appended(2, held * MIB)
    log._node.head = 2
    said = f"its log was made for {(made or 0) * MIB} bytes, and log_bytes_max is {1_024 * MIB}: unless a policy on its broker has changed that"
    assert log.size_trouble().startswith(said) if told else log.size_trouble() == ""
