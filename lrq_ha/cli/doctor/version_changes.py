"""What differs between versions of RabbitMQ, and matters where the brokers of a group have different ones. No I/O.

Source: the release notes of RabbitMQ 3.12.0, 4.0.1 and 4.3.0, and trials with 3.10.8 and 4.3.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .facts import BrokerApi

Version = tuple[int, ...]
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def parse_version(text: str) -> Version:
    """A version as numbers; empty if it is none."""
    found = _NUMBERS.match(text)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True)
class VersionChange:
    """A difference between versions.

    Attributes:
        since: The first version with the new behaviour.
        text: The difference.
        todo: What an operator does before.
        uses: The objects of a broker that it concerns; None: they cannot be seen.
    """

    since: Version
    text: str
    todo: str
    uses: Callable[[BrokerApi], list[str]] | None = None


def _policies(*keys: str) -> Callable[[BrokerApi], list[str]]:
    def find(api: BrokerApi) -> list[str]:
        return [f"policy {each['name']} in {each['vhost']}" for each in api.policies if set(keys) & set(each.get("definition") or {})]

    return find


def _queues(holds: Callable[[Any], bool]) -> Callable[[BrokerApi], list[str]]:
    def find(api: BrokerApi) -> list[str]:
        return [f"queue {each['name']} in {each['vhost']}" for each in api.queues if holds(each)]

    return find


def _argument(queue: Any, name: str) -> Any:
    return (queue.get("arguments") or {}).get(name)


VERSION_CHANGES = (
    VersionChange((3, 12), "the mode `lazy` of classic queues has no effect", "nothing: remove it when it suits",
                  _policies("queue-mode")),
    VersionChange((4, 0), "mirrored classic queues do not exist", "delete the keys ha-… of the policies",
                  _policies("ha-mode", "ha-params", "ha-sync-mode")),
    VersionChange((4, 0), "quorum queues remove a message after 20 deliveries", "set delivery-limit for them, by a policy on all brokers",
                  _queues(lambda queue: queue.get("type") == "quorum" and _argument(queue, "x-delivery-limit") is None
                          and "delivery-limit" not in (queue.get("effective_policy_definition") or {}))),
    VersionChange((4, 0), "messages are 16 MiB at most, unless max_message_size says more", "set one max_message_size on all brokers"),
    VersionChange((4, 0), "AMQP 1.0 is part of the AMQP listener", "keep the listener on loopback"),
    VersionChange((4, 3), "queues that are neither durable nor exclusive are taken with a warning, and will be refused by a later version",
                  "declare them as durable",
                  _queues(lambda queue: not queue.get("durable") and not queue.get("exclusive"))),
    VersionChange((4, 3), "the arguments x-queue-version = 1 and x-queue-master-locator are refused", "declare the queues without them",
                  _queues(lambda queue: _argument(queue, "x-queue-version") == 1 or _argument(queue, "x-queue-master-locator") is not None)),
    VersionChange((4, 3), "basic.qos for a whole channel (global) counts for each consumer",
                  "let clients use the prefetch of consumers, or set deprecated_features.permit.global_qos = true on all brokers"),
    VersionChange((4, 3), "classic queues have no consumer_timeout", "let clients notice consumers that hang"),
)  # fmt: skip


def changes_between(one: str, other: str) -> list[VersionChange]:
    """The differences between two versions."""
    low, high = sorted((parse_version(one), parse_version(other)))
    return [change for change in VERSION_CHANGES if low < change.since <= high] if low else []
