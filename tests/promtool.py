"""Runs promtool (scripts/promtool), which checks metrics and alerts as Prometheus understands them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TIMEOUT_S = 120.0


def run_promtool(*arguments: str | Path, given: bytes = b"") -> tuple[int, str]:
    """Exit code, and what it said. Skips the test where promtool is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = Path(os.environ.get("LRQ_TOOLS_DIR") or cache / "lrq-ha" / "tools") / "promtool"
    program = shutil.which("promtool") or (str(kept) if kept.exists() else None)
    if program is None:
        pytest.skip("METRICS AND ALERTS ARE NOT CHECKED: there is no promtool on this machine; run scripts/promtool")
    done = subprocess.run([program, *arguments], input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout.decode()
