"""The pipeline's files and definitions, without Spark: versions, clean-up, what a table may become, the configuration, the report."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline import history, run, store
from lrq_ha.spark.pipeline.config import ConfigError, parse_interval, read_config, sample
from lrq_ha.spark.pipeline.errors import BadVersion, NoVersion, PathTaken, SchemaChanged
from lrq_ha.spark.pipeline.history import VersionFigures
from lrq_ha.spark.pipeline.manifest import DataFile, Manifest, OpenSnapshot, Place, QueueState, TableState, Writer
from lrq_ha.spark.pipeline.report import read_report
from lrq_ha.spark.pipeline.run import main
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


TIME = "2026-01-01T00:00:{:02}+00:00"


def figures(number: int, **more: Any) -> VersionFigures:
    return VersionFigures(version=number, time=datetime.fromisoformat(TIME.format(number % 60)), rows={"t": number}, bytes={"t": 2048}, **more)


def page_of(path: Path) -> str:
    output = path / "out.html"
    assert main(["report", str(path), "--output", str(output)]) == 0
    return output.read_text("utf-8")


def test_a_report_of_what_is_recorded(tmp_path: Path) -> None:
    for number in (1, 2):
        store.create_version(tmp_path, version(number, *"ab"[:number]))
        history.append_version(tmp_path, figures(number, put=1000 + number, deleted=7, seconds=2.5, lag_s=3600.25))
    history.append_failure(tmp_path, "lrq_ha.spark.errors.DataLoss: <gone>\nmore")
    page = page_of(tmp_path)
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 1
    assert not re.findall(r'(?:src|href)="(?!#)', page), "a file that needs no other"
    panels = ("rows of the tables", "lag in seconds")
    for text in (*panels, "1,002", "3,600.2", "DataLoss: &lt;gone&gt;", "2.0 KiB", "a full snapshot is under way since 1.2"):
        assert text in page, text
    assert "more" not in page


def test_a_report_of_an_older_release(tmp_path: Path) -> None:
    """It has no history: versions and status.json are there."""
    for number in (1, 2, 3):
        store.create_version(tmp_path, version(number, *"abc"[:number]))
    status = {"version": 3, "put": 77, "deleted": 0, "bad": 0, "seconds": 1.5, "lag_s": None, "rows": {"t": 3}, "quarantined": 0}
    store.write_status(tmp_path, json.dumps(status))
    report = read_report(tmp_path)
    known = [(one.version, one.rows, one.put) for one in report.versions]
    assert known == [(1, {"t": 1}, None), (2, {"t": 2}, None), (3, {"t": 3}, 77)]
    store.write_status(tmp_path, "{")
    assert read_report(tmp_path).versions[-1].put is None
    page = page_of(tmp_path)
    assert "lag in seconds</text>" not in page, "a panel without a figure"
    assert "None is recorded." in page


def test_names_of_tables_in_a_report_are_text(tmp_path: Path) -> None:
    name = "a$b$<script>"
    made = Manifest(1, "p", True, {}, {name: TableState({"k": "string"}, ("k",), 2)}, (), WRITER)
    store.create_version(tmp_path, made)
    page = page_of(tmp_path)
    assert "<script>" not in page
    assert "a$b$&lt;script&gt;" in page


def test_a_report_of_what_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["report", str(path), "--output", str(tmp_path / "out.html")]) == 1
        said = capsys.readouterr().err
        assert said == f"{path} holds no tables of a pipeline. Name the folder that path in [sink] of the pipeline's configuration names\n"
    assert not (tmp_path / "out.html").exists()
    history.append_failure(tmp_path, "nothing is made where there are no tables")
    assert not list(tmp_path.iterdir())


def test_a_report_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store.create_version(tmp_path, version(1, "a"))
    monkeypatch.delitem(sys.modules, "lrq_ha.spark.pipeline.report_chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out.html")]) == 1
    assert "pip install 'lrq-ha[report]'" in capsys.readouterr().err


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job that fails all the time pushes out no version."""
    monkeypatch.setattr(history, "HISTORY_BYTES_MAX", 20_000)
    (tmp_path / "_versions").mkdir()
    for number in range(1, 200):
        history.append_version(tmp_path, figures(number))
    for _ in range(1000):
        history.append_failure(tmp_path, "x" * 2000)
    versions, failures = history.read_history(tmp_path)
    assert [one.version for one in versions][-50:] == list(range(150, 200))
    assert 10 <= len(failures) <= history.FAILURES_MAX + 20
    assert (tmp_path / history.HISTORY).stat().st_size < 150_000
    with (tmp_path / history.HISTORY).open("a") as file:
        file.write('{"format": 2, "version": 500}\n{"vers')
    assert history.read_history(tmp_path) == (versions, failures)


def test_a_jobs_failure_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(sample().replace("/srv/tables", str(tmp_path / "tables")))
    store.create_version(tmp_path / "tables", version(1, "a"))

    def fail(_: object) -> NoReturn:
        raise BadVersion("x", "y")

    monkeypatch.setattr(run, "open_session", fail)
    assert main([str(path), "--dry-run"]) == 1
    assert not read_report(tmp_path / "tables").failures
    assert main([str(path)]) == 1
    assert [one.failed for one in read_report(tmp_path / "tables").failures] == [str(BadVersion("x", "y"))]
