"""The checks of the own broker, as data. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

from broker_plugin.amqp import sasl
from broker_plugin.log.streams import segment_bytes
from lrq_ha.overview.text import format_size, name_some
from lrq_ha.routing.names import LOG_PREFIX, ROUTING_VHOST
from lrq_ha.sidecar.config import is_loopback

from .check import Check, Finding, Level, fail, warn
from .facts import Broker, BrokerApi, Facts, Unread
from .version_changes import parse_version

OLDEST, NEWEST = (3, 10), (4, 3)
#: Before, each listener for HTTP is listed with the address ::, whatever it is (rabbitmq-server #8242).
TELLS_WEB_ADDRESSES = (3, 12)
#: The plugin whose listener a protocol has.
_PLUGINS = {
    "mqtt": "rabbitmq_mqtt", "stomp": "rabbitmq_stomp", "stream": "rabbitmq_stream", "http/web-mqtt": "rabbitmq_web_mqtt",
    "http/web-stomp": "rabbitmq_web_stomp",
}  # fmt: skip
_SETTINGS = {"amqp": "listeners.tcp.1 = 127.0.0.1:{port}", "amqp/ssl": "listeners.ssl.1 = 127.0.0.1:{port}", "http": "management.tcp.ip = 127.0.0.1",
             "https": "management.ssl.ip = 127.0.0.1"}  # fmt: skip
#: Keys of policies that remove or move messages, which a sidecar sees as arguments only: docs/limitations.md.
_UNSEEN = frozenset({"expires", "message-ttl", "max-length", "max-length-bytes", "overflow", "dead-letter-exchange", "delayed-retry-type"})
_UNSEEN_BEFORE_4 = _UNSEEN | {"delivery-limit"}
#: Protocols by which nothing is published: between brokers, and for Prometheus.
_HARMLESS = frozenset({"clustering", "http/prometheus", "https/prometheus"})


# ---- over AMQP -------------------------------------------------------------------------------------------------------


def _check_broker(facts: Facts, _: Facts) -> Iterator[Finding]:
    if isinstance(facts.broker, Unread):
        yield fail(facts.broker.why, command=facts.broker.command)


def _check_version(broker: Broker, _: Facts) -> Iterator[Finding]:
    found = parse_version(broker.version)
    if found and found < OLDEST:
        yield fail(f"its broker is RabbitMQ {broker.version}, which is not supported", "Install RabbitMQ 3.10 to 4.3")
    elif found and found[:2] > NEWEST:
        yield warn(f"its broker is RabbitMQ {broker.version}, with which this version was not tested", "Install RabbitMQ 3.10 to 4.3")


def _check_rights(broker: Broker, _: Facts) -> Iterator[Finding]:
    for missing in dict.fromkeys(broker.missing.values()):
        if missing is not None:
            yield fail(missing.what, command=missing.command)


def _streams_tried(facts: Facts) -> Broker | Unread:
    if isinstance(facts.broker, Broker) and facts.broker.stream is None:
        return Unread(f"without rights in vhost '{ROUTING_VHOST}' no stream was tried")
    return facts.broker


def _check_streams(broker: Broker, _: Facts) -> Iterator[Finding]:
    if broker.stream:
        yield fail(f"its broker makes no stream, and the log is one: {broker.stream}", command="rabbitmqctl enable_feature_flag all")


def _check_message_size(broker: Broker, facts: Facts) -> Iterator[Finding]:
    most = facts.config.door.message_bytes_max
    if broker.refused_bytes:
        yield warn(
            f"its broker refuses a message of {broker.refused_bytes} bytes, and door.message_bytes_max lets {most} in: "
            "a node stops whose broker refuses what the primary's takes",
            f"Put max_message_size = {most} into rabbitmq.conf of each broker, too, as the command counts until a restart only",
            f"rabbitmqctl eval 'application:set_env(rabbit, max_message_size, {most}), persistent_term:put(max_message_size, {most}).'",
        )


# ---- from the management API -----------------------------------------------------------------------------------------


def _check_api(facts: Facts, _: Facts) -> Iterator[Finding]:
    if isinstance(facts.api, Unread):
        if facts.config.definitions.replicate:
            yield fail(f"{facts.api.why}: users and policies are not replicated", command=facts.api.command)
        else:
            yield Finding(Level.SKIPPED, f"{facts.api.why}: what only it tells is not checked", command=facts.api.command)


def _check_listeners(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    beside = is_loopback(urlsplit(facts.config.broker.url).hostname or "")
    for each in api.overview.get("listeners", []):
        protocol, address, port = str(each.get("protocol")), str(each.get("ip_address")), each.get("port")
        if protocol in _HARMLESS or sasl.is_loopback(address):
            continue
        if protocol.startswith("http") and parse_version(str(api.overview.get("rabbitmq_version"))) < TELLS_WEB_ADDRESSES:
            text = f"RabbitMQ {api.overview.get('rabbitmq_version')} does not tell at which addresses it takes {protocol} (port {port})"
            yield Finding(Level.SKIPPED, text, "Look with `ss -ltn`: it should be 127.0.0.1 or ::1")
            continue
        text = f"its broker takes {protocol} at {address}:{port}, which other machines may reach: what comes in there goes around the door"
        if plugin := _PLUGINS.get(protocol):
            yield warn(text, command=f"rabbitmq-plugins disable {plugin}")
        elif beside and protocol in _SETTINGS:
            yield warn(text, f"Put {_SETTINGS[protocol].format(port=port)} into rabbitmq.conf, and restart the broker")
        else:
            yield warn(text, "Let a firewall admit the sidecar alone")


def _check_clients(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    if facts.config.broker.proxy_protocol:
        yield Finding(Level.SKIPPED, "with broker.proxy_protocol the broker cannot tell the door's clients from others")
        return
    own = facts.config.credentials.name
    around = [
        f"{each.get('user')} ({each.get('name')})"
        for each in api.connections
        if each.get("user") != own and "lrq_client_address" not in (each.get("client_properties") or {})
    ]
    if around:
        yield warn(
            f"{len(around)} clients are connected to the broker itself, and nothing that they do is replicated: {name_some(around)}",
            f"Let them connect to the door, {facts.config.door.listen}",
        )


def _check_alarms(api: BrokerApi, _: Facts) -> Iterator[Finding]:
    for alarm, text in (("mem_alarm", "memory"), ("disk_free_alarm", "disk")):
        if api.node.get(alarm):
            yield fail(f"its broker has a {text} alarm: it takes no publishes", "See docs/operations/alarms.md", "rabbitmq-diagnostics alarms")


def _check_disk(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    free, limit = api.node.get("disk_free"), api.node.get("disk_free_limit")
    if not isinstance(free, int) or not isinstance(limit, int):
        yield Finding(Level.SKIPPED, "its broker does not say how much of its disk is free")
        return
    wanted = facts.config.replication.log_bytes_max
    stream = _find_log(api, facts)
    used = min(wanted, int(stream.get("segments", 0)) * segment_bytes(wanted)) if stream else 0
    if free - limit < wanted - used:
        yield warn(
            f"the log may grow by {format_size(wanted - used)}, and {format_size(max(0, free - limit))} are free above disk_free_limit: "
            "an alarm would stop all publishers",
            "Make room, or lower replication.log_bytes_max on all nodes before the first start (docs/operations/capacity.md)",
        )


def _find_log(api: BrokerApi, facts: Facts) -> dict[str, Any] | None:
    name = LOG_PREFIX + facts.config.node.group
    return next((dict(each) for each in api.queues if each.get("vhost") == ROUTING_VHOST and each.get("name") == name), None)


def _check_log_size(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    stream, wanted = _find_log(api, facts), facts.config.replication.log_bytes_max
    if stream is None:
        return
    policy = (stream.get("effective_policy_definition") or {}).get("max-length-bytes")
    made = (stream.get("arguments") or {}).get("x-max-length-bytes")
    found = min(size for size in (policy, made) if isinstance(size, int)) if policy or made else None
    if policy is None and found != wanted:
        definition = f'{{"max-length-bytes": {wanted}}}'
        yield warn(
            f"the stream '{stream['name']}' was made for {found} bytes, and replication.log_bytes_max is {wanted}: LOG LEFT is not true",
            command=f"rabbitmqctl set_policy -p {ROUTING_VHOST} lrq-size '^LRQ_(HA|Send|Recv)_' {quote(definition)} --apply-to queues",
        )


def _check_queues(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    refused = sorted(
        f"{each['name']} in {each['vhost']}"
        for each in api.queues
        if "reject-publish-dlx" in ((each.get("arguments") or {}).get("x-overflow"), (each.get("effective_policy_definition") or {}).get("overflow"))
    )
    if refused:
        yield warn(
            f"queues with overflow = reject-publish-dlx are not replicated: {name_some(refused)}",
            "Use reject-publish or drop-head (docs/queue-types.md)",
        )


def _check_policies(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    old = not isinstance(facts.broker, Unread) and parse_version(facts.broker.version) < (4,)
    for each in api.policies:
        keys = sorted((_UNSEEN_BEFORE_4 if old else _UNSEEN) & set(each.get("definition") or {}))
        if keys and each["vhost"] != ROUTING_VHOST:
            arguments = ", ".join(f"x-{key}" for key in keys)
            yield warn(
                f"policy '{each['name']}' in {each['vhost']} sets {', '.join(keys)}, and a sidecar sees arguments only: renewals and failovers may "
                "lose what it removes or moves, or bring it back",
                f"Declare its queues with {arguments} instead (docs/limitations.md, Policies). The command removes the policy",
                f"rabbitmqctl clear_policy -p {quote(each['vhost'])} {quote(each['name'])}",
            )


def _logged_queues(facts: Facts) -> tuple[BrokerApi, set[tuple[str, str]]] | Unread:
    if isinstance(facts.api, Unread):
        return facts.api
    if isinstance(facts.levels, Unread):
        return facts.levels
    return facts.api, {(row["vhost"], row["queue"]) for row in facts.levels}


def _check_strays(found: tuple[BrokerApi, set[tuple[str, str]]], facts: Facts) -> Iterator[Finding]:
    api, logged = found
    strays = sorted(
        f"{each['name']} in {each['vhost']}"
        for each in api.queues
        if each["vhost"] != ROUTING_VHOST and each.get("durable") and not each.get("exclusive") and not each.get("auto_delete")
        and (each["vhost"], each["name"]) not in logged and facts.config.replication.replicate == {"^.*$": "all"}
    )  # fmt: skip
    if strays:
        yield warn(
            f"the log does not know these queues of its broker, which no other node has: {name_some(strays)}",
            "Bring them into the log, or delete them (docs/operations/adopt.md)",
            "rabbitmqctl export_definitions definitions.json && lrq-ha adopt --help",
        )


def _check_guest(api: BrokerApi, facts: Facts) -> Iterator[Finding]:
    if "guest" in api.users and "guest" not in facts.config.door.loopback_users and not is_loopback(facts.config.door.listen.rpartition(":")[0]):
        yield fail(
            "user 'guest' exists, whose password is widely known, and door.loopback_users does not keep it to this machine",
            "Delete the user, or add it to door.loopback_users",
            "rabbitmqctl delete_user guest",
        )


BROKER_CHECKS: tuple[Check[Any], ...] = (
    Check("broker", "the broker answers at `broker.url`, and lets the sidecar's user in", lambda facts: facts, _check_broker,
          "its broker lets the sidecar's user in", Level.FAIL, "start the broker; `rabbitmqctl change_password USER`"),
    Check("version", "RabbitMQ 3.10 to 4.3", lambda facts: facts.broker, _check_version,
          "its version is supported", Level.FAIL, "install another RabbitMQ"),
    Check("rights", "the sidecar's user has all rights in vhost `lrq` and in every other, and may publish for others", lambda facts: facts.broker,
          _check_rights, "the sidecar's user has all rights that it needs", Level.FAIL,
          "`rabbitmqctl add_vhost`, `set_permissions`, `set_user_tags`"),
    Check("streams", "the broker makes a stream, and deletes it", _streams_tried, _check_streams,
          "its broker makes streams", Level.FAIL, "`rabbitmqctl enable_feature_flag all`"),
    Check("message-size", "the broker takes messages of `door.message_bytes_max`, or of 16 MiB if that is less", _streams_tried, _check_message_size,
          "its broker takes messages as large as was tried", Level.WARN, "`max_message_size`"),
    Check("management", "the management API answers the sidecar's user; without it the next checks are skipped", lambda facts: facts, _check_api,
          "its management API answers", Level.FAIL, "`rabbitmq-plugins enable rabbitmq_management`"),
    Check("listeners", "the broker listens on loopback only, but for other brokers and Prometheus", lambda facts: facts.api, _check_listeners,
          "no client reaches its broker around the door", Level.WARN, "`rabbitmq.conf`; `rabbitmq-plugins disable PLUGIN`"),
    Check("clients", "no client is connected around the door", lambda facts: facts.api, _check_clients,
          "no client is connected around the door", Level.WARN, "the clients' addresses"),
    Check("alarms", "the broker has no alarm", lambda facts: facts.api, _check_alarms,
          "its broker has no alarm", Level.FAIL, "[alarms](alarms.md)"),
    Check("disk", "the log has room above `disk_free_limit`", lambda facts: facts.api, _check_disk,
          "its disk has room for the log", Level.WARN, "[capacity](capacity.md)"),
    Check("log-size", "the stream of the log has the size `replication.log_bytes_max`", lambda facts: facts.api, _check_log_size,
          "the log has its size, or does not exist yet", Level.WARN, "`rabbitmqctl set_policy`"),
    Check("queues", "no queue is of a kind that is not replicated", lambda facts: facts.api, _check_queues,
          "all kinds of queues can be replicated", Level.WARN, "[queue types](../queue-types.md)"),
    Check("policies", "no policy removes or moves messages, which a sidecar does not see", lambda facts: facts.api, _check_policies,
          "no policy removes or moves messages", Level.WARN, "[arguments instead](../limitations.md#policies)"),
    Check("strays", "the log knows every durable queue of the broker", _logged_queues, _check_strays,
          "the log knows every durable queue", Level.WARN, "[`lrq-ha adopt`](adopt.md)"),
    Check("guest", "user `guest` comes in from this machine only", lambda facts: facts.api, _check_guest,
          "user 'guest' comes in from this machine only, or does not exist", Level.FAIL, "`door.loopback_users`"),
)  # fmt: skip
