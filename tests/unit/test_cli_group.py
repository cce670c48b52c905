"""The commands that ask a group and change nothing (`check`, `version`, `topology`, `uri`), and those that ask no node (`init`, `show-config`,
`completion`)."""

from __future__ import annotations

import ast
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_config import MINIMAL
from served_node import TIMEOUT_S, Node, serving

from lrq_ha import __version__, cli
from lrq_ha.cli.main import main
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration

DAY_S = 86_400.0
LAG = {"lag_entries": 12, "lag_bytes": 3_000_000, "lag_seconds": 1.5}
Serve = Callable[..., Node]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrq_ha.overview.asking.STATUS_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves nodes; further values of their status by name."""
    with serving() as start:

        def serve(node: Node, **more: Any) -> Node:
            status = node.status
            node.status = lambda: status() | more  # type: ignore[method-assign]
            return start(node)

        yield serve


def pair(folder: Path, *nodes: Node) -> str:
    """The configuration of the first node; the others are its peers."""
    first, *others = nodes
    text = MINIMAL.replace('"e1"', f'"{first.name}"').replace("8080", str(first.port))
    for number, node in enumerate(others, 2):
        text += f'[[peers]]\nname = "{node.name}"\nid = {number}\ndoor = "amqp://lrq:secret@192.0.2.{number}:5673"\nhttp = "{node.url}"\n'
    (folder / "e1.toml").write_text(text)
    return str(folder / "e1.toml")


def primary(serve: Serve, members: tuple[str, ...] = ("e1", "e2"), **more: Any) -> Node:
    node = Node("e1", Role.ACTIVE)
    node.peers = {"e2": LAG}
    return serve(node, members=list(members), broker={"version": "4.3.6", "blocked": ""}, **more)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    return code, capsys.readouterr().out


# ---- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "code", "line"),
    [
        ("running", 0, "OK - e1 is primary, 2 nodes run"),
        ("alarms", 0, "OK - no broker has an alarm"),
        ("in-sync", 0, "OK - in sync: e1, e2"),
        ("redundant", 0, "OK - what is confirmed is on 2 nodes"),
        ("lag", 0, "OK - no backup lacks more than 12 entries"),
        ("lag --max 2s", 0, "OK - no backup lacks more than 1.5 s"),
        ("lag --max 1MB", 2, "CRITICAL - e2 lacks 3000000 bytes: see lrq-ha list"),
        ("lag --max 11", 2, "CRITICAL - e2 lacks 12 entries: see lrq-ha list"),
        ("certificates", 1, "WARNING - certificates expire: e1 door in 20 days: replace the files"),
    ],
)
def test_a_condition_of_a_sound_pair(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], condition: str, code: int, line: str
) -> None:
    config = pair(tmp_path, primary(serve, certificates={"door": time.time() + 20.4 * DAY_S}), serve(Node("e2")))
    assert ran(capsys, "check", *condition.split(), "--config", config) == (code, f"{line}\n")


@pytest.mark.parametrize(
    ("condition", "code", "line"),
    [
        ("running", 1, "WARNING - e2 does not answer: see lrq-ha list"),
        ("alarms", 2, "CRITICAL - e1: disk alarm"),
        ("in-sync", 2, "CRITICAL - not in sync: e2: see lrq-ha list"),
        ("redundant", 2, "CRITICAL - what is confirmed is on e1 alone: start a backup, see lrq-ha list"),
        ("certificates", 2, "CRITICAL - certificates expire: e1 door has expired: replace the files"),
    ],
)
def test_a_condition_without_the_backup(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], condition: str, code: int, line: str
) -> None:
    e1 = serve(Node("e1", Role.ACTIVE), members=["e1"], broker={"blocked": "disk alarm"}, certificates={"door": 0.0})
    assert ran(capsys, "check", condition, "--config", pair(tmp_path, e1, Node("e2"))) == (code, f"{line}\n")


@pytest.mark.parametrize("condition", ["running", "in-sync", "redundant", "lag"])
def test_a_group_without_a_primary_is_critical(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], condition: str) -> None:
    code, line = ran(capsys, "check", condition, "--config", pair(tmp_path, serve(Node("e1")), serve(Node("e2"))))
    assert (code, line.startswith("CRITICAL - group east has no primary: "), line.count("\n")) == (2, True, 1)


def test_what_cannot_be_found_out_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = ran(capsys, "check", "running", "--config", str(tmp_path / "none.toml"))
    assert (code, line.startswith("UNKNOWN - "), line.count("\n")) == (3, True, 1)
    with pytest.raises(SystemExit):
        main(["check", "lag", "--max", "much"])


# ---- version, topology, uri ------------------------------------------------------------------------------------------


def test_golden_outputs(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fits 80 columns."""
    e1 = primary(serve, sessions={"west": {"connected": True}})
    config = pair(tmp_path, e1, serve(Node("e2"), broker={"version": "4.0.5"}), Node("e3"))
    said = {name: ran(capsys, *name.split(), "--config", config) for name in ("version", "version e2", "topology", "uri", "uri --role primary")}
    assert said["version"][1].splitlines() == [
        f"this command: lrq-ha {__version__}", "NODE  LRQ-HA     RABBITMQ", "e1    0.1        4.3.6", "e2    0.1        4.0.5", "e3    no answer  -"
    ]  # fmt: skip
    assert said["version e2"][1].splitlines()[1:] == ["NODE  LRQ-HA  RABBITMQ", "e2    0.1     4.0.5"]
    assert said["topology"][1].splitlines() == [
        "east: epoch 3.1",
        "  e1  active",
        "    + e2  ready, in sync, lacks 12 entries",
        "    + e3  no answer, not in sync, lacks - entries",
        "    > site west  connected",
    ]
    assert said["uri"][1].splitlines() == ["amqp://127.0.0.1:5673/%2F", "amqp://192.0.2.2:5673/%2F", "amqp://192.0.2.3:5673/%2F"]
    assert said["uri --role primary"][1].splitlines() == ["amqp://127.0.0.1:5673/%2F"]
    assert max(len(line) for _, text in said.values() for line in text.splitlines()) <= 80
    assert "secret" not in str(said)


def test_addresses_in_the_forms_of_clients(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pair(tmp_path, primary(serve), Node("e2"))
    said = {form: ran(capsys, "uri", "--for", form, "--user", "an app", "--vhost", "shop", "--config", config)[1].splitlines() for form in
            ("uri", "pika", "java", "dotnet", "haproxy")}  # fmt: skip
    assert said["uri"][0] == "amqp://an%20app@127.0.0.1:5673/shop"
    assert said["pika"][1] == '    pika.URLParameters("amqp://an%20app@127.0.0.1:5673/shop"),'
    assert said["java"] == ['connectionFactory.newConnection(Address.parseAddresses("127.0.0.1:5673,192.0.2.2:5673"))']
    assert 'new AmqpTcpEndpoint("192.0.2.2", 5673)' in said["dotnet"][0]
    assert said["haproxy"] == ["server e1 127.0.0.1:5673 check", "server e2 192.0.2.2:5673 check"]


def test_no_primary_to_connect_to(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pair(tmp_path, serve(Node("e1")), Node("e2"))
    assert main(["uri", "--role", "primary", "--config", config]) == 1
    assert "`lrq-ha list`" in capsys.readouterr().err
    assert ran(capsys, "topology", "--config", config)[1].splitlines() == ["east: no primary", "  ? e1  ready", "  ? e2  no answer"]


def test_a_list_as_tsv(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ran(capsys, "list", "--format", "tsv", "--config", pair(tmp_path, primary(serve), serve(Node("e2"))))
    rows = [line.split("\t") for line in said.splitlines()]
    assert (code, rows[0][:3], rows[0][-1], {len(row) for row in rows}) == (0, ["NODE", "GROUP", "ROLE"], "REASON", {10})
    assert rows[2][:5] == ["e2", "east", "ready", "3.1", "yes"]


def test_failover_is_promote(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e2 = serve(Node("e2"))
    assert ran(capsys, "failover", "e2", "--config", pair(tmp_path, Node("e1"), e2)) == (0, "done\n")
    assert e2.told == [("promote", [], False, False, False)]


# ---- init, show-config, completion -----------------------------------------------------------------------------------


def test_a_new_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are valid, agree with each other, are their owner's alone, and are never overwritten."""
    arguments = ("init", str(tmp_path / "new"), "--group", "east", "e1=192.0.2.1", "e2=2001:db8::2")
    code, said = ran(capsys, *arguments)
    assert code == 0
    one, two = (configuration.load(tmp_path / "new" / f"{name}.toml") for name in ("e1", "e2"))
    assert (one.node.id, one.peers[0].id, one.peers[0].name, two.peers[0].name) == (1, 2, "e2", "e1")
    password = one.credentials.password.decode()
    assert one.peers[0].door == f"amqp://lrq:{password}@[2001:db8::2]:5673"
    assert (one.credentials.password == two.credentials.password, two.door.listen) == (True, "[2001:db8::2]:5673")
    assert f"rabbitmqctl add_user lrq '{password}'" in said
    assert stat.S_IMODE((tmp_path / "new" / "e1.toml").stat().st_mode) == 0o600
    before = (tmp_path / "new" / "e1.toml").read_text()
    assert main(arguments) == 1
    assert "exists already. Move it away" in capsys.readouterr().err
    assert (tmp_path / "new" / "e1.toml").read_text() == before


@pytest.mark.parametrize("nodes", [["e1=a", "e1=b"], ["e1=a", "e2=a"]])
def test_a_group_whose_nodes_cannot_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: list[str]) -> None:
    assert main(["init", str(tmp_path), "--group", "east", *nodes]) == 1
    assert "of its own" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("node", ["e1", "=h", "e 1=h", "e1=h/x", "e1=u@h"])
def test_a_node_that_is_none(tmp_path: Path, node: str) -> None:
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path), "--group", "east", node])


def test_the_configuration_that_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is shown is a valid configuration with equal values, but for its secrets."""
    (tmp_path / "e1.toml").write_text(configuration.sample())
    code, said = ran(capsys, "show-config", "--config", str(tmp_path / "e1.toml"))
    assert (code, "SECRET" in said, "lease_ttl_s" in said) == (0, False, False)
    (tmp_path / "shown.toml").write_text(said)
    before, after = (configuration.read(tmp_path / name).model_dump() for name in ("e1.toml", "shown.toml"))
    for table in before:
        if table not in ("broker", "peers", "sites", "interceptors"):
            assert before[table] == after[table], table
    assert after["broker"]["url"] == "amqp://lrq:***@127.0.0.1:5672"
    (tmp_path / "least.toml").write_text(MINIMAL)
    code, said = ran(capsys, "show-config", "--changed", "--config", str(tmp_path / "least.toml"))
    assert said.splitlines() == [*MINIMAL.replace("secret", "***").replace("\n[", "\n\n[").splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_is_a_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, script = ran(capsys, "completion", shell)
    assert (code, "switchover" in script) == (0, True)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
    if shell == "bash":
        function = '$(complete -p lrq-ha | sed "s/.*-F \\([^ ]*\\).*/\\1/")'
        ask = f'. {tmp_path}/script; COMP_WORDS=(lrq-ha swi); COMP_CWORD=1; {function}; echo "${{COMPREPLY[@]}}"'
        assert subprocess.run(["bash", "-c", ask], check=True, capture_output=True, text=True).stdout.split() == ["switchover"]


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_every_refusal_of_the_command_says_what_to_do() -> None:
    """Of each LrqError that is raised in the command line: it has `todo`, or passes on the words of a node."""
    folder = Path(cli.__file__).parent
    found = [
        f"{path.name}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(folder.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("LrqError", "LabError") and not any(key.arg == "todo" for key in call.keywords)
    ]
    assert [line for line in found if "_text(refusal.read())" not in line] == []


def test_the_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in ("doctor", "check", "version", "topology", "uri", "init", "show-config", "edit-config", "completion", "failover"):
        assert command in text
