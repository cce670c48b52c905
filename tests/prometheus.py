"""Prometheus and its promtool (scripts/tool), which check metrics and alerts as their users' do."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

from lrq_ha.lab.ports import free_ports
from lrq_ha.lab.tools import find_tool

TIMEOUT_S = 120.0
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def find_program(name: str) -> str:
    """The path of one of the two programs. Skips the test where it is missing."""
    program = find_tool(name)
    if program is None:
        pytest.skip(f"METRICS AND ALERTS ARE NOT CHECKED: there is no {name} on this machine; run scripts/tool prometheus")
    return str(program)


def run_promtool(*arguments: str | Path, given: bytes = b"") -> tuple[int, str]:
    """Exit code, and what it said."""
    command = [find_program("promtool"), *arguments]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout.decode()


class Prometheus:
    """A Prometheus that scrapes each second, and ends with the test.

    Args:
        folder: Of its files.
        rules: File of its alerts.
        targets: HOST:PORT of sidecars.
    """

    def __init__(self, folder: Path, rules: Path, targets: list[str]) -> None:
        self._program = find_program("prometheus")
        self._folder = folder
        self._address = f"127.0.0.1:{next(free_ports())}"
        job = {"job_name": "lrq-ha", "static_configs": [{"targets": targets}]}
        config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(rules)], "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self) -> Self:
        folder = self._folder
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self._address}"]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen([self._program, *options], stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, path: str) -> Any:
        """The data of an answer of its API. Raises OSError while it does not answer."""
        with _OPEN(f"http://{self._address}/api/v1/{path}", timeout=TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def alerts(self) -> dict[str, str]:
        """State of each alert that is pending or firing."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.ask("alerts")["alerts"]}
