"""The probes: what a load balancer, an orchestrator or a person asks of one node, and the rule of each, as data (paths and codes as Patroni's).

The server, the table in docs/operations/monitoring.md and the test of every role have PROBES as their one source.

Rules:

- A probe only reads the node's status. Its answer is 200 if its rule holds, else 503.
- `lag` is what the node lacks of its primary's log, as the node last heard of it: see `follower_lag` of the status. A lag that is not known exceeds
  every limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lrq_ha.errors import MalformedInput
from lrq_ha.replication.roles import Role
from lrq_ha.replication.settings import NodeSettings


class Limit(NamedTuple):
    """A limit on the lag. `unit`: a key of the status' `follower_lag`."""

    unit: str
    most: float


_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(ms|s|B|kB|MB|GB|KiB|MiB|GiB)?", re.ASCII)
_UNITS: dict[str | None, tuple[str, float]] = {
    None: ("entries", 1), "ms": ("seconds", 0.001), "s": ("seconds", 1), "B": ("bytes", 1), "kB": ("bytes", 1e3), "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9), "KiB": ("bytes", 1 << 10), "MiB": ("bytes", 1 << 20), "GiB": ("bytes", 1 << 30),
}  # fmt: skip
#: A newcomer that lacks no more than this may be admitted to the set.
DEFAULT_LIMIT = Limit("entries", NodeSettings.admit_lag_entries_max)
ANY_LAG = Limit("entries", float("inf"))


def parse_limit(text: str) -> Limit:
    """A limit as in `?lag=`: "1000" entries, "10MB" (B, kB, MB, GB, KiB, MiB, GiB), "5s" or "500ms". Raises MalformedInput."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise MalformedInput(f"lag: {text!r} is no limit", todo="Give entries (1000), bytes (10MB) or seconds (5s)")
    unit, factor = _UNITS[found[2]]
    return Limit(unit, float(found[1]) * factor)


@dataclass(frozen=True)
class Standing:
    """The part of a node's status that the rules look at.

    Attributes:
        role: Its role.
        serves: Clients are served.
        leads: It leads an epoch; its door may not be open yet.
        hears: It hears its primary.
        works: Its incarnation runs, and its broker makes progress.
        lag: What it lacks of its primary's log, by unit; None: not known.
    """

    role: Role
    serves: bool
    leads: bool
    hears: bool
    works: bool
    lag: Mapping[str, float] | None

    @classmethod
    def of(cls, status: Mapping[str, Any], refusal: str) -> Standing:
        """Of a status. `refusal`: why clients are not served."""
        role, primary, broker = Role(status["role"]), status.get("primary"), status.get("broker") or {}
        leads = role in (Role.RECOVERING, Role.ACTIVE) and primary == status.get("node")
        works = role is not Role.STANDALONE and not broker.get("blocked")
        return cls(role, not refusal, leads, primary is not None, works, status.get("follower_lag"))

    @property
    def in_sync(self) -> bool:
        """A backup that has lost its primary may have been taken out of the set since, and still stays ready to be promoted."""
        return self.role is Role.READY and self.hears

    def within(self, limit: Limit) -> bool:
        """Whether it lacks no more of its primary's log than the limit."""
        return limit is ANY_LAG or (self.lag is not None and self.lag[limit.unit] <= limit.most)


@dataclass(frozen=True)
class Probe:
    """One probe.

    Attributes:
        paths: Its path, then its other names.
        holds_if: Its rule in words, for the documentation.
        holds: Its rule.
        limit: The limit on the lag without `?lag=`; None: the probe takes none.
    """

    paths: tuple[str, ...]
    holds_if: str
    holds: Callable[[Standing, Limit], bool]
    limit: Limit | None = None


PROBES = (
    Probe(("/primary", "/", "/read-write"), "the node serves clients", lambda node, _: node.serves),
    Probe(("/leader",), "the node leads; its door may not be open yet", lambda node, _: node.leads),
    Probe(
        ("/replica", "/synchronous", "/sync"), "in-sync backup that hears its primary, and lacks no more than `lag`",
        lambda node, limit: node.in_sync and node.within(limit), ANY_LAG,
    ),
    Probe(
        ("/asynchronous", "/async"), "backup that hears its primary, and is not in sync yet",
        lambda node, _: node.role in (Role.CATCH_UP, Role.JOINING) and node.hears,
    ),
    Probe(
        ("/ready", "/read-only"), "the node serves clients, or is an in-sync backup that hears its primary",
        lambda node, _: node.serves or node.in_sync,
    ),
    Probe(
        ("/readiness",), f"as `/ready`; a backup lacks no more than `lag`, else {DEFAULT_LIMIT.most:,} entries",
        lambda node, limit: node.serves or (node.in_sync and node.within(limit)), DEFAULT_LIMIT,
    ),
    Probe(("/health",), "the incarnation runs, and its broker takes the log", lambda node, _: node.works),
    Probe(("/liveness",), "the sidecar answers, whatever its broker does", lambda *_: True),
)  # fmt: skip


def documented() -> str:
    """The table for docs/operations/monitoring.md."""
    rows = [
        f"| {', '.join(f'`{path}`' for path in probe.paths)} | {probe.holds_if} | {'`?lag=`' if probe.limit else ''} |" for probe in PROBES
    ]
    return "\n".join(["| path | 200 if | takes |", "|---|---|---|", *rows]) + "\n"


def answer(probe: Probe, status: Mapping[str, Any], refusal: str, lag: str | None) -> tuple[int, dict[str, Any]]:
    """Code and body of a probe.

    Args:
        probe: The probe.
        status: The node's.
        refusal: Why clients are not served; empty if they are.
        lag: The parameter of this name; None: not given.

    Raises:
        MalformedInput: The parameter is no limit, or the probe takes none.
    """
    if lag is not None and probe.limit is None:
        raise MalformedInput(f"{probe.paths[0]} takes no lag", todo="/replica and /readiness do")
    limit = parse_limit(lag) if lag is not None else probe.limit or ANY_LAG
    holds = probe.holds(Standing.of(status, refusal), limit)
    body = {
        "state": "stopped" if status["role"] == Role.STANDALONE.value else "running",
        **{key: status.get(key) for key in ("role", "epoch", "node", "group", "primary")},
        "lag": status.get("follower_lag"),
        "pause": bool(status.get("paused")),
        "version": status.get("software"),
    }
    return (200 if holds else 503), body
