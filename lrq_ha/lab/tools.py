"""Programs beside RabbitMQ, for labs and tests: from the PATH, or from the folder that `scripts/tool` fills. Rule: nothing is installed here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find_tool(name: str) -> Path | None:
    """The path of a program; None if it is not on this machine."""
    if found := shutil.which(name):
        return Path(found)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = Path(os.environ.get("LRQ_TOOLS_DIR") or cache / "lrq-ha" / "tools") / name
    return kept if kept.exists() else None
