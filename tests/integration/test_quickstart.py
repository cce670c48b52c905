"""docs/quickstart.md, pasted: two nodes and an etcd, the primary is killed under a publisher, a receiver finds nothing lost, nothing twice."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import eventually
from pasted import paste, running_lab, write_files

from lrq_ha.lab.tools import find_tool

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text("utf-8")
#: The commands up to the section about nodes without etcd, as they stand there.
COMMANDS = re.findall(r"^ {4}(?:\.venv/bin/|make )(.*)$", PAGE.partition("## 8.")[0], re.MULTILINE)
KILLED_AT, COUNT = 500, 3_000


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[dict[str, str]]:
    if find_tool("etcd") is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    options = re.fullmatch(r'lab ARGS="(.*)"', COMMANDS.pop(0))
    assert options, "the page begins with make lab"
    with running_lab(tmp_path, *options[1].split(), prints=r"^Ready after") as (environment, _):
        yield environment


def test_the_quickstart(terminal: dict[str, str], tmp_path: Path) -> None:
    """Takes a minute: 3,000 messages at 10 ms each, and the time of a lease."""
    assert COMMANDS == [
        "lrq-ha list", "python send.py", "lrq-ha lab kill e1", "lrq-ha list", "lrq-ha history", "python receive.py", "lrq-ha lab start e1",
        "lrq-ha list --watch", "lrq-ha switchover e1",
    ]  # fmt: skip
    write_files(PAGE, tmp_path)

    def roles() -> dict[str, str]:
        return dict(re.findall(r"^(e\d)\s+\S*?\s*(active|ready|catch-up|no answer)", paste("lrq-ha list", tmp_path, terminal).stdout, re.MULTILINE))

    eventually("a primary and a backup", lambda: sorted(roles().values()) == ["active", "ready"])
    primary, backup = sorted(roles(), key=lambda node: roles()[node])  # the page says to swap the names
    said = tmp_path / "send.log"
    with said.open("wb") as output, subprocess.Popen(["python", "-u", "send.py"], cwd=tmp_path, env=terminal, stdout=output, stderr=output) as sender:
        try:
            eventually("the first confirms", lambda: f"{KILLED_AT} confirmed" in said.read_text())
            paste(f"lrq-ha lab kill {primary}", tmp_path, terminal)
            assert sender.wait(240) == 0, said.read_text()
        finally:
            sender.kill()
    assert "lost the primary" in said.read_text()
    assert f"{COUNT} confirmed" in said.read_text()
    assert roles() == {primary: "no answer", backup: "active"}
    assert re.search(rf"{backup}\b.*lease", paste("lrq-ha history", tmp_path, terminal).stdout)
    assert f"{COUNT} numbers, 0 lost, 0 twice" in paste("python receive.py", tmp_path, terminal).stdout
    assert f"`{COUNT} numbers, 0 lost, 0 twice`" in PAGE
    paste(f"lrq-ha lab start {primary}", tmp_path, terminal)
    eventually("the old primary to follow", lambda: roles().get(primary) == "ready")
    paste(f"lrq-ha switchover {primary}", tmp_path, terminal)
    assert roles()[primary] == "active"
