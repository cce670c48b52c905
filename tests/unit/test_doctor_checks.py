"""The checks of `lrq-ha doctor`, each with facts of its fault, and the look of the answer; faults of real brokers are in integration/test_doctor.py.

    PYTHONPATH=.:tests:tests/unit python tests/unit/test_doctor_checks.py    writes the table of docs/operations/doctor.md
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker_plugin.apply.broker_rights import MissingRight
from lrq_ha.cli.doctor.broker_checks import BROKER_CHECKS
from lrq_ha.cli.doctor.check import Check, Checked, Finding, Level, run_checks
from lrq_ha.cli.doctor.command import CHECKS, as_json, as_text, documented, examine, exit_code
from lrq_ha.cli.doctor.facts import Broker, BrokerApi, Certificate, EtcdMember, Facts, Host, Node, Unread
from lrq_ha.cli.doctor.group import read_etcd
from lrq_ha.cli.doctor.host import read_host
from lrq_ha.cli.doctor.version_changes import VERSION_CHANGES, changes_between
from lrq_ha.cli.list_nodes import targets_of
from lrq_ha.cli.main import main
from lrq_ha.lab.certificates import Authority
from lrq_ha.lab.ports import free_ports
from lrq_ha.sidecar import config as configuration

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "doctor.md"
BEGIN, END = "<!-- checks: made by tests/unit/test_doctor_checks.py -->\n", "<!-- end of checks -->"
NOW = 1_800_000_000.0
DAY_S = 86_400.0
LOG: dict[str, Any] = {"vhost": "lrq", "name": "LRQ_HA_east", "type": "stream", "segments": 3, "arguments": {"x-max-length-bytes": 8 << 30}}
ORDERS: dict[str, Any] = {"vhost": "/", "name": "orders", "type": "classic", "durable": True, "exclusive": False, "arguments": {}}
TEXT = """\
[node]
name = "e1"
id = 1
group = "east"
[broker]
url = "amqp://lrq:SECRET@127.0.0.1:5672"
[door]
listen = "192.0.2.1:5673"
[http]
listen = "127.0.0.1:8080"
[[peers]]
name = "e2"
id = 2
door = "amqp://lrq:SECRET@192.0.2.2:5673"
http = "http://192.0.2.2:8080"
"""


def write(folder: Path, text: str = TEXT) -> Path:
    (folder / "e1.toml").write_text(text)
    (folder / "e1.toml").chmod(0o600)
    return folder / "e1.toml"


@pytest.fixture
def sound(tmp_path: Path) -> Facts:
    """A pair without a fault."""
    path = write(tmp_path)
    config = configuration.read(path)
    status = {
        "node": "e1", "id": 1, "group": "east", "role": "active", "primary": "e1", "software": "0.1", "files_max": 1 << 20, "log": "aa",
        "broker": {"version": "4.3.6"}, "peers": {"e2": {"problem": ""}}, "shared": dict(config.settings().shared),
    }  # fmt: skip
    logins = {"vhosts": ["/", "lrq"], "users": {"app": [], "lrq": ["administrator"]}, "plugins": ["rabbitmq_management"]}
    other = status | {"node": "e2", "id": 2, "role": "ready", "peers": {"e1": {"problem": ""}}}
    node = {"name": "rabbit@e1", "disk_free": 100 << 30, "disk_free_limit": 50 << 20, "enabled_plugins": ["rabbitmq_management"]}
    listeners: list[dict[str, Any]] = [
        {"protocol": "amqp", "ip_address": "127.0.0.1", "port": 5672}, {"protocol": "clustering", "ip_address": "::", "port": 25672},
        {"protocol": "http", "ip_address": "::1", "port": 15672}, {"protocol": "http/prometheus", "ip_address": "::", "port": 15692},
    ]  # fmt: skip
    connections: list[dict[str, Any]] = [
        {"user": "lrq", "name": "own"}, {"user": "app", "name": "door", "client_properties": {"lrq_client_address": "192.0.2.7:4"}},
    ]  # fmt: skip
    api = BrokerApi({"rabbitmq_version": "4.3.6", "listeners": listeners}, node, [LOG, ORDERS], connections, [], ["app", "lrq"], ["/", "lrq"])
    return Facts(
        path, config, Host(NOW), Node("e1", "http://127.0.0.1:8080", status, logins=logins),
        [Node("e2", "http://192.0.2.2:8080", other, ahead_s=0.1, logins=logins)],
        [{"vhost": "/", "queue": "orders", "level": "all"}], Broker("4.3.6", {"lrq": None, "/": None}), api,
        [EtcdMember("http://192.0.2.9:2379", "3.4.23", log="aa")],
    )  # fmt: skip


def own(facts: Facts, **status: Any) -> Facts:
    return replace(facts, own=replace(facts.own, status={**facts.own.status, **status}))


def other(facts: Facts, **status: Any) -> Facts:
    return replace(facts, others=[replace(facts.others[0], status={**facts.others[0].status, **status})])


def of_other(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, others=[replace(facts.others[0], **changes)])


def api(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.api, BrokerApi)
    return replace(facts, api=replace(facts.api, **changes))


def listening(facts: Facts, protocol: str, address: str, version: str = "4.3.6") -> Facts:
    return api(facts, overview={"rabbitmq_version": version, "listeners": [{"protocol": protocol, "ip_address": address, "port": 4711}]})


def host(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, host=replace(facts.host, **changes))


def certificate(facts: Facts, days: float, untrusted: str = "") -> Facts:
    return host(facts, certificates=[Certificate("door.tls", "door.pem", NOW + days * DAY_S if days else 0.0, untrusted)])


def etcd(facts: Facts, **member: Any) -> Facts:
    return replace(facts, etcd=[EtcdMember("http://192.0.2.9:2379", **member)])


def without_sidecar(facts: Facts) -> Facts:
    return replace(facts, own=replace(facts.own, status={}, failure="connection refused"))


W, F, S = Level.WARN, Level.FAIL, Level.SKIPPED
#: Of each fault: the check that finds it, its level, a part of its text, a part of what mends it, and the facts.
FAULTS: tuple[tuple[str, Level, str, str, Any], ...] = (
    ("files", F, "e1.toml holds passwords", "chmod go-rwx e1.toml", lambda f: host(f, exposed=[("e1.toml holds passwords", "chmod go-rwx e1.toml")])),
    ("addresses", F, "door.listen = 192.0.2.1:5673 cannot be listened on: address already in use", "ss -ltnp 'sport = :5673'",
     lambda f: without_sidecar(host(f, busy={"door.listen": "address already in use"}))),
    ("addresses", F, "another sidecar answers at http://127.0.0.1:8080: node w1 of group west", "addresses of its own",
     lambda f: own(f, node="w1", group="west")),
    ("certificates", F, "[door.tls], door.pem, has expired", "Replace the file", lambda f: certificate(f, 0)),
    ("certificates", W, "expires on 2027-02-03", "Replace the file", lambda f: certificate(f, 19)),
    ("certificates", W, "do not vouch", "with its chain", lambda f: certificate(f, 90, "unable to get local issuer certificate")),
    ("open-files", W, "needs 20256 open files, and the sidecar may have 1024", "LimitNOFILE=20256", lambda f: own(f, files_max=1024)),
    ("open-files", W, "a process that is started from here may have 512", "LimitNOFILE=20256", lambda f: without_sidecar(host(f, files_max=512))),
    ("memory", W, "vm.swappiness = 60", "sysctl -w vm.swappiness=10", lambda f: host(f, swap=True, swappiness=60)),
    ("memory", W, "vm.overcommit_memory = 2", "sysctl -w vm.overcommit_memory=0", lambda f: host(f, overcommit=2)),
    ("broker", F, "refused", "rabbitmqctl change_password lrq", lambda f: replace(f, broker=Unread("refused", "rabbitmqctl change_password lrq"))),
    ("version", F, "RabbitMQ 3.9.29, which is not supported", "3.10 to 4.3", lambda f: replace(f, broker=Broker("3.9.29"))),
    ("version", W, "RabbitMQ 4.4.0, with which", "3.10 to 4.3", lambda f: replace(f, broker=Broker("4.4.0"))),
    ("rights", F, "no vhost 'shop'", "add_vhost shop",
     lambda f: replace(f, broker=Broker("4.3.6", {"shop": MissingRight("no vhost 'shop'", "add_vhost shop")}))),
    ("streams", F, "makes no stream", "rabbitmqctl enable_feature_flag all", lambda f: replace(f, broker=Broker("3.10.8", stream="no flag"))),
    ("streams", S, "without rights in vhost 'lrq'", "", lambda f: replace(f, broker=Broker("3.10.8", stream=None))),
    ("message-size", W, "refuses a message of 1000 bytes", "max_message_size, 134217728",
     lambda f: replace(f, broker=Broker("4.3.6", refused_bytes=1000))),
    ("management", S, "it is off: what only it tells is not checked", "enable it", lambda f: replace(f, api=Unread("it is off", "enable it"))),
    ("listeners", W, "amqp at 0.0.0.0:4711", "listeners.tcp.1 = 127.0.0.1:4711", lambda f: listening(f, "amqp", "0.0.0.0")),
    ("listeners", W, "http at :::4711", "management.tcp.ip = 127.0.0.1", lambda f: listening(f, "http", "::")),
    ("listeners", S, "RabbitMQ 3.10.8 does not tell at which addresses it takes http", "ss -ltn", lambda f: listening(f, "http", "::", "3.10.8")),
    ("listeners", W, "amqp at :::4711", "listeners.tcp.1 = 127.0.0.1:4711", lambda f: listening(f, "amqp", "::", "3.10.8")),
    ("listeners", W, "mqtt at 192.0.2.1", "rabbitmq-plugins disable rabbitmq_mqtt", lambda f: listening(f, "mqtt", "192.0.2.1")),
    ("clients", W, "1 clients are connected to the broker itself", "192.0.2.1:5673", lambda f: api(f, connections=[{"user": "app", "name": "x"}])),
    ("alarms", F, "disk alarm", "docs/operations/alarms.md", lambda f: api(f, node={"disk_free_alarm": True})),
    ("disk", W, "8.0 GiB, and 1.0 GiB are free", "capacity.md", lambda f: api(f, queues=[], node={"disk_free": 2 << 30, "disk_free_limit": 1 << 30})),
    ("log-size", W, "made for 1024 bytes", "rabbitmqctl set_policy -p lrq lrq-size",
     lambda f: api(f, queues=[LOG | {"arguments": {"x-max-length-bytes": 1024}}])),
    ("queues", W, "'orders in /'", "docs/queue-types.md", lambda f: api(f, queues=[ORDERS | {"arguments": {"x-overflow": "reject-publish-dlx"}}])),
    ("policies", W, "policy 'old' in / sets expires", "rabbitmqctl clear_policy -p / old",
     lambda f: api(f, policies=[{"name": "old", "vhost": "/", "definition": {"expires": 9}}])),
    ("strays", W, "'orders in /'", "lrq-ha adopt", lambda f: replace(f, levels=[])),
    ("sidecar", F, "takes no part: no broker", "what the reason names", lambda f: own(f, role="standalone", reason="no broker")),
    ("sidecar", S, "connection refused", "lrq-ha sidecar --config", without_sidecar),
    ("nodes", W, "e2 does not answer: timed out", "peers.http of e2", lambda f: of_other(f, status={}, failure="timed out")),
    ("nodes", F, "is node e3 of group east, and no e2", "peers.http of e2", lambda f: other(f, node="e3")),
    ("nodes", F, "e2 has id 3 and [[peers]] here says 2", "peers.id of e2", lambda f: other(f, id=3)),
    ("settings", F, 'replication.mode is "available" in', "Make it equal", lambda f: other(f, shared={"mode": '"strict"'})),
    ("doors", F, "the door of e2 is not reached from here: no route", "the firewall", lambda f: of_other(f, door="no route")),
    ("links", W, "e2 says of e1: no route", "Mend what it names", lambda f: other(f, peers={"e1": {"problem": "no route"}})),
    ("clocks", W, "the clock of e2 is 3.5 s behind this one", "timedatectl set-ntp true", lambda f: of_other(f, ahead_s=-3.5)),
    ("software", W, "this node runs lrq-ha 0.1, and e2 runs 0.2", "one version", lambda f: other(f, software="0.2")),
    ("broker-versions", W, "since RabbitMQ 4.3 basic.qos", "prefetch", lambda f: other(f, broker={"version": "3.13.7"})),
    ("plugins", W, "has plugins that this one lacks: 'rabbitmq_shovel'", "rabbitmq-plugins enable rabbitmq_shovel",
     lambda f: of_other(f, logins={**f.others[0].logins, "plugins": ["rabbitmq_management", "rabbitmq_shovel"]})),
    ("logins", W, "only e1 has the users 'app'", "docs/operations/definitions.md",
     lambda f: of_other(f, logins={**f.others[0].logins, "users": {"lrq": ["administrator"]}})),
    ("etcd", F, "etcd does not answer", "etcdctl endpoint health", lambda f: etcd(f, failure="no leader")),
    ("etcd", F, "is 3.3.1", "3.4 or newer", lambda f: etcd(f, version="3.3.1")),
    ("etcd", F, "of another group with this name", "coordination.namespace", lambda f: etcd(f, version="3.5.0", log="bb")),
)  # fmt: skip


def found(facts: Facts, check: str) -> list[Finding]:
    return [each.finding for each in run_checks(CHECKS, facts) if each.check == check]


def test_a_sound_node_has_no_findings(sound: Facts) -> None:
    assert {each.check: each.finding.text for each in run_checks(CHECKS, sound) if each.finding.level is not Level.OK} == {}


@pytest.mark.parametrize(("check", "level", "says", "mends", "change"), FAULTS, ids=[f"{row[0]}: {row[2][:30]}" for row in FAULTS])
def test_each_fault_is_found_and_mended(sound: Facts, check: str, level: Level, says: str, mends: str, change: Any) -> None:
    facts = change(sound)
    bad = [each for each in found(facts, check) if each.level is level and says in each.text]
    assert bad, found(facts, check)
    assert any(mends in f"{each.todo} {each.command}" for each in bad), bad


def test_every_check_has_a_fault() -> None:
    unseen = {check.name for check in CHECKS} - {row[0] for row in FAULTS}
    assert unseen == {"token", "guest"}, "these need another configuration, below"


def test_a_finding_of_a_fault_says_what_to_do(sound: Facts) -> None:
    for row in FAULTS:
        for each in run_checks(CHECKS, row[4](sound)):
            if each.finding.level in (Level.WARN, Level.FAIL):
                assert each.finding.todo or each.finding.command, each


def test_no_check_gives_a_worse_level_than_is_documented(sound: Facts) -> None:
    order = [Level.OK, Level.SKIPPED, Level.WARN, Level.FAIL]
    worst = {check.name: check.worst for check in CHECKS}
    for row in FAULTS:
        for each in run_checks(CHECKS, row[4](sound)):
            assert order.index(each.finding.level) <= order.index(worst[each.check]), each


def test_a_door_for_other_machines(sound: Facts, tmp_path: Path) -> None:
    text = TEXT.replace('"127.0.0.1:8080"', '"192.0.2.1:8080"').replace('listen = "192.0.2.1:5673"', 'listen = "192.0.2.1:5673"\nloopback_users = []')
    facts = replace(api(sound, users=["guest", "lrq"]), config=configuration.read(write(tmp_path, text)))
    [token], [guest] = found(facts, "token"), found(facts, "guest")
    assert (token.level, guest.level, guest.command) == (Level.WARN, Level.FAIL, "rabbitmqctl delete_user guest")
    assert "http.token_file" in token.todo


def test_without_facts_a_check_is_skipped(sound: Facts) -> None:
    nothing = Unread("it is off")
    facts = replace(sound, api=nothing, broker=nothing, levels=nothing, etcd=nothing, others=[replace(sound.others[0], status={}, failure="gone")])
    for name in ("listeners", "clients", "disk", "strays", "plugins", "rights", "streams", "etcd", "clocks", "settings"):
        assert [each.level for each in found(facts, name)] == [Level.SKIPPED], name


def test_a_replicated_definition_needs_the_management_api(sound: Facts, tmp_path: Path) -> None:
    text = TEXT + '[definitions]\nreplicate = ["users"]\n'
    facts = replace(sound, api=Unread("it is off", "enable it"), config=configuration.read(write(tmp_path, text)))
    assert [(each.level, each.command) for each in found(facts, "management")] == [(Level.FAIL, "enable it")]


# ---- versions --------------------------------------------------------------------------------------------------------


def test_the_differences_between_versions() -> None:
    assert changes_between("4.3.6", "4.3.1") == changes_between("", "4.3.1") == []
    assert {change.since for change in changes_between("4.0.5", "4.3.6")} == {(4, 3)}
    assert changes_between("3.10.8", "4.3.6") == changes_between("4.3.6", "3.10.8") == list(VERSION_CHANGES)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("mirrored classic queues", {"policies": [{"name": "p", "vhost": "/", "definition": {"ha-mode": "all"}}]}),
        ("neither durable nor exclusive", {"queues": [ORDERS | {"durable": False}]}),
        ("20 deliveries", {"queues": [ORDERS | {"type": "quorum"}]}),
        ("x-queue-version = 1", {"queues": [ORDERS | {"arguments": {"x-queue-version": 1}}]}),
        ("`lazy`", {"policies": [{"name": "p", "vhost": "/", "definition": {"queue-mode": "lazy"}}]}),
    ],
)
def test_what_a_version_changes_is_named_where_it_is_used(sound: Facts, text: str, changes: dict[str, Any]) -> None:
    facts = other(sound, broker={"version": "3.10.8"})
    assert not any(text in each.text for each in found(api(facts, queues=[ORDERS], policies=[]), "broker-versions"))
    [finding] = [each for each in found(api(facts, **changes), "broker-versions") if text in each.text]
    assert "Here: " in finding.text


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_files_addresses_and_certificates_are_read(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    one, key = authority.issue("door")
    foreign = Authority(tmp_path / "others")
    ports = free_ports()
    door, http_port = next(ports), next(ports)
    ports.close()
    text = TEXT.replace('"192.0.2.1:5673"', f'"127.0.0.1:{door}"').replace("8080", str(http_port), 1)
    tables = f'[door.tls]\ncertificate = "{one}"\nkey = "{key}"\n[tls]\nca = "{foreign.ca}"\n'
    path = write(tmp_path, text + tables)
    path.chmod(0o644)
    config = configuration.load(path)
    with socket.create_server(("127.0.0.1", door)):
        facts = read_host(path, config)
    assert dict(facts.busy) == {"door.listen": "address already in use"}
    assert str(path) in facts.exposed[0][0]
    [seen] = facts.certificates
    assert (seen.table, seen.expires > facts.now, bool(seen.untrusted)) == ("door.tls", True, True)
    trusted = configuration.load(write(tmp_path, text + tables.replace(str(foreign.ca), str(authority.ca))))
    assert [each.untrusted for each in read_host(path, trusted).certificates] == [""]


def test_a_member_of_etcd_that_is_away(tmp_path: Path) -> None:
    text = TEXT + '[replication]\ncoordination = "etcd"\n[coordination]\nendpoints = ["http://127.0.0.1:1"]\n'
    path = write(tmp_path, text)
    config = configuration.load(path)
    members = asyncio.run(read_etcd(config, targets_of(config, path, None, "")[0]))
    assert not isinstance(members, Unread)
    assert [(member.endpoint, "refused" in member.failure.lower()) for member in members] == [("http://127.0.0.1:1", True)]


def test_without_a_configuration_all_else_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "none.toml"
    checked = examine(missing)
    assert (checked[0].finding.level, exit_code(checked), len(checked)) == (Level.FAIL, 2, len(CHECKS) + 1)
    assert {each.finding.level for each in checked[1:]} == {Level.SKIPPED}
    assert main(["doctor", "--config", str(missing)]) == 2
    assert "cannot be read" in capsys.readouterr().out
    monkeypatch.delenv("LRQ_HA_CONFIG", raising=False)
    assert main(["doctor"]) == 1
    assert "--config FILE" in capsys.readouterr().err


# ---- showing ---------------------------------------------------------------------------------------------------------


def checked() -> Iterator[Checked]:
    yield Checked("config", Finding(Level.OK, "e1.toml is valid"))
    command = "rabbitmqctl set_permissions -p / lrq '.*' '.*' '.*'"
    yield Checked("rights", Finding(Level.FAIL, "user 'lrq' has no permissions in vhost '/' of its broker", command=command))
    text = "its broker takes amqp at 0.0.0.0:5672, which other machines may reach: what comes in there goes around it"
    yield Checked("listeners", Finding(Level.WARN, text, "Put listeners.tcp.1 = 127.0.0.1:5672 into rabbitmq.conf"))
    yield Checked("etcd", Finding(Level.SKIPPED, "amqp://lrq:SECRET@127.0.0.1:5672 is\x1b[2J static"))


def test_the_answer_fits_a_terminal() -> None:
    assert as_text(list(checked()), 80).splitlines() == [
        "ok       config     e1.toml is valid",
        "FAIL     rights     user 'lrq' has no permissions in vhost '/' of its broker",
        "         rabbitmqctl set_permissions -p / lrq '.*' '.*' '.*'",
        "warn     listeners  its broker takes amqp at 0.0.0.0:5672, which other machines",
        "         may reach: what comes in there goes around it",
        "         Put listeners.tcp.1 = 127.0.0.1:5672 into rabbitmq.conf",
        r"skipped  etcd       amqp://lrq:***@127.0.0.1:5672 is\x1b[2J static",
        "",
        "1 FAIL, 1 warn, 1 ok, 1 skipped",
    ]


def test_the_answer_without_a_terminal_and_as_json() -> None:
    lines = as_text(list(checked()), None).splitlines()
    assert lines[3].endswith("may reach: what comes in there goes around it")
    told = json.loads(as_json(Path("e1.toml"), list(checked())))
    assert (told["config"], told["code"], [each["level"] for each in told["checks"]]) == ("e1.toml", 2, ["ok", "FAIL", "warn", "skipped"])
    assert told["checks"][1]["command"] == "rabbitmqctl set_permissions -p / lrq '.*' '.*' '.*'"
    assert exit_code([each for each in checked() if each.finding.level is not Level.FAIL]) == 1
    assert exit_code([each for each in checked() if each.finding.level in (Level.OK, Level.SKIPPED)]) == 0


# ---- the page --------------------------------------------------------------------------------------------------------


def page() -> str:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{documented()}{END}{rest.partition(END)[2]}"


def test_the_page_has_every_check() -> None:
    assert PAGE.read_text("utf-8") == page(), "run this file as a program"
    assert all(isinstance(check, Check) for check in BROKER_CHECKS)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
