"""A group's nodes, and their status over HTTP.

Rule: every request has a time limit; a node that does not answer is shown as such and never hides the others.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.error
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lrq_ha.direct_http import NOT_HTTP, PLAIN, HttpAccess
from lrq_ha.replication.roles import Role

STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Target:
    """A node to query.

    Attributes:
        http: Base URL of its sidecar, without a slash at the end.
        config: Its configuration; None: it is on another machine.
        access: Token and TLS for requests to it.
    """

    name: str
    group: str
    http: str
    config: Path | None = None
    access: HttpAccess = field(default=PLAIN, compare=False)


@dataclass(frozen=True)
class Report:
    """A node's status. `status` is empty if it did not answer; then `failure` names the attempt and its error."""

    target: Target
    status: dict[str, Any]
    failure: str = ""

    @property
    def is_primary(self) -> bool:
        return self.status.get("role") == Role.ACTIVE.value or bool(self.status.get("serving"))

    def since(self) -> str:
        """Time since which it has its role; empty if it gives none."""
        found = self.status.get("since")
        if isinstance(found, int | float):  # Unix time in seconds
            found = datetime.fromtimestamp(found).isoformat(" ", "seconds")
        return f"since {found}" if found else ""

    def epoch(self) -> int:
        """Its epoch; 0 if it names none."""
        found = self.status.get("epoch")
        return found if isinstance(found, int) else 0


def ask(target: Target) -> Report:
    """One node's status; a node that does not answer within STATUS_TIMEOUT_S gives a report that says so."""
    url = _status_url(target)
    try:
        with target.access.open(url, timeout=STATUS_TIMEOUT_S) as answer:
            status = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Report(target, {}, f"tried {url}: {describe_failure(error, STATUS_TIMEOUT_S)}")
    return Report(target, status) if isinstance(status, dict) else Report(target, {}, f"tried {url}: the answer is not a status")


def begin_asking(target: Target) -> Future[Report]:
    """Asks a node, in a thread that nothing waits for: the look-up of a name has no limit."""
    answer: Future[Report] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(ask(target))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"asking {target.name}", daemon=True).start()
    return answer


def result_of(target: Target, answer: Future[Report]) -> Report:
    """What `begin_asking` has found by now."""
    return answer.result() if answer.done() else Report(target, {}, f"tried {_status_url(target)}: nothing within {STATUS_TIMEOUT_S:g} s")


def ask_all(targets: Sequence[Target]) -> list[Report]:
    """The status of every node, queried in parallel, in the order given, within STATUS_TIMEOUT_S."""
    answers = [begin_asking(target) for target in targets]
    wait(answers, STATUS_TIMEOUT_S)
    return [result_of(target, answer) for target, answer in zip(targets, answers)]


def describe_failure(error: Exception, limit_s: float) -> str:
    """Why a node did not answer. `limit_s`: the request's limit."""
    inner = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    if isinstance(inner, TimeoutError):
        return f"nothing within {limit_s:g} s"
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({inner.verify_message}): name who signs it with --ca, or in [tls] of the configuration"
    if isinstance(inner, http.client.HTTPException) and not isinstance(inner, OSError):
        return NOT_HTTP
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__).lower()


def _status_url(target: Target) -> str:
    return f"{target.http}/status"


def url_of_listener(listen: str, *, tls: bool) -> str:
    """The URL at which this machine reaches a sidecar that listens at "HOST:PORT"; one that listens on all addresses, on the machine's own."""
    host, _, port = listen.rpartition(":")
    own = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"http{'s' if tls else ''}://{own}:{port}"
