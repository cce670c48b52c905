"""The pipeline's files and definitions, without Spark: versions, clean-up, what a table may become, the configuration."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.config import ConfigError, parse_interval, read_config, sample
from lrq_ha.spark.pipeline.errors import BadVersion, NoVersion, PathTaken, SchemaChanged
from lrq_ha.spark.pipeline.manifest import DataFile, Manifest, OpenSnapshot, Place, QueueState, TableState, Writer
from lrq_ha.spark.pipeline.spec import Table, reconcile_table

pytestmark = pytest.mark.quick

WRITER = Writer("h1", 7, "2026-01-01T00:00:00+00:00", "query", 3)


def version(number: int, *names: str) -> Manifest:
    files = tuple(DataFile(f"data/t/{name}", "q", 0, 1, 2) for name in names)
    snapshot = OpenSnapshot("r", Position(1, 2), True, (DataFile("data/_staged/s", "q", 0, 1, 2),), {"t": Place(1, 1, 3, 0)})
    queue = QueueState(Position(1, 4), Position(1, 1), None, snapshot, ("r",))
    return Manifest(number, "p", True, {"q": queue}, {"t": TableState({"k": "string"}, ("k",), 2, files)}, (), WRITER)


def write(path: Path, *names: str) -> None:
    for name in names:
        (path / "data" / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "data" / "t" / name).write_text("x")


def test_a_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(NoVersion, match="holds no version of tables yet"):
        store.read_version(tmp_path)
    write(tmp_path, "a", "b")
    store.commit_version(tmp_path, version(1, "a"), ["data/t/a"])
    store.commit_version(tmp_path, version(2, "a", "b"), ["data/t/b"])
    assert store.read_version(tmp_path) == version(2, "a", "b")
    assert store.read_version(tmp_path, 1) == version(1, "a")
    assert (tmp_path / "_current").read_text() == "2\n"
    assert sorted(path.read_text() for path in (tmp_path / "current" / "t").iterdir()) == ["x", "x"]
    with pytest.raises(NoVersion, match=r"holds no version 5\. There are 1 to 2"):
        store.read_version(tmp_path, 5)


def test_a_version_is_created_once(tmp_path: Path) -> None:
    store.create_version(tmp_path, version(1, "a"))
    with pytest.raises(PathTaken, match="has a version 1 that another job wrote: host h1, pid 7, at 2026-01-01"):
        store.create_version(tmp_path, version(1, "b"))
    assert store.read_version(tmp_path) == version(1, "a")
    assert os.listdir(tmp_path / "_versions") == ["1.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[]", "\xff"])
def test_a_version_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "_versions").mkdir()
    (tmp_path / "_versions" / "1.json").write_text(text, "latin-1")
    with pytest.raises(BadVersion, match=r"1\.json cannot be used"):
        store.read_version(tmp_path)


def test_old_versions_and_files_of_no_version_are_removed(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c", "crashed", "writing")
    for number, names in enumerate(("a", "ab", "bc", "c"), 1):
        store.commit_version(tmp_path, version(number, *names), [f"data/t/{name}" for name in names])
    hour_ago = time.time() - 3601
    for path in tmp_path.rglob("*"):
        if path.name != "writing" and not path.is_symlink():
            os.utime(path, (hour_ago, hour_ago))
    os.utime(tmp_path / "_versions" / "2.json")
    store.remove_versions(tmp_path, 1)
    assert store.list_versions(tmp_path) == [2, 4]
    assert sorted(os.listdir(tmp_path / "data" / "t")) == ["a", "b", "c", "writing"]
    assert sorted(os.listdir(tmp_path / "_views")) == ["2", "4"]


TABLE = Table("t", {"k": "int", "f": "float"}, ("k",), 8)
STATE = TableState(TABLE.columns, TABLE.key, TABLE.buckets)


def test_what_a_table_may_become() -> None:
    assert reconcile_table(TABLE, None) == TABLE
    wider = Table("t", {"k": "bigint", "f": "double", "n": "string"}, ("k",), 8)
    assert reconcile_table(wider, STATE) == wider
    adding = Table("t", {"k": "int"}, ("k",), 8, "add")
    assert reconcile_table(adding, STATE).columns == TABLE.columns


@pytest.mark.parametrize(
    ("columns", "key", "buckets", "said"),
    [
        ({"k": "int"}, "k", 8, "has a column f on disk, and none in its definition"),
        ({"k": "int", "f": "string"}, "k", 8, "has the column f of type float on disk, and of type string"),
        ({"k": "smallint", "f": "float"}, "k", 8, "has the column k of type int on disk, and of type smallint"),
        ({"k": "int", "f": "float", "n": "int"}, "n", 8, "has the key k on disk, and n"),
        ({"k": "int", "f": "float"}, "k", 4, "has 8 buckets on disk, and 4"),
        ({"f": "float"}, "k", 8, "has no column for its key k"),
        ({"k": "double"}, "k", 8, "key column k of type double"),
        ({"k": "int", "Queue": "int"}, "k", 8, "has the column Queue"),
        ({"k": "int", "_x": "int"}, "k", 8, "has the column _x"),
    ],
)
def test_what_a_table_may_not_become(columns: dict[str, str], key: str, buckets: int, said: str) -> None:
    with pytest.raises(SchemaChanged, match=said):
        reconcile_table(Table("t", columns, (key,), buckets), STATE)


def test_the_sample_is_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(sample())
    config = read_config(path)
    assert config.tables["flights"].key == ["id"]
    assert config.options["maxEntriesPerTrigger"] == "500000"
    others = re.compile('.*_[.][*]|# (user|password|passwordFile) = ')  # instead of keys that are there
    kept = [line for line in sample().splitlines() if (" = " in line and not others.match(line)) or line[:1] == "["]
    path.write_text("".join(line.removeprefix("# ") + "\n" for line in kept))
    assert read_config(path).options["failOnDataLoss"] == "true"


@pytest.mark.parametrize(
    ("given", "changed", "said"),
    [
        ("buckets = 8", "buckets = 0", r"tables.flights.buckets: .*greater than or equal to 1 \(value 0\)"),
        ("buckets = 8", "bucket = 8", "tables.flights.bucket: unknown key; allowed here: buckets, key, on_new_column, schema"),
        ("[run]", "[runs]", "runs: unknown key; allowed here: decode, run, sink, source, spark, tables"),
        ('key = ["id"]', "", "tables.flights.key: missing"),
        ('interval = "30s"', 'interval = "30"', "run.interval: must be a whole number with s, m or h"),
        ("[tables.flights]", "[tables._x]", "tables._x: the name of a table must not"),
        ("subscribe =", "subscribes =", "source: Unknown option 'subscribes'"),
        ("subscribe =", 'startingOffsets = "latest"\nsubscribe =', "source: the pipeline sets startingOffsets itself"),
        ("amqp://reader:SECRET@", "amqp://reader:SEC/RET@", "source: Address 1 of option nodes is malformed"),
        ("[sink]", "[sink", "is not TOML"),
    ],
)
def test_what_a_configuration_may_not_hold(tmp_path: Path, given: str, changed: str, said: str) -> None:
    path = tmp_path / "pipeline.toml"
    assert given in sample()
    path.write_text(sample().replace(given, changed))
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(path)
    assert "SEC" not in str(caught.value)


def test_the_documentation_has_the_sample() -> None:
    page = Path(__file__).parents[2] / "docs" / "spark" / "tables.md"
    assert f"```toml\n{sample()}```" in page.read_text()


def test_intervals() -> None:
    assert [parse_interval(text) for text in ("0s", "30s", "5m", "1h")] == [0, 30, 300, 3600]
