"""The etcd of a lab: one private member. Rule: a lab without coordination by etcd needs none."""

from __future__ import annotations

from pathlib import Path

from lrq_ha.lab.errors import LabError
from lrq_ha.lab.tools import find_tool

#: Its name among the lab's processes.
KEY = "etcd"


def command(directory: Path, port: int, peer_port: int) -> list[str]:
    """Command line of an etcd that listens on loopback, with its data in `directory`. Raises LabError if there is no etcd."""
    program = find_tool(KEY)
    if program is None:
        raise LabError("etcd is not on this machine", todo="Run scripts/tool etcd")
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(program), "--name", "lab", "--data-dir", str(directory), "--log-level", "warn", "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"lab={peer}",
    ]  # fmt: skip
