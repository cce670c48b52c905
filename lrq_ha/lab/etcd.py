"""The etcd of a lab: one private member, from the PATH or from the cache that `scripts/tool` fills.

Rule: nothing is installed here; a lab without coordination by etcd needs none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lrq_ha.lab.errors import LabError

#: Its name among the lab's processes.
KEY = "etcd"


def find() -> Path | None:
    """The program; None if it is not on this machine."""
    if found := shutil.which("etcd"):
        return Path(found)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = Path(os.environ.get("LRQ_TOOLS_DIR") or cache / "lrq-ha" / "tools") / "etcd"
    return program if program.exists() else None


def command(directory: Path, port: int, peer_port: int) -> list[str]:
    """Command line of an etcd that listens on loopback, with its data in `directory`. Raises LabError if there is no etcd."""
    program = find()
    if program is None:
        raise LabError("etcd is not on this machine", todo="Run scripts/tool etcd")
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(program), "--name", "lab", "--data-dir", str(directory), "--log-level", "warn", "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"lab={peer}",
    ]  # fmt: skip
