"""`lrq-ha-pipeline report PATH`: one HTML file about the tables of a pipeline, from what is stored beside them. No Spark runs for it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.errors import NoVersion
from lrq_ha.spark.pipeline.history import Failure, VersionFigures, figures_of, read_history
from lrq_ha.spark.pipeline.manifest import Manifest

OUTPUT = Path("pipeline-report.html")


@dataclass(frozen=True)
class Report:
    """What is stored of a pipeline.

    Attributes:
        path: Of the tables.
        manifest: The newest version.
        versions: Figures of versions, ascending; the last one is that of `manifest`.
        failures: Errors that ended jobs, in order of time.
    """

    path: Path
    manifest: Manifest
    versions: tuple[VersionFigures, ...]
    failures: tuple[Failure, ...]


def read_report(path: Path) -> Report:
    """Reads what is stored beside the tables under a path.

    Raises:
        NoVersion: No pipeline has made a version there.
        BadVersion: A version cannot be read.
    """
    if not (path / store.VERSIONS).is_dir():
        raise NoVersion(f"{path} holds no tables of a pipeline", todo="Name the folder that path in [sink] of the pipeline's configuration names")
    manifest = store.read_version(path)
    recorded, failures = read_history(path)
    found = {one.version: one for one in recorded if one.version <= manifest.version}
    for number in store.list_versions(path):
        if number < manifest.version and number not in found:
            try:
                found[number] = figures_of(store.read_version(path, number))
            except NoVersion:
                continue  # it was removed since
    if manifest.version not in found:  # another release wrote it, or the job was killed behind the commit
        found[manifest.version] = _with_status(figures_of(manifest), path)
    return Report(path, manifest, tuple(found[number] for number in sorted(found)), tuple(failures))


def _with_status(figures: VersionFigures, path: Path) -> VersionFigures:
    """The figures with those of status.json, if it is of this version."""
    try:
        status: Mapping[str, Any] = json.loads((path / "status.json").read_text("utf-8"))
        if status["version"] != figures.version:
            return figures
        return VersionFigures.model_validate({**status, "format": 1, "time": figures.time, "bytes": figures.bytes})
    except (OSError, ValueError, KeyError, TypeError):
        return figures


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lrq-ha-pipeline report",
        description="Writes a report about the tables of a pipeline: rows, lag, sizes, versions, failures. It needs lrq-ha[report], and no Java.",
    )
    parser.add_argument("path", type=Path, help="folder of the tables: path in [sink]")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help="the HTML file (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        page = render_report(read_report(given.path))
        given.output.write_text(page, "utf-8")
    except (LrqError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {given.output}")
    return 0


def render_report(report: Report) -> str:
    """The HTML text. Raises LrqError if matplotlib is not installed."""
    from lrq_ha.spark.pipeline.report_page import format_page

    try:
        from lrq_ha.spark.pipeline.report_chart import draw_versions
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise LrqError("The report needs the package matplotlib, which is not installed", todo="pip install 'lrq-ha[report]'") from error
    return format_page(report.path, report.manifest, report.versions, report.failures, draw_versions(report.versions))
