"""GET /metrics: names, types and labels of the families, their values, and the form that Prometheus reads."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock
from urllib.error import HTTPError
from urllib.request import Request

import pytest
import uvloop
from node_config import MINIMAL
from prometheus import run_promtool
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from served_node import TIMEOUT_S, call

from broker_plugin.amqp.tls import client_files
from broker_plugin.log import codec
from lrq_ha.direct_http import HttpAccess
from lrq_ha.errors import LrqError
from lrq_ha.lab.certificates import Authority
from lrq_ha.lab.ports import free_ports
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.leader import Stage
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.positions import epoch_number
from lrq_ha.replication.retention import RECORD_BYTES
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.counts import CONFIRM_BOUNDS_S, BatchTimes, Counts
from lrq_ha.sidecar.http import metrics
from lrq_ha.sidecar.http.metrics import FAMILIES, Metrics
from lrq_ha.sidecar.incarnation import Incarnation, Kept
from lrq_ha.sidecar.process import Process

DOC = Path(__file__).parents[2] / "docs" / "operations" / "monitoring.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def in_process(body: Callable[[Process], None], *, runs: bool = True) -> None:
    """With a process of node e1, which leads e2 in epoch 1.1 if an incarnation runs, and has a log of 100 entries of 1,000 bytes."""

    async def go() -> None:
        process = Process(configuration.Config.model_validate(tomllib.loads(configuration.sample())))
        if runs:
            incarnation = process.incarnation = Incarnation(process.config, process.door, process._kept)
            incarnation._core.ready = True
            node = incarnation._node
            node.leading = epoch = epoch_number(1, 1)
            for number in range(1, 101):
                sets = ((1, frozenset({1, 2})),) if number == 1 else ()
                node.log.accept(BatchHeader(epoch, number, number, epoch if number > 1 else 0, epoch, sets))
                incarnation._log.watch.appended(number, 1000 - RECORD_BYTES)
            node._leader._stage = Stage.SERVING
        body(process)
        if process.incarnation:
            await process.incarnation.definitions.close()

    asyncio.run(go())


def scraped(process: Process, accept: str = "") -> dict[str, Metric]:
    text, _ = Metrics(process.scrape).render(accept)
    found = list((parse_openmetrics if accept else parse)(text.decode()))
    assert len({metric.name for metric in found}) == len(found)
    return {metric.name: metric for metric in found}


def values(metric: Metric) -> dict[tuple[str, ...], float]:
    """By the labels beside group and node."""
    for sample in metric.samples:
        assert (sample.labels["group"], sample.labels["node"]) == ("east", "e1")
    return {tuple(value for label, value in sample.labels.items() if label not in ("group", "node")): sample.value for sample in metric.samples}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@pytest.mark.parametrize("runs", [True, False])
def test_every_family_is_what_its_row_says(runs: bool, accept: str) -> None:
    def check(process: Process) -> None:
        found = scraped(process, accept)
        for family in FAMILIES:
            metric = found[family.name.removesuffix("_total") if accept or family.kind == "counter" else family.name]
            assert (metric.type, metric.documentation) == (family.kind, family.help)
            assert (family.kind == "counter") is family.name.endswith("_total")
            for sample in metric.samples:
                assert set(sample.labels) - {"le"} == {"group", "node", *family.labels}
        assert "process_resident_memory_bytes" in found

    in_process(check, runs=runs)


def test_names_are_of_one_form() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("lrq_") for name in names)


def test_the_table_in_the_documentation() -> None:
    assert metrics.documented() in DOC.read_text("utf-8"), "copy it from lrq_ha.sidecar.http.metrics.documented()"


def test_values_of_a_primary() -> None:
    def check(process: Process) -> None:
        process.door.counters.update({"connections": 7, "turned_away": 2, "refused_after_confirm": 3})
        session = Mock(channels={n: SimpleNamespace(consumers=dict.fromkeys(range(n))) for n in (1, 2)})
        process.door.sessions.add(session)
        found = scraped(process)
        expected: dict[str, dict[tuple[str, ...], float]] = {
            "lrq_configured_nodes": {(): 2},
            "lrq_in_sync_nodes": {(): 2},
            "lrq_node_epoch": {(): 0x101},
            "lrq_node_primary": {(): 1},
            "lrq_log_end_sequence": {(): 100},
            "lrq_log_max_bytes": {(): 8 << 30},
            "lrq_peer_in_sync": {("e2",): 1},
            "lrq_peer_connected": {("e2",): 0},
            "lrq_connections_opened": {(): 7},
            "lrq_connections_refused": {("refused",): 0, ("no_room",): 2},
            "lrq_messages_refused_after_confirm": {(): 3},
            "lrq_channels": {(): 2},
            "lrq_consumers": {(): 3},
            "lrq_broker_up": {(): 1},
            "lrq_broker_alarm": {(): 0},
            "lrq_site_connected": {("west",): 0},
        }
        assert {name: values(found[name]) for name in expected} == expected
        process.door.log_blocked = "low on disk"
        assert values(scraped(process)["lrq_broker_alarm"]) == {(): 1}

    in_process(check)


def test_values_of_definitions_and_coordination(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = configuration.sample().replace('coordination = "static"', 'coordination = "etcd"')
    text = re.sub(r"^replicate = \[\]", 'replicate = ["users"]', sample, flags=re.MULTILINE)
    text += '[coordination]\nendpoints = ["http://127.0.0.1:1"]\n'

    def check(process: Process) -> None:
        found = scraped(process)
        assert values(found["lrq_coordination_up"]) == values(found["lrq_lease_remaining_seconds"]) == {(): 0}
        assert values(found["lrq_definitions_up"]) == {(): 1}
        assert values(found["lrq_definitions_differing_objects"]) == {(): 0}

    monkeypatch.setattr(configuration, "sample", lambda: text)
    in_process(check)


def test_a_node_that_does_not_run_has_its_counters_and_no_values_of_the_log() -> None:
    def check(process: Process) -> None:
        found = scraped(process)
        assert values(found["lrq_node_role"])[("standalone",)] == 1
        assert sum(values(found["lrq_node_role"]).values()) == 1
        assert values(found["lrq_node_primary"]) == values(found["lrq_broker_up"]) == {(): 0}
        assert values(found["lrq_log_batches"]) == {(): 0}
        absent = ("log_end_sequence", "broker_alarm", "in_sync_nodes", "peer_connected", "coordination_up", "definitions_up")
        assert [values(found[f"lrq_{name}"]) for name in absent] == [{}] * len(absent)

    in_process(check, runs=False)


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.full
def test_promtool_finds_no_fault(runs: bool) -> None:
    def check(process: Process) -> None:
        text, _ = Metrics(process.scrape).render("")
        assert run_promtool("check", "metrics", given=text) == (0, "")

    in_process(check, runs=runs)


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_messages_of_a_batch() -> None:
    """Own and pushed batches count alike."""
    enqueues = pb.Run(enqueues=pb.Enqueues(lengths=[3, 4]))
    dequeue = pb.Run(dequeue=pb.Dequeue(sequences=[1, 4, 9, 9]))
    reject = pb.Run(reject=pb.Dequeue(sequences=[5, 6]))
    purge = pb.Run(purge=pb.Purge())
    for published in (codec.Publishes(enqueues, [b"abc", b"defg"]), enqueues):
        counts = Counts()
        counts.batch_written(5, 100, [published, dequeue, reject, purge])
        counts.batch_written(1, 30, [dequeue])
        assert (counts.batches, counts.bytes) == (2, 130)
        assert counts.entries == {"enqueues": 2, "dequeue": 2, "reject": 1, "purge": 1}
        assert counts.messages == {"published": 2, "acknowledged": 10, "rejected": 2}


def test_the_times_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lrq_ha.sidecar.counts.time.monotonic", lambda: now[0])
    counts = Counts()
    times = BatchTimes(counts)
    times.written(3)
    times.written()  # a FENCE, or a batch of another leader
    times.written(5)
    times.written(9)
    now[0] = 0.02
    times.confirmed(2)
    times.safe_advanced(4)
    now[0] = 0.3
    times.cut(8)
    times.confirmed(2)
    times.safe_advanced(9)

    def seen(histogram: Any) -> list[float]:
        bounds = [*CONFIRM_BOUNDS_S, float("inf")]
        return [bound for bound, count in zip(bounds, histogram.buckets) for _ in range(count)]

    assert seen(counts.own_confirm) == [0.025, 0.5, 0.5]
    assert seen(counts.safe) == [0.025, 0.5], "what was cut never became safe"
    assert round(counts.safe.sum_s, 6) == 0.32


def test_no_counter_goes_back_when_an_incarnation_ends(tmp_path: Path) -> None:
    """A restart of the sidecar's own would look like a restart of its process."""

    class Brief:
        ready = False

        def __init__(self, _config: object, _door: object, before: Kept, _coordination: object) -> None:
            before.counts.batch_written(1, 10, [])
            self.kept = Kept(counts=before.counts)

        async def run(self) -> str:
            lives[0] += 1
            if lives[0] % 2:
                return "the connection is lost"
            raise LrqError("the broker cannot be reached")

    lives = [0]

    async def go() -> None:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL)
        process = Process(configuration.load(file))
        running = asyncio.create_task(process._lives())
        async with asyncio.timeout(TIMEOUT_S):
            while lives[0] < 4:
                await asyncio.sleep(0.01)
        running.cancel()
        found = scraped(process)
        assert values(found["lrq_log_batches"]) == {(): lives[0]}
        assert values(found["lrq_incarnations"]) == {("ended",): 2, ("refused",): 2, ("failed",): 0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrq_ha.sidecar.process.Incarnation", Brief)
        asyncio.run(go())


def test_what_an_incarnation_leaves_to_the_next_has_the_counts() -> None:
    def check(process: Process) -> None:
        assert cast(Incarnation, process.incarnation).kept.counts is process._counts

    in_process(check)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_a_process_serves_as_its_configuration_says(tmp_path: Path) -> None:
    """Metrics at both addresses, TLS at the one, and commands with the token only."""
    ports = free_ports()
    authority = Authority(tmp_path)
    authority.issue("http")
    main, probes = next(ports), next(ports)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL.replace("8080", str(main)) + f'token_file = "token"\nprobes = "127.0.0.1:{probes}"\n'
                    '[http.tls]\ncertificate = "http.pem"\nkey = "http.key"\n')
    access = HttpAccess("0123456789abcdef", client_files(str(authority.ca), "", "", "1.2").context)
    pause = Request(f"https://127.0.0.1:{main}/pause", b'{"paused": true}', {"Content-Type": "application/json"})

    def refused(*, authorized: bool) -> int:
        with pytest.raises(HTTPError) as refusal:
            access.open(pause, TIMEOUT_S, authorized=authorized)
        refusal.value.close()
        return refusal.value.code

    def asked() -> None:
        for address in (f"https://127.0.0.1:{main}", f"http://127.0.0.1:{probes}"):
            with access.open(Request(f"{address}/metrics", headers={"Accept": OPENMETRICS}), TIMEOUT_S) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
                text = answer.read().decode()
                assert 'lrq_node_primary{group="east",node="e1"} 0.0' in text
                assert 'lrq_tls_certificate_expiry_timestamp_seconds{group="east",listener="http",node="e1"}' in text
        assert refused(authorized=False) == 401
        assert refused(authorized=True) == 409, "it is not running"
        assert call(f"http://127.0.0.1:{probes}/pause", b'{"paused": true}', Authorization="Bearer 0123456789abcdef")[0] == 404

    async def go() -> None:
        process = Process(configuration.load(file))
        await process._http.start()
        try:
            await asyncio.to_thread(asked)
        finally:
            await process._http.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a sidecar's
        runner.run(go())
