"""GET /metrics: the families of metrics, as data, and their collector.

A new metric is one more row of FAMILIES; the table in docs/operations/monitoring.md is made from it.

Rules:

- Everything is read at a scrape: the node's status, and counts that are kept anyway. Nothing is added up for a single message.
- A counter never goes back in a process's life, whatever becomes of its incarnations.
- Every sample has the labels `group` and `node`. No label holds the name of a queue, a connection or a user.
- A value that is not known has no sample.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from broker_plugin.log import codec
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.roles import Role
from lrq_ha.routing.tables import State

from ..counts import Counts, Histogram

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Scrape:
    """The values that one scrape reads.

    Attributes:
        status: As GET /status.
        counts: Of the process.
        peers: Names of the other nodes that are configured.
        log_bytes_max: Size of the log.
        expiries: When the certificates of the listeners with TLS expire, Unix time.
        channels, consumers: Of clients.
        unfinished_bytes, client_bytes: Memory of the door: messages of which a part has arrived; bytes for clients that do not keep up.
    """

    status: Mapping[str, Any]
    counts: Counts
    peers: Sequence[str]
    log_bytes_max: int
    expiries: Mapping[str, float]
    channels: int
    consumers: int
    unfinished_bytes: int
    client_bytes: int


Sample = tuple[tuple[str, ...], float | Histogram]


@dataclass(frozen=True)
class Family:
    """One family of metrics.

    Attributes:
        name: Its name; a counter's ends with _total.
        kind: Its type.
        help: Its meaning.
        read: Its samples: values of `labels`, and the value.
        labels: Beside `group` and `node`.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[[Scrape], Iterable[Sample]]
    labels: tuple[str, ...] = ()


# ---- ways to read ----------------------------------------------------------------------------------------------------


def _one(value: Callable[[Scrape], float | Histogram | None]) -> Callable[[Scrape], Iterator[Sample]]:
    """One sample, unless the value is not known."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        if (found := value(scrape)) is not None:
            yield (), found

    return read


def _status(key: str) -> Callable[[Scrape], Iterator[Sample]]:
    """A key of the status."""
    return _one(lambda scrape: scrape.status.get(key))


def _broker(value: Callable[[Mapping[str, Any]], float]) -> Callable[[Scrape], Iterator[Sample]]:
    """Of the status of the broker, while an incarnation runs."""
    return _one(lambda scrape: value(scrape.status["broker"]) if "broker" in scrape.status else None)


def _table(key: str, value: Callable[[Mapping[str, Any]], float]) -> Callable[[Scrape], Iterator[Sample]]:
    """Of a table in the status that is there where it is configured."""
    return _one(lambda scrape: value(told) if (told := scrape.status.get(key)) else None)


def _each(values: Callable[[Scrape], Mapping[str, Any]]) -> Callable[[Scrape], Iterator[Sample]]:
    """A sample for each value of one label."""
    return lambda scrape: (((label,), value) for label, value in values(scrape).items())


def _peers(value: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Scrape], Iterator[Sample]]:
    """A sample for each other node whose value is known."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for name, peer in (scrape.status.get("peers") or {}).items():
            if (found := value(peer)) is not None:
                yield (name,), found

    return read


def _sites(scrape: Scrape) -> Mapping[str, Mapping[str, Any]]:
    """The sites by name, at the primary; sessions run nowhere else."""
    return scrape.status["sessions"] if scrape.status.get("serving") else {}


def _sessions(value: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Scrape], Iterator[Sample]]:
    """A sample for each site and client whose value is known."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for site, told in _sites(scrape).items():
            for client, session in told["clients"].items():
                if (found := value(session)) is not None:
                    yield (site, client), found

    return read


def _session_states(scrape: Scrape) -> Iterator[Sample]:
    for site, told in _sites(scrape).items():
        found = Counter(session["state"] for session in told["clients"].values())
        for state in State:
            yield (site, state.name.lower()), found[state.name.lower()]


def _door(**keys: str) -> Callable[[Scrape], Iterator[Sample]]:
    """Counters of the door by the value of a label."""
    return lambda scrape: (((label,), scrape.status["counters"].get(key, 0)) for label, key in keys.items())


def _door_counter(key: str) -> Callable[[Scrape], Iterator[Sample]]:
    return _one(lambda scrape: scrape.status["counters"].get(key, 0))


def _identity(scrape: Scrape) -> Iterator[Sample]:
    status = scrape.status
    broker = (status.get("broker") or {}).get("version", "")
    yield (str(status.get("software", "")), str(codec.PROTOCOL), str(broker), platform.python_version()), 1


def _roles(scrape: Scrape) -> Iterator[Sample]:
    return (((role.value,), scrape.status["role"] == role.value) for role in Role)


def _in_sync_peers(scrape: Scrape) -> Iterator[Sample]:
    if scrape.status.get("serving"):
        for name in scrape.status["peers"]:
            yield (name,), name in scrape.status["members"]


_KINDS = tuple(field.name for field in pb.Run.DESCRIPTOR.oneofs_by_name["kind"].fields)

FAMILIES = (
    # the process
    Family(
        "lrq_identity_info", "gauge", "Versions of the sidecar, its protocol, the broker and Python; always 1", _identity,
        ("version", "protocol", "broker_version", "python"),
    ),
    Family("lrq_start_timestamp_seconds", "gauge", "Unix time at which the sidecar started", _one(lambda s: s.counts.started_at)),
    Family(
        "lrq_incarnations_total", "counter", "Incarnations that are over: ended; refused: could not start; failed: by an internal error",
        _each(lambda s: {reason: s.counts.incarnations[reason] for reason in ("ended", "refused", "failed")}), ("reason",),
    ),
    Family(
        "lrq_tls_certificate_expiry_timestamp_seconds", "gauge", "Unix time at which a certificate of door or http expires; 0: it has expired",
        _each(lambda s: s.expiries), ("listener",),
    ),
    # role and set
    Family("lrq_node_role", "gauge", "1 for the role that the node has, 0 for the others", _roles, ("role",)),
    Family("lrq_node_primary", "gauge", "1 if the node is primary and its door is open", _one(lambda s: bool(s.status.get("serving")))),
    Family("lrq_node_epoch", "gauge", "Epoch that the node leads or follows: 256 times its number, and the leader's id", _status("epoch")),
    Family(
        "lrq_in_sync_nodes", "gauge", "Nodes of the in-sync set, by this primary",
        _one(lambda s: len(s.status["members"]) if s.status.get("serving") else None),
    ),
    Family("lrq_configured_nodes", "gauge", "Nodes that are configured, this one included", _one(lambda s: len(s.peers) + 1)),
    Family("lrq_paused", "gauge", "1 if an operator has paused the node", _one(lambda s: bool(s.status.get("paused")))),
    Family("lrq_last_role_change_timestamp_seconds", "gauge", "Unix time since when the node has its role", _status("since")),
    Family("lrq_promotions_total", "counter", "Epochs that this node has taken, up to the open door", _one(lambda s: s.counts.promotions)),
    Family(
        "lrq_promotion_duration_seconds", "histogram", "Time of the steps of a promotion", _each(lambda s: s.counts.promotion_steps), ("step",)
    ),
    # the log
    Family("lrq_log_end_sequence", "gauge", "Last entry of the node's log", _status("end")),
    Family("lrq_log_safe_sequence", "gauge", "Everything up to this entry is on each in-sync node", _status("safe")),
    Family("lrq_log_applied_sequence", "gauge", "Everything up to this entry is in the broker's queues", _status("applied")),
    Family("lrq_log_max_bytes", "gauge", "Size of the log beyond which the broker drops its beginning", _one(lambda s: s.log_bytes_max)),
    Family("lrq_log_bytes_written_total", "counter", "Bytes of batches that were written to the log", _one(lambda s: s.counts.bytes)),
    Family("lrq_log_batches_total", "counter", "Batches that were written to the log", _one(lambda s: s.counts.batches)),
    Family(
        "lrq_log_entries_total", "counter", "Entries that were written to the log",
        _each(lambda s: {kind: s.counts.entries[kind] for kind in _KINDS}), ("kind",),
    ),
    Family(
        "lrq_log_messages_total", "counter", "Messages of these entries: published, or, once for each queue, acknowledged or rejected by clients",
        _each(lambda s: {k: s.counts.messages[k] for k in ("published", "acknowledged", "rejected")}), ("kind",),
    ),
    Family(
        "lrq_own_stream_confirm_seconds", "histogram", "Time from the write of a batch of this primary to its broker's confirm",
        _one(lambda s: s.counts.own_confirm),
    ),
    Family(
        "lrq_safe_seconds", "histogram", "Time from the write of a batch of this primary until each in-sync node has it",
        _one(lambda s: s.counts.safe),
    ),
    Family("lrq_unsafe_bytes", "gauge", "Bytes of publishes that are not safe yet", _status("unsafe_bytes")),
    Family("lrq_at_stake_entries", "gauge", "Publishes that are confirmed, and not on all in-sync backups", _status("at_stake_entries")),
    Family("lrq_at_stake_bytes", "gauge", "Bytes of these publishes", _status("at_stake_bytes")),
    Family("lrq_to_apply_bytes", "gauge", "Bytes that wait to be written to the queues", _status("to_apply_bytes")),
    Family("lrq_log_memory_bytes", "gauge", "Bytes of the log's newest batches in memory", _status("memory_bytes")),
    Family("lrq_checkpoint_bytes", "gauge", "Size of the last checkpoint that this primary made", _status("checkpoint_bytes")),
    Family("lrq_applied_record_bytes", "gauge", "Size of the last applied record", _status("applied_record_bytes")),
    # other nodes
    Family("lrq_peer_connected", "gauge", "1 if both connections with the other node stand", _peers(lambda peer: peer["connected"]), ("peer",)),
    Family("lrq_peer_in_sync", "gauge", "1 if the other node is in the in-sync set, by this primary", _in_sync_peers, ("peer",)),
    Family("lrq_peer_lag_entries", "gauge", "Entries that it lacks of this primary's log", _peers(lambda peer: peer["lag_entries"]), ("peer",)),
    Family("lrq_peer_lag_bytes", "gauge", "Bytes that it lacks of this primary's log", _peers(lambda peer: peer["lag_bytes"]), ("peer",)),
    Family(
        "lrq_peer_lag_seconds", "gauge", "Seconds since this primary's log was no longer than what it has",
        _peers(lambda peer: peer["lag_seconds"]), ("peer",),
    ),
    Family(
        "lrq_peer_apply_lag_entries", "gauge", "Entries that are not in its queues yet", _peers(lambda peer: peer["apply_lag_entries"]), ("peer",)
    ),
    Family(
        "lrq_peer_log_left_bytes", "gauge", "Bytes until the broker drops what it needs next", _peers(lambda peer: peer["log_bytes_left"]), ("peer",)
    ),
    Family(
        "lrq_peer_removals_total", "counter", "Times that this node, as primary, took the other out of the in-sync set",
        _each(lambda s: {peer: s.counts.removals[peer] for peer in s.peers}), ("peer",),
    ),
    # the door
    Family("lrq_connections", "gauge", "Clients' connections", _status("connections")),
    Family("lrq_relayed_connections", "gauge", "Clients' connections that this backup relays to the primary", _status("relayed")),
    Family("lrq_channels", "gauge", "Clients' channels", _one(lambda s: s.channels)),
    Family("lrq_consumers", "gauge", "Clients' consumers", _one(lambda s: s.consumers)),
    Family("lrq_connections_opened_total", "counter", "Clients' connections that were opened", _door_counter("connections")),
    Family(
        "lrq_connections_refused_total", "counter", "Connections that were refused: not served or not logged in; no_room: door.connections_max",
        _door(refused="refused_connections", no_room="turned_away"), ("reason",),
    ),
    Family(
        "lrq_connections_closed_total", "counter", "Clients' connections that the door closed: slow: they did not read; error: of protocol or limit",
        _door(slow="closed_slow", error="client_errors"), ("reason",),
    ),
    Family("lrq_messages_repeated_total", "counter", "Publishes that the log had already, by their replication IDs", _door_counter("repeats")),
    Family("lrq_messages_filtered_total", "counter", "Deliveries that were not given out", _door_counter("filtered")),
    Family("lrq_publishes_refused_total", "counter", "Publishes that were refused", _door_counter("refused_publishes")),
    Family(
        "lrq_messages_refused_after_confirm_total", "counter", "Messages that a queue refused after their confirm: they are lost",
        _door_counter("refused_after_confirm"),
    ),
    Family(
        "lrq_door_buffer_bytes", "gauge", "Memory of the door: unfinished: messages of which a part has come; clients: for those that do not keep up",
        lambda s: [(("unfinished",), s.unfinished_bytes), (("clients",), s.client_bytes)], ("which",),
    ),
    Family(
        "lrq_interceptor_dropped_total", "counter", "Events that an interceptor was not told",
        _each(lambda s: {name: told["dropped"] for name, told in s.status["interceptors"].items()}), ("interceptor",),
    ),
    # the broker
    Family("lrq_broker_up", "gauge", "1 if an incarnation runs beside the broker", _one(lambda s: "broker" in s.status)),
    Family("lrq_broker_alarm", "gauge", "1 if the broker takes nothing for the log because of an alarm", _broker(lambda told: bool(told["alarm"]))),
    Family(
        "lrq_broker_progress_age_seconds", "gauge", "Seconds that the broker has confirmed no write to the log while one waits",
        _broker(lambda told: float(told["silent_s"])),
    ),
    Family("lrq_broker_lacks", "gauge", "1 if the broker lacks something that the log needs", _one(lambda s: bool(s.status.get("lacks")))),
    # definitions and coordination, where they are configured
    Family(
        "lrq_definitions_up", "gauge", "1 if the broker's management API takes part in replicating definitions",
        _table("definitions", lambda told: not told["problem"]),
    ),
    Family(
        "lrq_definitions_differing_objects", "gauge", "Users, policies and so on in which a backup's broker differs from the log",
        _table("definitions", lambda told: told["differing"]),
    ),
    Family("lrq_coordination_up", "gauge", "1 if etcd answers", _table("coordination", lambda told: told["etcd"] == "answers")),
    Family(
        "lrq_lease_remaining_seconds", "gauge", "Seconds that are left of this node's lease in etcd; 0: it has none",
        _table("coordination", lambda told: told["lease_remaining_s"]),
    ),
    # sites
    Family(
        "lrq_site_connected", "gauge", "1 if the site is connected, by this primary",
        _each(lambda s: {site: told["connected"] for site, told in _sites(s).items()}), ("site",),
    ),
    Family("lrq_site_sessions", "gauge", "Sessions, one for each client, by their state", _session_states, ("site", "state")),
    Family("lrq_site_lag_entries", "gauge", "Entries that the site may lack", _sessions(lambda told: told["lag_entries"]), ("site", "client")),
    Family(
        "lrq_site_lag_seconds", "gauge", "Seconds since the log was no longer than what the site has",
        _sessions(lambda told: told["lag_seconds"]), ("site", "client"),
    ),
    Family(
        "lrq_site_log_left_bytes", "gauge", "Bytes until the broker drops what the site needs next",
        _sessions(lambda told: told["bytes_left"]), ("site", "client"),
    ),
)  # fmt: skip


# ---- the collector ---------------------------------------------------------------------------------------------------


class NodeCollector(Collector):
    """Collects the families of a node.

    Args:
        scrape: Reads the values.
    """

    def __init__(self, scrape: Callable[[], Scrape]) -> None:
        self._scrape = scrape

    def describe(self) -> Iterable[Metric]:
        """Nothing: the values are not read before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One metric for each family."""
        scrape = self._scrape()
        fixed = [str(scrape.status["group"]), str(scrape.status["node"])]
        for family in FAMILIES:
            metric = _new_metric(family)
            for values, value in family.read(scrape):
                labels = [*fixed, *values]
                if isinstance(value, Histogram):
                    bounds = [*map(str, value.bounds), "+Inf"]
                    metric.add_metric(labels, buckets=list(zip(bounds, accumulate(value.buckets))), sum_value=value.sum_s)
                else:
                    metric.add_metric(labels, float(value))
            yield metric


def _new_metric(family: Family) -> Any:
    made: dict[Kind, type] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    return made[family.kind](family.name, family.help, labels=["group", "node", *family.labels])


class Metrics:
    """The content of GET /metrics.

    Args:
        scrape: Reads the values.
    """

    def __init__(self, scrape: Callable[[], Scrape]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(scrape))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text, and its content type. `accept`: the value of a scraper's header Accept: OpenMetrics, if it says so."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def documented() -> str:
    """The table for docs/operations/monitoring.md."""
    rows = [f"| `{family.name}` | {', '.join(f'`{label}`' for label in family.labels)} | {family.kind}: {family.help} |" for family in FAMILIES]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows]) + "\n"
