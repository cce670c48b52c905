"""What each version did, and why jobs failed: `history.jsonl` beside the tables, a line for each. For reports alone.

    {"format": 1, "version": 12, "time": …, "put": …, "deleted": …, "bad": …, "seconds": …, "lag_s": …, "rows": {table: …}, …}
    {"format": 1, "time": …, "failed": "…"}

Invariants:

- `_versions` alone says what is true. A job that is killed behind a commit leaves no line for it.
- A line is appended in one write. A line that cannot be read, or of another format, is left out.
- The file has at most HISTORY_BYTES_MAX and one line more. Beyond, the older lines go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter, ValidationError

from lrq_ha.spark.pipeline.manifest import Manifest
from lrq_ha.spark.pipeline.store import VERSIONS

HISTORY = "history.jsonl"
HISTORY_BYTES_MAX = 4 * 2**20
FAILURES_MAX = 100
FAILED_CHARACTERS_MAX = 1000


class _Line(BaseModel):
    """A line. `time` is in ISO 8601."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    time: AwareDatetime


class VersionFigures(_Line):
    """The figures of a version.

    Attributes:
        version: Its number.
        rows: Table -> its rows.
        bytes: Table -> size of its data files.
        quarantined: Bad records in quarantine.
        put: Rows put by its batch, in deltas and in snapshots. None of this and of the following: it was not recorded.
        deleted: Rows deleted by its batch.
        bad: Bad rows and payloads of its batch.
        seconds: How long the batch took.
        lag_s: Age of the newest transaction; None, too, if publishers sent no time.
    """

    version: int
    rows: Mapping[str, int]
    bytes: Mapping[str, int] = {}
    quarantined: int = 0
    put: int | None = None
    deleted: int | None = None
    bad: int | None = None
    seconds: float | None = None
    lag_s: float | None = None


class Failure(_Line):
    """The error that ended a job."""

    failed: str


_LINES: TypeAdapter[VersionFigures | Failure] = TypeAdapter(VersionFigures | Failure)


def figures_of(manifest: Manifest) -> VersionFigures:
    """The figures of a version that its own file has."""
    return VersionFigures(
        version=manifest.version,
        time=datetime.fromisoformat(manifest.writer.time) if manifest.writer else datetime.fromtimestamp(0, UTC),
        rows={name: sum(file.rows for file in table.files) for name, table in manifest.tables.items()},
        bytes={name: sum(file.bytes for file in table.files) for name, table in manifest.tables.items()},
        quarantined=sum(file.rows for file in manifest.quarantine),
    )


def append_version(path: Path, figures: VersionFigures) -> None:
    """Adds the line of a version."""
    _append(path / HISTORY, figures)


def append_failure(path: Path, failed: str) -> None:
    """Adds the line of a job's failure, where there are tables; a disk that takes no line is not one failure more."""
    if not (path / VERSIONS).is_dir():
        return
    with suppress(OSError):
        _append(path / HISTORY, Failure(time=datetime.now(UTC), failed=failed.splitlines()[0][:FAILED_CHARACTERS_MAX] if failed else "unknown"))


def read_history(path: Path) -> tuple[list[VersionFigures], list[Failure]]:
    """The versions in order of number, and the failures in order of time."""
    versions: dict[int, VersionFigures] = {}
    failures = []
    for line in _lines(path / HISTORY):
        try:
            found = _LINES.validate_json(line)
        except ValidationError:
            continue
        if isinstance(found, Failure):
            failures.append(found)
        else:
            versions[found.version] = found
    return [versions[number] for number in sorted(versions)], failures


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _append(file: Path, line: _Line) -> None:
    text = line.model_dump_json(exclude_none=True).encode() + b"\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, text)
        is_large = os.fstat(descriptor).st_size > HISTORY_BYTES_MAX
    finally:
        os.close(descriptor)
    if is_large:
        draft = file.with_name(f".{file.name}-{os.getpid()}")
        draft.write_bytes(b"".join(_newest(_lines(file))))
        os.replace(draft, file)


def _newest(lines: Iterable[bytes]) -> list[bytes]:
    """The newest lines of versions, up to half of the limit, and the newest failures: a job that fails all the time pushes out no version."""
    kept: list[bytes] = []
    failures = size = 0
    for line in reversed(list(lines)):
        is_failure = b'"failed":' in line
        if failures >= FAILURES_MAX if is_failure else size + len(line) > HISTORY_BYTES_MAX // 2:
            continue
        failures += is_failure
        size += 0 if is_failure else len(line)
        kept.append(line)
    return kept[::-1]
