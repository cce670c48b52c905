"""Versions on a file system: how one is made, found, shown to readers, and removed.

    _versions/N.json       the version N; the only truth
    _versions/N.delta.json versions of the Delta tables that belong to it (delta.py)
    _current               number of the newest one, for people and scripts
    _views/N/TABLE/…       links to the data files of version N
    current                link to _views/N of the newest version
    data/…                 Parquet files
    status.json            the last version in short
    history.jsonl          figures of versions, and failures (history.py)

A commit has five steps: flush the data files, create `_versions/N.json`, write `_current`, link the view, swap `current`. The second is what
counts: before it nothing is visible, after it all is. The others are done again when a job starts.

The path has to be on a file system that the driver and all workers share, with hard links (for the atomic create).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from lrq_ha.spark.pipeline.errors import BadVersion, NoVersion, PathTaken
from lrq_ha.spark.pipeline.manifest import Manifest

VERSIONS, VIEWS, DATA, CURRENT = "_versions", "_views", "data", "current"
DELTA_LOG = "_delta_log"
REMOVE_AFTER_S = 3600.0


def list_versions(path: Path) -> list[int]:
    """Numbers of the versions that are there, ascending."""
    try:
        names = os.listdir(path / VERSIONS)
    except FileNotFoundError:
        return []
    return sorted(int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit() and name.endswith(".json"))


def read_version(path: Path, version: int | None = None) -> Manifest:
    """A version, by default the newest.

    Raises:
        NoVersion: It is not there.
        BadVersion: It cannot be read.
    """
    while True:
        found = list_versions(path)
        wanted = version if version is not None else max(found, default=0)
        if wanted not in found:
            if not found:
                raise NoVersion(f"{path} holds no version of tables yet", todo="Wait for the pipeline's first version")
            raise NoVersion(f"{path} holds no version {wanted}", todo=f"There are {found[0]} to {found[-1]}; keep_versions in [sink] keeps more")
        file = path / VERSIONS / f"{wanted}.json"
        try:
            return Manifest.from_json(file.read_text("utf-8"), str(file))
        except FileNotFoundError:
            continue  # it was removed since, and so newer ones are there
        except (OSError, UnicodeDecodeError) as error:
            raise BadVersion(str(file), str(error)) from error


def table_folder(path: Path, table: str) -> Path:
    """Where the data files of a table are."""
    return path / DATA / quote(table, safe="")


def commit_version(path: Path, manifest: Manifest, new_files: Iterable[str]) -> None:
    """Makes a version, and shows it.

    Args:
        path: Of the tables.
        manifest: The version.
        new_files: Data files that it adds, relative to `path`.

    Raises:
        PathTaken: Another job has made a version with this number.
    """
    flush_files(path, new_files)
    create_version(path, manifest)
    show_version(path, manifest)


def show_version(path: Path, manifest: Manifest) -> None:
    """Points readers that do not know `_versions` to a version."""
    write_current(path, manifest)
    link_view(path, manifest)
    swap_current(path, manifest)


def flush_files(path: Path, files: Iterable[str]) -> None:
    """Data files, and the folders that name them, are on the disk before a version names them."""
    folders = set()
    for name in files:
        _flush(path / name)
        folders |= {folder for folder in (path / name).parents if folder == path or path in folder.parents}
    for folder in folders:
        _flush(folder)


def create_version(path: Path, manifest: Manifest) -> None:
    """Creates `_versions/N.json` whole, or not at all.

    Raises:
        PathTaken: It is there already.
    """
    folder = path / VERSIONS
    folder.mkdir(parents=True, exist_ok=True)
    target, draft = folder / f"{manifest.version}.json", folder / f".{manifest.version}-{os.getpid()}-{time.time_ns()}"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, target)
    except FileExistsError:
        raise _taken(path, manifest.version) from None
    finally:
        draft.unlink(missing_ok=True)
    _flush(folder)


def _taken(path: Path, version: int) -> PathTaken:
    try:
        writer = read_version(path, version).writer
    except (NoVersion, BadVersion):
        writer = None
    who = f"host {writer.host}, pid {writer.pid}, at {writer.time}" if writer else "it cannot be read"
    todo = "Stop one of the two jobs, or give this one another path, and start it again"
    return PathTaken(f"{path} has a version {version} that another job wrote: {who}", todo=todo)


def write_current(path: Path, manifest: Manifest) -> None:
    """Writes `_current`."""
    _replace(path / "_current", lambda draft: _write(draft, f"{manifest.version}\n"))


def link_view(path: Path, manifest: Manifest) -> None:
    """Makes `_views/N`."""
    view = path / VIEWS / str(manifest.version)
    if view.exists():
        return
    draft = path / VIEWS / f".{manifest.version}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    for name, table in manifest.tables.items():
        (draft / name).mkdir(parents=True)
        for number, file in enumerate(table.files):
            os.symlink(os.path.relpath(path / file.path, view / name), draft / name / f"{number:05}.parquet")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(draft, view)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(draft, ignore_errors=True)


def swap_current(path: Path, manifest: Manifest) -> None:
    """Points the link `current` to `_views/N`."""
    _replace(path / CURRENT, lambda draft: os.symlink(f"{VIEWS}/{manifest.version}", draft))


def write_delta_versions(path: Path, version: int, tables: Mapping[str, int]) -> None:
    """Writes `_versions/N.delta.json`."""
    _replace(path / VERSIONS / f"{version}.delta.json", lambda draft: _write(draft, json.dumps(tables, indent=1) + "\n"))


def has_delta_logs(path: Path) -> bool:
    """Whether any table has been written as a Delta table."""
    return any((path / DATA).glob(f"*/{DELTA_LOG}"))


def write_status(path: Path, text: str) -> None:
    """Writes `status.json`."""
    _replace(path / "status.json", lambda draft: _write(draft, text))


def remove_versions(path: Path, keep: int, *, after_s: float = REMOVE_AFTER_S) -> int:
    """Removes versions older than the newest `keep`, and files that no version names, if they are older than `after_s` seconds.

    Returns:
        How many data files were removed.
    """
    versions = list_versions(path)
    oldest = time.time() - after_s
    kept: set[str] = set()
    for version in versions:
        file = path / VERSIONS / f"{version}.json"
        if version in versions[-keep:] or file.stat().st_mtime > oldest:
            kept |= read_version(path, version).files
        else:
            shutil.rmtree(path / VIEWS / str(version), ignore_errors=True)
            file.unlink()
            file.with_suffix(".delta.json").unlink(missing_ok=True)
    removed = 0
    for data in _data_files(path):
        if str(data.relative_to(path)) not in kept and data.stat().st_mtime <= oldest:
            data.unlink(missing_ok=True)
            removed += data.suffix == ".parquet"
    for draft in (*(path / VERSIONS).glob(".*"), *(path / VIEWS).glob(".*")):
        if draft.lstat().st_mtime <= oldest:
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)
    for folder in sorted((path / DATA).rglob("*"), reverse=True):
        if DELTA_LOG not in folder.parts and folder.is_dir() and not any(folder.iterdir()) and folder.stat().st_mtime <= oldest:
            folder.rmdir()
    return removed


def _data_files(path: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(path / DATA):
        folders[:] = [name for name in folders if name != DELTA_LOG]
        for name in names:
            yield Path(folder, name)


def _replace(target: Path, make: Callable[[Path], object]) -> None:
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    make(draft)
    os.replace(draft, target)


def _write(draft: Path, text: str) -> None:
    draft.write_text(text, "utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
