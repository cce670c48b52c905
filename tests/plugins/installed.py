"""Installs the module beside this file into a folder, as pip does: the module, and metadata that name its entry points."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

MODULE = Path(__file__).parent / "lrq_test_interceptors.py"
OFFERED = {"recorder": "Recorder", "gate-a": "Gate", "gate-z": "Gate", "failing": "Failing", "slow": "Slow", "hanging": "Hanging"}


def install(folder: Path, offered: Mapping[str, str] = OFFERED, distribution: str = "lrq_test_interceptors") -> Path:
    """Returns `folder`, which then belongs on sys.path. `offered`: class by entry point."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {MODULE.stem}:{kind}\n" for name, kind in offered.items())
    (info / "entry_points.txt").write_text(f"[lrq_ha.interceptors]\n{lines}")
    shutil.copy(MODULE, folder)
    return folder
