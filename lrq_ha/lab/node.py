"""A lab's node: its addresses, its files and its entry in `lab.json`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lrq_ha.lab import keeper


@dataclass(frozen=True)
class LabNode:
    """One node as its users see it.

    Attributes:
        name: Name in the lab, as "e1".
        group: Its group, as "east".
        door: AMQP URL of the sidecar's door, with an ordinary client's credentials.
        broker: AMQP URL of the broker itself, with these credentials.
        http: Base URL of the sidecar's HTTP.
        config: The sidecar's configuration file.
        log: The sidecar's log.
        broker_log: The broker's log.
    """

    name: str
    group: str
    door: str
    broker: str
    http: str
    config: Path
    log: Path
    broker_log: Path
    _lab_directory: Path

    @property
    def admin(self) -> str:
        """AMQP URL of the broker with the sidecar's credentials."""
        return str(tomllib.loads(self.config.read_text())["broker"]["url"])

    @property
    def broker_pid(self) -> int | None:
        """Process id of the broker's Erlang VM; None while it does not run."""
        return self._pid("broker")

    @property
    def sidecar_pid(self) -> int | None:
        """Process id of the sidecar; None while it does not run."""
        return self._pid("sidecar")

    @classmethod
    def from_entry(cls, name: str, group: str, entry: Mapping[str, Any], directory: Path) -> Self:
        """A node from its entry in `lab.json` of the lab in `directory`."""
        return cls(name, group, entry["door"], entry["broker"], entry["http"], Path(entry["config"]), Path(entry["log"]), Path(entry["broker_log"]),
                   directory)

    def entry(self, pids: Mapping[str, int | None]) -> dict[str, Any]:
        """The node's entry in `lab.json`. `pids`: the process ids of the lab's parts."""
        return {"door": self.door, "broker": self.broker, "http": self.http, "sidecar_pid": pids.get(f"{self.name}.sidecar"),
                "broker_pid": pids.get(f"{self.name}.broker"), "config": str(self.config), "log": str(self.log), "broker_log": str(self.broker_log)}

    def ports(self, part: str) -> list[int]:
        """The ports on which a part, "broker" or "sidecar", listens."""
        return [int(url.rpartition(":")[2]) for url in ((self.broker,) if part == "broker" else (self.door, self.http))]

    def _pid(self, part: str) -> int | None:
        process = keeper.ask(self._lab_directory, do="list").get(f"{self.name}.{part}")
        return process["pid"] if process and process["exit"] is None else None
