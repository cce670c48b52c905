"""A sidecar process of a test's own, beside a broker of a lab, with a configuration that the test writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from load import eventually
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab, probe
from lrq_ha.lab.files import python_environment
from lrq_ha.lab.ports import free_ports

ENDS_TIMEOUT_S = 120.0
WRONG_PASSWORD = "not-it-hunter2"


class Sidecar:
    """A sidecar process of the test; killed at the end, and all that it said is searched for passwords."""

    def __init__(self, lab: Lab, folder: Path, group: str, *, node: int = 1, name: str = "", beside: str = "e1",
                 edit: Callable[[str], str] = lambda text: text, more: str = "", level: str = "info",
                 handshake_timeout_s: float = PATIENT_DOOR["handshake_timeout_s"], environment: Mapping[str, str] | None = None,
                 **given: str) -> None:
        ports = free_ports()
        self.name = name or f"n{node}"
        admin = given.get("broker", lab.nodes[beside].admin)
        self.door = given.get("door", f"127.0.0.1:{next(ports)}")
        self.http = given.get("http", f"127.0.0.1:{next(ports)}")
        self.config = folder / f"{self.name}-{time.time_ns()}.toml"
        self.config.write_text(edit(f"""\
[node]
name = "{self.name}"
id = {node}
group = "{group}"
[broker]
url = "{admin}"
[door]
listen = "{self.door}"
handshake_timeout_s = {handshake_timeout_s}
[http]
listen = "{self.http}"
{more}"""))
        self._level = level
        self._environment = dict(environment or {})
        self.log = self.config.with_suffix(".log")
        self._secrets = [str(urlsplit(url).password) for n in lab.nodes.values() for url in (n.admin, n.door)] + [WRONG_PASSWORD]
        self._statuses: list[str] = []

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "lrq_ha.cli.main", "sidecar", "--config", str(self.config), "--log-level", self._level]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=python_environment() | self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        said = self.said() + "".join(self._statuses)
        for secret in self._secrets:
            assert secret not in said, "a password was said"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        found = probe.get_json(f"http://{self.http}/status") or {}
        self._statuses.append(json.dumps(found))
        return found

    def answered(self) -> dict[str, Any]:
        """Its status, once it answers."""
        found: list[dict[str, Any]] = []

        def asked() -> bool:
            found[:] = [self.status()]
            return bool(found[0])

        eventually(f"{self.name} to answer", asked)
        return found[0]

    def ends(self) -> str:
        """Waits for its end, which must be a failure, and returns what it said."""
        assert self.process.wait(ENDS_TIMEOUT_S) == 1
        assert "Traceback" not in self.said()
        return self.said()

    def complains(self, pattern: str) -> None:
        """Waits until GET /status gives a reason that fits, which must be in the log too; the sidecar goes on."""
        eventually(f"a reason like {pattern}", lambda: bool(re.search(pattern, str(self.status().get("reason")))))
        eventually("the same in the log", lambda: bool(re.search(pattern, self.said())))
        eventually("it to say that it is not active", lambda: self.status()["role"] != "active")
        assert "Traceback" not in self.said()
        assert self.process.poll() is None

    def becomes(self, role: str) -> None:
        eventually(f"{self.name} to become {role}", lambda: self.status().get("role") == role)
