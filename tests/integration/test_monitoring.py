"""What monitoring sees of real nodes: exact counts over a failover, and the probes of both nodes."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import pika
import pytest
from load import declare, eventually, in_sync, replace_primary, take_over, told
from prometheus import Prometheus, run_promtool
from prometheus_client.parser import text_string_to_metric_families as parse

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.one_version("4.3")]

PUBLISHED, CONSUMED = 1_000, 400
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
TIMEOUT_S = 60.0
ALERTS = Path(__file__).parents[2] / "docs" / "operations" / "monitoring" / "alerts.yml"


def scraped(lab: Lab, name: str) -> bytes:
    with OPEN(f"{lab.nodes[name].http}/metrics", timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


def sample(lab: Lab, node: str, name: str, **labels: str) -> float:
    """A sample of a node, by its name and the labels beside group and node."""
    wanted = {"group": "east", "node": node, **labels}
    [value] = [
        each.value for family in parse(scraped(lab, node).decode()) for each in family.samples if each.name == name and each.labels == wanted
    ]
    return float(value)


def messages(lab: Lab, node: str) -> tuple[float, float]:
    """Published and acknowledged, by a node's log."""
    return tuple(sample(lab, node, "lrq_log_messages_total", kind=kind) for kind in ("published", "acknowledged"))  # type: ignore[return-value]


def code(lab: Lab, node: str, path: str) -> int:
    try:
        with OPEN(lab.nodes[node].http + path, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code


def publish(door: str, queue: str, count: int) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(door))
    channel = connection.channel()
    for number in range(count):
        channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    connection.close()


def consume(door: str, queue: str, count: int) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(door))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=50)
    left = count
    for method, _, _ in channel.consume(queue):
        if method is not None:
            channel.basic_ack(method.delivery_tag)
            left -= 1
        if not left:
            break
    channel.cancel()
    connection.close()


@pytest.mark.quick
def test_exact_counts_over_a_failover(pair: Lab) -> None:
    """1,000 published, 400 consumed, the primary killed, the backup promoted, the others consumed."""
    primary, backup = in_sync(pair, applied=True)
    queue = f"counted-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue, queue_type="quorum")
    before = {node: messages(pair, node) for node in (primary, backup)}
    opened = sample(pair, primary, "lrq_connections_opened_total")
    promotions = sample(pair, backup, "lrq_promotions_total")
    door = pair.nodes[primary].door
    publish(door, queue, PUBLISHED)  # without confirms: the consumer waits for the first messages, the counts for all
    consume(door, queue, CONSUMED)

    def grown(node: str) -> tuple[float, float]:
        published, acknowledged = messages(pair, node)
        return published - before[node][0], acknowledged - before[node][1]

    for node in (primary, backup):
        eventually(f"the counts of {node}", lambda node=node: grown(node) == (PUBLISHED, CONSUMED), seen=lambda node=node: grown(node))
    assert sample(pair, primary, "lrq_connections_opened_total") - opened == 2
    assert (sample(pair, primary, "lrq_node_primary"), sample(pair, backup, "lrq_node_primary")) == (1, 0)
    assert sample(pair, primary, "lrq_in_sync_nodes") == 2
    assert sample(pair, primary, "lrq_safe_seconds_count") > 0
    assert [code(pair, node, "/primary") for node in (primary, backup)] == [200, 503]
    assert [code(pair, node, "/replica?lag=1000") for node in (primary, backup)] == [503, 200]

    replace_primary(pair, primary, backup)
    try:
        assert sample(pair, backup, "lrq_promotions_total") - promotions >= 1
        assert sample(pair, backup, "lrq_promotion_duration_seconds_count", step="queues") >= 1
        assert sample(pair, backup, "lrq_node_role", role="active") == 1
        assert sample(pair, backup, "lrq_node_epoch") == told(pair, backup)["epoch"]
        assert code(pair, backup, "/primary") == 200
        consume(pair.nodes[backup].door, queue, PUBLISHED - CONSUMED)
        eventually("the counts over the failover", lambda: grown(backup) == (PUBLISHED, PUBLISHED), seen=lambda: grown(backup))
    finally:
        pair.start(primary)


@pytest.mark.full
def test_promtool_finds_no_fault_in_what_real_nodes_say(pair: Lab) -> None:
    for node in pair.nodes:
        eventually(f"{node} to run", lambda node=node: told(pair, node)["role"] in ("active", "ready"))
        assert run_promtool("check", "metrics", given=scraped(pair, node)) == (0, "")


@pytest.mark.full
def test_a_backup_that_is_taken_out_of_the_set_is_counted(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    removals = sample(pair, primary, "lrq_peer_removals_total", peer=backup)
    pair.kill(backup)
    try:
        eventually(f"{backup} to be out", lambda: sample(pair, primary, "lrq_in_sync_nodes") == 1)
        assert sample(pair, primary, "lrq_peer_removals_total", peer=backup) == removals + 1
        assert sample(pair, primary, "lrq_peer_in_sync", peer=backup) == sample(pair, primary, "lrq_peer_connected", peer=backup) == 0
    finally:
        pair.start(backup)
    assert in_sync(pair) == (primary, backup)
    assert sample(pair, primary, "lrq_peer_in_sync", peer=backup) == 1
    assert sample(pair, primary, "lrq_peer_removals_total", peer=backup) == removals + 1, "its return is none"


@pytest.mark.full
def test_a_real_prometheus_alerts_when_the_primary_is_lost(pair: Lab, tmp_path: Path) -> None:
    """It takes each value; the alert waits, then fires, and ends with the promotion."""
    primary, backup = in_sync(pair)
    east = [node for node in pair.nodes.values() if node.group == "east"]
    with Prometheus(tmp_path, ALERTS, [node.http.removeprefix("http://") for node in east]) as prometheus:
        eventually("both nodes to be scraped", lambda: [target["health"] for target in prometheus.ask("targets")["activeTargets"]] == ["up"] * 2)
        eventually("their values", lambda: len(prometheus.ask("query?query=lrq_log_end_sequence")["result"]) == 2)
        states: list[str | None] = []
        eventually("no alert", lambda: "LrqNoPrimary" not in prometheus.alerts(), seen=prometheus.alerts)  # that of before the first scrape ends
        pair.kill(primary)
        try:

            def fires() -> bool:
                state = prometheus.alerts().get("LrqNoPrimary")
                if [state] != states[-1:]:
                    states.append(state)
                return state == "firing"

            eventually("the alert to fire", fires, seen=lambda: states)
            assert states[-2:] == ["pending", "firing"]
            take_over(pair, backup, primary)
            eventually("the alert to end", lambda: "LrqNoPrimary" not in prometheus.alerts())
            eventually("the failover to be told", lambda: prometheus.alerts().get("LrqFailoverHappened") == "firing", seen=prometheus.alerts)
        finally:
            pair.start(primary)
