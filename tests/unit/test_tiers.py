"""The tiers: every file of real-broker tests is in the quick one, and shards together are the whole suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from named_tests import TESTS
from tiers import Shard, measure_units, shard_of

ROOT = TESTS.parent
#: Files whose tests all take half a minute or more, and the quick tests that guard the same promises.
SLOW = {
    "integration/test_away.py": "test_queue_kinds.py, test_operator.py",
    "integration/test_catching_up.py": "test_joining.py",
    "integration/test_coordination_faults.py": "test_coordination.py",
    "integration/test_four_nodes.py": "test_three_nodes.py",
    "integration/test_frameworks.py": "test_door.py, test_publisher_door.py",
    "integration/test_growing.py": "test_joining.py, test_three_nodes.py",
    "integration/test_joining_three.py": "test_joining.py",
    "integration/test_memory.py": "test_limits.py",
    "integration/test_partition_of_three.py": "test_partition.py",
    "integration/test_permissions_over_failover.py": "test_door_permissions.py, test_broker_lacks.py",
    "integration/test_queue_that_is_moved.py": "test_purges.py, test_adopt.py",
    "integration/test_quickstart.py": "test_coordination.py, test_docs.py",
    "integration/test_receiver_kills.py": "test_receiver.py",
    "integration/test_restart.py": "test_joining.py, test_broker_restarts.py",
    "integration/test_sites_channels.py": "test_sites.py, test_sites_clients.py",
    "integration/test_sites_two_ways.py": "test_sites.py, test_receiver_topologies.py",
    "integration/test_slow_link.py": "test_faults.py, test_backlogs.py",
    "integration/test_three_faults.py": "test_three_nodes.py, test_faults.py",
    "integration/test_unequal_brokers.py": "test_broker_lacks.py, test_definitions.py",
    "integration/test_unseen_messages.py": "test_purges.py, test_census.py",
    "integration/test_upgrade_rabbitmq.py": "test_switchover.py, test_joining.py, test_definitions.py",
    "integration/test_writes_fail.py": "test_full_disk.py",
    "spark/test_cluster.py": "test_source.py, test_stream.py, test_pipeline_files.py",
    "spark/test_connect.py": "test_source.py, test_stream.py",
    "spark/test_decode.py": "test_records.py, test_pipeline_files.py",
    "spark/test_fed_three_times.py": "test_pipeline_progress.py, test_resync.py",
    "spark/test_kill_matrix_nodes.py": "test_pipeline_progress.py, test_pipeline_files.py, test_stream.py",
    "spark/test_kill_matrix_workers.py": "test_pipeline_progress.py, test_pipeline_files.py, test_stream.py",
    "spark/test_pipeline.py": "test_pipeline_progress.py, test_pipeline_files.py",
    "spark/test_pipeline_delta.py": "test_pipeline_progress.py, test_pipeline_files.py, test_records.py",
    "spark/test_pipeline_job.py": "test_pipeline_progress.py, test_pipeline_files.py, test_stream.py",
    "spark/test_quick_start.py": "test_source.py, test_spark_options.py",
    "spark/test_stream_doors.py": "test_stream.py, test_silent_nodes.py",
}


def collected(*options: str) -> list[str]:
    """The ids of the tests that a run with these options would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *options]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300).stdout
    return [line for line in said.splitlines() if "::" in line]


@pytest.mark.parametrize("count", [1, 2, 6, 50])
def test_each_unit_belongs_to_one_shard(count: int) -> None:
    units = [f"integration/test_{number}.py {version}" for number in range(40) for version in ("3.10", "4.3")]
    found = shard_of(units, count)
    assert found.keys() == set(units)
    assert set(found.values()) == set(range(1, count + 1))
    assert shard_of(reversed(units), count) == found, "in whatever order they are collected"


@pytest.mark.parametrize("text", ["0/6", "7/6", "2", "a/b", "2/0", "-1/2"])
def test_a_shard_that_there_is_not(text: str) -> None:
    with pytest.raises(ValueError, match="as 2/6"):
        Shard.parse(text)


@pytest.mark.full
def test_shards_together_are_the_suite() -> None:
    whole, *parts = (collected(*options) for options in ((), *(("--shard", f"{number}/3") for number in (1, 2, 3))))
    assert len(whole) > 4_000
    assert sorted(test for part in parts for test in part) == sorted(whole)


def test_every_file_of_real_broker_tests_is_in_the_quick_tier() -> None:
    quick = {test.partition("::")[0] for test in collected("--quick", "tests/integration", "tests/spark")}
    files = {path.relative_to(ROOT).as_posix() for folder in ("integration", "spark") for path in (TESTS / folder).glob("test_*.py")}
    assert files - quick == {f"tests/{name}" for name in SLOW}


def test_durations_are_read_from_reports(tmp_path: Path) -> None:
    cases = [
        ("tests.integration.test_door", "test_it[4.3-quorum]@4.3 pair", 2.0),
        ("tests.integration.test_door", "test_it[3.10-quorum]@3.10 pair", 3.0),
        ("tests.integration.test_door", "test_other[4.3]@4.3 pair", 1.5),
        ("tests.unit.test_node.TestNode", "test_node", 0.25),
    ]
    report = tmp_path / "report.xml"
    rows = "".join(f'<testcase classname="{of}" name="{name}" time="{seconds}"/>' for of, name, seconds in cases)
    report.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    found = measure_units([report])
    assert found == {"integration/test_door.py 3.10": 3.0, "integration/test_door.py 4.3": 3.5, "unit/test_node.py": 0.2}
