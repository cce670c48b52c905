"""The folder of a lab: it holds only things that a lab wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

from lrq_ha.lab import keeper
from lrq_ha.lab.errors import LabError, NoLab

#: Marks a folder as a lab's, so that `claim` may empty it and never empties anything else.
_MARK = ".lrq-ha-lab"


def claim(directory: Path) -> None:
    """Makes the folder the lab's: a new or empty one, or one that a lab has left behind, which is emptied."""
    try:
        keeper.ask(directory, do="list")
    except NoLab:
        pass
    else:
        raise LabError(f"A lab runs in {directory} already", todo=f"End it with `lrq-ha lab down --dir {directory}`, or use another folder")
    try:
        _take(directory)
    except OSError as error:
        raise LabError(f"{directory} cannot be a lab's folder: {error.strerror}", todo="Name another folder") from error


def _take(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (directory / _MARK).exists():
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    elif any(directory.iterdir()):
        raise LabError(f"{directory} has things in it that no lab wrote", todo="Name another folder, or empty it yourself")
    directory.chmod(0o700)
    (directory / _MARK).touch()
