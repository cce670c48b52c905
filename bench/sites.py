"""P4: what another site costs the source: CPU time of its sidecar per entry and site, and the bytes in the send queue, for 1, 3 and 10 sites.

Rules:

- A group of one node transmits to groups of one node each. Entries are of 100 B, 100 a transaction, each for all sites.
- The cost of the sites is the CPU time of the source's sidecar while it sends, less that of a run in which no sink answers: that one is what the
  door and the log cost. The tenth site's cost is the slope between the two longest lists of sites.
- The bytes of the send queue are those of its segment files.
- Beside them, in runs of their own, shovels and federation. Shovels: a fanout exchange with a queue for each site, and a shovel from each queue to
  a broker of its own. Federation: such an exchange at the source, and one at each site that has it as its upstream. A message is an entry. The CPU
  time of the source's broker counts, less that of a run in which the messages stay in the source's queues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pika

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher

from .cost import cpu_of
from .measure import WAIT_S, Figure, Row, asking, note, until

GOAL_RATE = 300_000  # to three sites
GOAL_TENTH = 0.2
GOAL_BYTES = 1.1
ENTRY_BYTES = 100
PER_TRANSACTION = 100
CLIENT, EXCHANGE = "bench", "bench-fanout"


@dataclass(frozen=True)
class Plan:
    """How many sites, and entries in a run; what is measured beside the sessions."""

    sites: tuple[int, ...] = (1, 3, 10)
    entries: int = 300_000
    rivals: tuple[str, ...] = ("shovels", "federation")


SHORT = Plan((1, 3), 50_000, ())


def p4(brokers: list[str], plan: Plan) -> Row:
    """Each number of sites in a lab of its own."""
    runs: list[dict[str, Any]] = []
    figures: list[Figure] = []
    for broker in brokers:
        those = [_run(broker, count, plan.entries) for count in plan.sites]
        those += [_rival(broker, by, count, plan.entries // 10) for by in plan.rivals for count in plan.sites[:2]]
        runs += those
        figures += figures_of(broker, [run for run in those if run["by"] == "sessions"])
        figures += [Figure(f"{run['by']}_us_{run['sites']}", run["site_us"], variant=broker) for run in those if run["by"] in RIVALS]
    return Row("P4", figures, f"{plan.entries:,} entries of {ENTRY_BYTES} B, {PER_TRANSACTION} a transaction, to {plan.sites} sites", runs)


def figures_of(broker: str, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """The figures of a broker's runs, by ascending number of sites."""
    found = [Figure(f"site_us_{run['sites']}", run["site_us"], variant=broker, digits=3) for run in runs]
    found += [Figure("bytes", max(run["bytes"] for run in runs), GOAL_BYTES, variant=broker, digits=3)]
    found += [Figure("per_s_3", run["rate"], GOAL_RATE, least=True, variant=broker, digits=0) for run in runs if run["sites"] == 3]
    if len(runs) > 1:
        before, last = runs[-2], runs[-1]
        tenth = (last["all_us"] - before["all_us"]) / (last["sites"] - before["sites"])
        found.append(Figure("tenth", tenth / runs[0]["all_us"], GOAL_TENTH, variant=broker))
    return found


def _run(broker: str, count: int, entries: int) -> dict[str, Any]:
    names = [f"s{number}" for number in range(1, count + 1)]
    groups = {"east": 1} | dict.fromkeys(names, 1)
    with Lab(groups, broker=broker, sites={"east": names} | {name: [] for name in names}) as lab:
        sinks = [key for key, node in lab.nodes.items() if node.group != "east"]
        with Publisher([lab.nodes["e1"].door], "bench-app", CLIENT, confirm_timeout_s=WAIT_S) as publisher:
            publisher.on_full_sync(_complete)
            until("a whole snapshot everywhere", lambda: _in_step(lab, names), 5 * WAIT_S)
            _transmit(publisher, names, 5_000)
            until("the warm-up everywhere", lambda: _in_step(lab, names))
            for key in sinks:
                lab.kill(f"{key}.sidecar")
            alone = _measure(lab, lambda: _transmit(publisher, names, entries), entries)
            for key in sinks:
                lab.start(f"{key}.sidecar")
            until("all everywhere", lambda: _in_step(lab, names), 5 * WAIT_S)
            size = _send_queue_bytes(lab)

            def send() -> None:
                _transmit(publisher, names, entries)
                until("all everywhere", lambda: _in_step(lab, names), 5 * WAIT_S)

            live = _measure(lab, send, entries)
            size = _send_queue_bytes(lab) - size
    all_us = live["us"] - alone["us"]
    run = {"by": "sessions", "broker": broker, "sites": count, "all_us": all_us, "site_us": all_us / count, "rate": entries / live["s"]}
    run |= {"bytes": size / (entries * ENTRY_BYTES), "alone": alone, "live": live}
    note(f"P4 {run}")
    return run


def _complete(_: FullSyncRequest, context: FullSyncContext) -> None:
    context.complete()


def _transmit(publisher: Publisher, names: list[str], entries: int) -> None:
    for number in range(entries // PER_TRANSACTION):
        payload = f"{number:08d}".encode()
        publisher.transmit_log_entry_messages([(payload + row.to_bytes(ENTRY_BYTES - 8, "big"), names) for row in range(PER_TRANSACTION)])
    publisher.flush(WAIT_S)


def _measure(lab: Lab, act: Callable[[], None], entries: int) -> dict[str, Any]:
    """Seconds, and the CPU time of the source's sidecar per entry."""
    before, began = cpu_of(lab)["e1.sidecar"], time.monotonic()
    act()
    return {"s": time.monotonic() - began, "us": 1e6 * (cpu_of(lab)["e1.sidecar"] - before) / entries}


def _in_step(lab: Lab, names: list[str]) -> bool:
    """Whether each site has acked all that is in the view."""
    sessions = lab.status("e1")["sessions"]
    those = [sessions[name]["clients"].get(CLIENT, {}) for name in names]
    time.sleep(0.2)  # each look costs the sidecar some time
    return all(each.get("state") == "in_log_entry_sync" and each["in_flight_bytes"] == 0 and each["lag_entries"] == 0 for each in those)


def _send_queue_bytes(lab: Lab) -> int:
    files = [path for path in Path(lab.directory).rglob("*.segment") if "LRQ_Send_LogEntries" in str(path.parent) and "/e1/" in str(path)]
    if not files:
        raise LrqError(f"No segment of LRQ_Send_LogEntries is below {lab.directory}")
    return sum(path.stat().st_size for path in files)


def _shovels(lab: Lab, queues: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Definitions by node: a shovel from each of the source's queues to a target's."""
    source = lab.nodes["e1"].broker
    values = [
        {"vhost": "/", "component": "shovel", "name": queue, "value": {
            "src-protocol": "amqp091", "src-uri": source, "src-queue": queue, "dest-protocol": "amqp091", "dest-uri": target, "dest-queue": queue,
            "ack-mode": "on-confirm"}}
        for queue, target in queues.items()
    ]  # fmt: skip
    return {"e1": {"parameters": values}}


def _federation(lab: Lab, queues: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Definitions by node: each target's exchange gets the messages of the source's, whose own queues are gone."""
    source = lab.nodes["e1"].broker
    with pika.BlockingConnection(pika.URLParameters(source)) as connection:
        for queue in queues:
            connection.channel().queue_delete(queue)
    upstream = {"vhost": "/", "component": "federation-upstream", "name": "source", "value": {"uri": source, "ack-mode": "on-confirm"}}
    policy = {"vhost": "/", "name": "federated", "pattern": f"^{EXCHANGE}$", "apply-to": "exchanges", "priority": 0,
              "definition": {"federation-upstream-set": "all"}}  # fmt: skip
    return {name: {"parameters": [upstream], "policies": [policy]} for name in lab.nodes if name != "e1"}


#: What is measured beside the sessions: a plugin, and the definitions that let it bring messages from the source's exchange to the targets' queues.
RIVALS = {"shovels": ("rabbitmq_shovel", _shovels), "federation": ("rabbitmq_federation", _federation)}


def _rival(broker: str, by: str, count: int, messages: int) -> dict[str, Any]:
    plugin, define = RIVALS[by]
    with Lab({"east": 1, "west": count}, broker=broker, brokers_only=True, plugins=[plugin]) as lab:
        source, *targets = (node.broker for node in lab.nodes.values())
        queues = {f"to-{number}": target for number, target in enumerate(targets)}
        for queue, target in queues.items():
            for url in (source, target):
                _bound_queue(url, queue)
        alone = _sent(lab, source, messages, dict.fromkeys(queues, source))
        for queue in queues:
            with pika.BlockingConnection(pika.URLParameters(source)) as connection:
                connection.channel().queue_purge(queue)
        for name, definitions in define(lab, queues).items():
            path = lab.directory / f"{name}-definitions.json"  # a file of the user's alone: the addresses hold passwords
            path.write_text(json.dumps(definitions))
            lab.ctl(name, "import_definitions", str(path))
        _wait_for_links(source, queues)
        live = _sent(lab, source, messages, queues)
    all_us = live["us"] - alone["us"]
    run = {"by": by, "broker": broker, "sites": count, "all_us": all_us, "site_us": all_us / count, "rate": messages / live["s"]}
    note(f"P4 {run}")
    return run | {"alone": alone, "live": live}


def _wait_for_links(source: str, queues: dict[str, str]) -> None:
    """Returns when a message of the source's exchange comes to each target, and the targets' queues are empty again."""

    def come() -> bool:
        with pika.BlockingConnection(pika.URLParameters(source)) as connection:
            connection.channel().basic_publish(EXCHANGE, "", b"")
        time.sleep(1)
        found = []
        for queue, url in queues.items():
            with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                found.append(connection.channel().queue_purge(queue).method.message_count)
        return all(found)

    until("all links", come, 2 * WAIT_S)


def _has_come(arrived: Callable[[], int], messages: int) -> bool:
    return arrived() >= messages


def _bound_queue(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        channel.queue_bind(queue, EXCHANGE)


def _sent(lab: Lab, source: str, messages: int, arrive: dict[str, str]) -> dict[str, Any]:
    """Publishes, and waits until the queues have all. Seconds, and the CPU time of the source's broker per message."""
    before, began = cpu_of(lab)["e1.broker"], time.monotonic()
    with pika.BlockingConnection(pika.URLParameters(source)) as connection:
        channel = connection.channel()
        for _ in range(messages):
            channel.basic_publish(EXCHANGE, "", b"x" * ENTRY_BYTES, pika.BasicProperties(delivery_mode=2))
    for queue, url in arrive.items():
        with asking(url, queue) as arrived:
            until("all messages", partial(_has_come, arrived, messages), 5 * WAIT_S)
    return {"s": time.monotonic() - began, "us": 1e6 * (cpu_of(lab)["e1.broker"] - before) / messages}
