"""`lrq-ha list`, `promote`, `remove` against real HTTP servers on loopback, and the servers' own answers."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served_node import TIMEOUT_S, Node, call, serving

from lrq_ha.cli import list_nodes
from lrq_ha.cli.main import main
from lrq_ha.errors import LrqError
from lrq_ha.overview import asking
from lrq_ha.overview.text import format_size
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.http.commands import BODY_BYTES_MAX


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is there answers, also on a machine that stands still for a while; one that is not refuses at once."""
    monkeypatch.setattr("lrq_ha.overview.asking.STATUS_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def serve() -> Iterator[Callable[[Node], Node]]:
    """Serves nodes over HTTP until the test ends."""
    with serving() as start:
        yield start


def lab(folder: Path, *nodes: Node) -> list[str]:
    """Options that make a command find `list_nodes`."""
    described = {"groups": {"east": {"primary": "e1", "nodes": {node.name: {"http": node.url} for node in nodes}}}}
    (folder / "lab.json").write_text(json.dumps(described))
    return ["--dir", str(folder)]


# ---- the server ------------------------------------------------------------------------------------------------------


def test_status_and_queues(serve: Callable[[Node], Node]) -> None:
    node = serve(Node("e1"))
    assert call(f"{node.url}/status") == (200, node.status())
    assert call(f"{node.url}/queues") == (200, ["LRQ_Recv_orders_west"])
    assert call(f"{node.url}/levels") == (200, node.levels())


@pytest.mark.parametrize("role", Role)
def test_codes_for_load_balancers(serve: Callable[[Node], Node], role: Role) -> None:
    node = serve(Node("e1", role))
    assert call(f"{node.url}/primary")[0] == (200 if role is Role.ACTIVE else 503)
    assert call(f"{node.url}/ready")[0] == (200 if role in (Role.ACTIVE, Role.READY) else 503)


def test_a_primary_that_turns_clients_away_is_none_for_load_balancers(serve: Callable[[Node], Node]) -> None:
    """They went on sending clients to it, which were refused."""
    node = serve(Node("e1", Role.ACTIVE))
    node.closed_because = "node e1 hands over to e2"
    assert call(f"{node.url}/primary")[0] == call(f"{node.url}/ready")[0] == 503


def test_a_backup_that_hears_no_primary_is_not_ready_for_load_balancers(serve: Callable[[Node], Node]) -> None:
    """Its primary may have taken it out of the set long ago."""
    node = serve(Node("e2", Role.READY))
    node.primary = None
    assert call(f"{node.url}/primary")[0] == call(f"{node.url}/ready")[0] == 503


def test_a_primary_that_waits_for_its_backups_takes_clients(serve: Callable[[Node], Node], tmp_path: Path) -> None:
    node = serve(Node("e1", Role.RECOVERING))
    node.opened = True
    assert call(f"{node.url}/primary")[0] == call(f"{node.url}/ready")[0] == 200
    assert main(["remove", "e1", *lab(tmp_path, node)]) == 0, "it is whom an operator speaks to"
    assert node.told == [("remove", "e1", False)]


def test_commands_get_their_defaults(serve: Callable[[Node], Node]) -> None:
    node = serve(Node("e2"))
    assert call(f"{node.url}/promote", b"") == (200, {"ok": True, "text": "done"})
    assert call(f"{node.url}/promote", b'{"down": ["e1"], "force": true, "dry_run": true}')[0] == 200
    assert call(f"{node.url}/remove", b'{"node": "e1"}')[0] == 200
    assert node.told == [("promote", [], False, False, False), ("promote", ["e1"], True, False, True), ("remove", "e1", False)]


def test_a_refusal_and_an_error_are_409_and_503(serve: Callable[[Node], Node]) -> None:
    node = serve(Node("e2"))
    node.answer = (False, "e1 is primary and answers")
    assert call(f"{node.url}/promote", b"{}") == (409, {"ok": False, "text": "e1 is primary and answers"})
    node.error = LrqError("the broker is gone", todo="Start it")
    assert call(f"{node.url}/promote", b"{}") == (409, {"ok": False, "text": "the broker is gone. Start it"})
    assert call(f"{node.url}/status") == (503, {"ok": False, "text": "the broker is gone. Start it"})


@pytest.mark.parametrize(("path", "body"), [("status", None), ("promote", b"{}")])
def test_an_error_that_nobody_expected_is_json_and_stands_in_the_log(
    serve: Callable[[Node], Node], path: str, body: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    node = serve(Node("e2"))
    node.error = RuntimeError("what?")
    told = "an internal error, see the log: RuntimeError('what?')"
    assert call(f"{node.url}/{path}", body) == (500, {"ok": False, "text": told})
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("promote", b"{", "the body is not JSON"),
        ("promote", b"\xff", "the body is not JSON"),
        ("promote", b"[" * 50_000, "the body is not JSON"),
        ("promote", b"[]", "the body must be a JSON object with the keys down, force, without_etcd, dry_run"),
        ("promote", b'{"dwon": []}', "dwon: unknown key; allowed: down, force, without_etcd, dry_run"),
        ("promote", b'{"down": "e1"}', 'down: must be a list of node names (value "e1")'),
        ("promote", b'{"down": [1]}', "down: must be a list of node names (value [1])"),
        ("promote", b'{"force": 1}', "force: must be true or false (value 1)"),
        ("demote", b'{"timeout_s": true}', "timeout_s: must be a number of seconds from 0 to 3600 (value true)"),
        ("demote", b'{"timeout_s": 3601}', "timeout_s: must be a number of seconds from 0 to 3600 (value 3601)"),
        ("remove", b"{}", "node: missing; must be the name of a node"),
        ("remove", b'{"node": ""}', 'node: must be the name of a node (value "")'),
    ],
)
def test_an_unusable_body_changes_nothing(serve: Callable[[Node], Node], path: str, body: bytes, told: str) -> None:
    node = serve(Node("e2"))
    code, answer = call(f"{node.url}/{path}", body)
    assert code == 400
    assert answer["text"].startswith(told)
    assert not node.told


def test_requests_of_the_wrong_kind(serve: Callable[[Node], Node]) -> None:
    node = serve(Node("e2"))
    assert call(f"{node.url}/promote", b"{}", "text/plain")[0] == 400
    assert call(f"{node.url}/promote") == (405, {"ok": False, "text": "/promote takes POST"})
    code, answer = call(f"{node.url}/nothing")
    assert code == 404
    assert all(f" {path}" in answer["text"] for path in ("/nothing", "/status", "/levels", "/reinit"))
    assert call(f"{node.url}/promote", b"{}", Origin=node.url) == (403, {"ok": False, "text": "commands are not taken from web pages"})
    assert call(f"{node.url}/promote", b" " * (BODY_BYTES_MAX + 1))[0] == 413
    assert not node.told


def test_an_occupied_port_says_so(serve: Callable[[Node], Node]) -> None:
    node = serve(Node("e1"))
    with pytest.raises(LrqError, match=f"address 127.0.0.1:{node.port} is in use.*change http.listen"):
        serve(node)


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_list_shows_every_node(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2, e3 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2")), Node("e3")
    e1.peers = {"e2": {"connected": True, "acked": 117, "lag_entries": 3, "lag_bytes": 4096, "lag_seconds": 0.25, "log_bytes_left": 70}}
    assert main(["list", *lab(tmp_path, e1, e2, e3)]) == 0
    # The primary's word on who is in sync counts, not the backup's.
    assert capsys.readouterr().out.splitlines() == [
        "NODE  GROUP  ROLE       EPOCH  IN SYNC  LOG END  LAG  LAG S  LOG LEFT",
        "e1    east   active     3.1    yes          120    -      -         -",
        "e2    east   ready      3.1    no           120    3    0.2        70",
        "e3    east   no answer  -      no             -    -      -         -",
        "",
        "  e1    since 12:00:00: started",
        "  e2    since 12:00:00: started",
        f"  e3    tried {e3.url}/status: connection refused",
    ]


def test_list_says_what_etcd_has(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2"))
    e1.coordination = {"etcd": "etcd does not answer: http://h:1 is gone", "since": 0.0, "leader": None, "set": ["e1"], "version": 1}
    e2.coordination = {"etcd": "answers", "since": 0.0, "leader": "e1", "set": ["e1", "e2"], "version": 7}
    assert main(["list", *lab(tmp_path, e1, e2)]) == 0
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert "e1    since 12:00:00: started; since 1970-01-01" in first
    assert "etcd does not answer: http://h:1 is gone" in first
    assert "since 1970" not in second
    assert last == "east: etcd: e1 has the lease; in the set: e1, e2"
    e2.coordination = e1.coordination
    assert main(["list", *lab(tmp_path, e1, e2)]) == 0
    assert "east: etcd answers no node" in capsys.readouterr().out


REASON = (
    "took epoch 3.1; e2 was taken out of the set, as it made no progress for 5 s; queue 'orders' in vhost '/' is not on this node: "
    "run lrq-ha reinit e2 --discard"
)


def test_list_fits_a_terminal(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason, which matters most, stood at the far right of some 200 columns."""
    e1, e2 = serve(Node("east1", Role.RECOVERING)), serve(Node("east2", Role.STANDALONE))
    e1.opened, e1.epoch, e1.reason, e1.end = True, 0x1701, REASON, 123_456_789
    e1.peers = {"east2": {"lag_entries": 654_321, "lag_seconds": 3605.25, "log_bytes_left": (8 << 30) - 7_000_000}}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    options = lab(tmp_path, e1, e2)
    assert main(["list", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "NODE   GROUP  ROLE        EPOCH  IN SYNC    LOG END     LAG   LAG S  LOG LEFT",
        "east1  east   recovering  23.1   yes      123456789       -       -         -",
        "east2  east   standalone  3.1    no             120  654321  3605.2   8.0 GiB",
        "",
        "  east1  since 12:00:00: took epoch 3.1; e2 was taken out of the set, as it made",
        "      no progress for 5 s; queue 'orders' in vhost '/' is not on this node: run",
        "      lrq-ha reinit e2 --discard",
        "  east2  since 12:00:00: started",
    ]
    assert max(map(len, lines)) <= 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert main(["list", *options]) == 0
    assert f"  east1  since 12:00:00: {REASON}" in capsys.readouterr().out.splitlines(), "who reads it may look for words"


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0"), (1023, "1023"), (1024, "1.0 KiB"), (102_300, "99.9 KiB"), (102_349, "100 KiB"), (1023 << 20, "1023 MiB"), (8 << 30, "8.0 GiB")],
)
def test_sizes(size: int, shown: str) -> None:
    assert format_size(size) == shown


def test_what_a_node_says_cannot_write_to_the_terminal(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name a queue as its client did."""
    e1 = serve(Node("e1", Role.ACTIVE))
    named = "queue 'a\x1b[2J\nb' is full"
    shown = "queue 'a\\x1b[2J\\x0ab' is full"
    status = e1.status
    monkeypatch.setattr(e1, "status", lambda: status() | {"reason": named})
    assert main(["list", *lab(tmp_path, e1)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(shown)
    for done, code in ((True, 0), (False, 1)):
        e1.answer = done, named
        assert main(["remove", "e2", *lab(tmp_path, e1, Node("e2"))]) == code
        said = capsys.readouterr()
        assert shown in (said.out if done else said.err)


def test_list_as_json(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = serve(Node("e1")), Node("e2")
    assert main(["list", "--format", "json", *lab(tmp_path, e1, e2)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {"name": "e1", "group": "east", "http": e1.url, "answers": True, "failure": None, "status": e1.status()}
    assert (second["answers"], second["status"]) == (False, None)


def test_list_fails_if_no_node_answers(tmp_path: Path) -> None:
    assert main(["list", *lab(tmp_path, Node("e1"))]) == 1


def test_list_finds_a_node_and_its_peers_by_its_configuration(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    e1, e2 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2"))
    config = tmp_path / "e1.toml"
    config.write_text(
        '[node]\nname = "e1"\nid = 1\ngroup = "east"\n[broker]\nurl = "amqp://u:p@127.0.0.1:5672"\n[door]\nlisten = "127.0.0.1:5673"\n'
        f'[http]\nlisten = "0.0.0.0:{e1.port}"\n[[peers]]\nname = "e2"\nid = 2\ndoor = "amqp://u:p@127.0.0.1:5674"\nhttp = "{e2.url}"\n'
    )
    monkeypatch.setenv("LRQ_HA_CONFIG", str(config))
    assert main(["list"]) == 0
    by_environment = capsys.readouterr().out
    assert [line.split()[2] for line in by_environment.splitlines()[1:3]] == ["active", "ready"]
    assert main(["list", "--config", str(config)]) == 0
    assert capsys.readouterr().out == by_environment


def test_orders_need_nothing_that_a_configuration_names(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node to promote has lost its certificate, or a package: the sidecar does not start with that, and who promotes has no time for it."""
    node = serve(Node("e1"))
    config = tmp_path / "e1.toml"
    config.write_text(
        '[node]\nname = "e1"\nid = 1\ngroup = "east"\n[broker]\nurl = "amqps://u:p@127.0.0.1:5672"\n[door]\nlisten = "127.0.0.1:5673"\n'
        f'[http]\nlisten = "{node.url.removeprefix("http://")}"\n[tls]\nca = "gone.pem"\n[interceptors.gone]\n'
    )
    assert main(["promote", "e1", "--config", str(config)]) == 0
    assert main(["sidecar", "--check", "--config", str(config)]) == 1
    assert "gone.pem cannot be read" in capsys.readouterr().err


def test_nodes_that_were_not_paused_are_an_error(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1 = serve(Node("e1"))
    assert main(["pause", *lab(tmp_path, e1, Node("e2"))]) == 1
    said = capsys.readouterr()
    assert said.out == "done\n"
    assert said.err.startswith("e2: e2 does not answer")


def test_whoever_steps_down_is_not_the_only_one_that_is_paused(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a restart of its sidecar ended the pause: nobody else had been told."""
    e1, e2 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2"))
    where = lab(tmp_path, e1, e2)
    assert main(["demote", "--dry-run", *where]) == 0
    assert e2.told == []
    assert main(["demote", *where]) == 0
    assert e2.told == [("pause", True)]
    assert main(["demote", *lab(tmp_path, e1, Node("e3"), e2)]) == 1
    assert e2.told == [("pause", True)] * 2
    assert capsys.readouterr().err.startswith("e3: e3 does not answer")
    e1.answer = False, "not now"
    assert main(["demote", *where]) == 1
    assert e2.told == [("pause", True)] * 2
    assert e1.told == [("demote", 30.0)] * 4


def test_what_is_saved_is_its_owners_alone(serve: Callable[[Node], Node], tmp_path: Path) -> None:
    """It holds messages."""
    file = tmp_path / "tail.jsonl"
    assert main(["reinit", "e1", "--export", str(file), *lab(tmp_path, serve(Node("e1")))]) == 0
    assert file.read_text() == '{"kind": "publish"}\n'
    assert file.stat().st_mode & 0o777 == 0o600


def test_nothing_is_saved_where_the_node_would_not_begin_anew(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeated with --force, it would say that the file exists."""
    node = serve(Node("e2"))
    node.answer = (False, "no primary answers e2")
    options = ["reinit", "e2", "--export", str(tmp_path / "tail.jsonl"), *lab(tmp_path, node)]
    assert main(options) == 1
    assert capsys.readouterr().err == "lrq-ha: no primary answers e2\n"
    assert not (tmp_path / "tail.jsonl").exists()
    node.answer = (True, "done")
    assert main([*options, "--force"]) == 0
    assert node.told == [("reinit", False, True), ("reinit", True, True), ("reinit", True, False)]


@pytest.mark.parametrize("error", [LrqError("entries 7 to 9 are not in the stream"), RuntimeError("entries 7 to 9 are not in the stream")])
def test_a_tail_that_breaks_off_says_why(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A second answer came in the middle of the first: garbage that named nothing."""
    node = serve(Node("e2"))
    node.error = error
    assert main(["reinit", "e2", "--export", str(tmp_path / "tail.jsonl"), *lab(tmp_path, node)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("lrq-ha: e2 cannot give all of its entries, so nothing was saved, and nothing is deleted: ")
    assert "entries 7 to 9 are not in the stream" in said
    assert not (tmp_path / "tail.jsonl").exists()
    assert ("reinit", False, False) not in node.told
    assert "the tail cannot be given: entries 7 to 9 are not in the stream" in caplog.messages


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_file_that_cannot_be_written(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], dry_run: tuple[str, ...]
) -> None:
    """A dry run said that all was well."""
    node, file = serve(Node("e2")), tmp_path / "nowhere" / "tail.jsonl"
    assert main(["reinit", "e2", "--export", str(file), *dry_run, *lab(tmp_path, node)]) == 1
    assert capsys.readouterr().err == f"lrq-ha: {file} cannot be written: No such file or directory. Name another file\n"
    assert not node.told
    file.parent.mkdir()
    assert main(["reinit", "e2", "--export", str(file), "--dry-run", *lab(tmp_path, node)]) == 0
    assert not file.exists()


def test_nodes_that_cannot_be_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LRQ_HA_CONFIG", raising=False)
    assert main(["list"]) == 1
    assert "no nodes are known" in capsys.readouterr().err
    assert main(["list", "--dir", "nowhere"]) == 1
    assert "nowhere/lab.json cannot be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "lab.json").write_text("[]")
    assert main(["list", "--dir", "."]) == 1
    assert "is not the description of a lab" in capsys.readouterr().err


def test_promote_prints_what_the_node_says(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = Node("e1"), serve(Node("e2"))
    options = lab(tmp_path, e1, e2)
    assert main(["promote", "e2", "--down", "e1,", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == "done\n"
    e2.answer = (False, "e2 was not in sync")
    assert main(["promote", "e2", "--force", *options]) == 1
    assert capsys.readouterr().err == "lrq-ha: e2 was not in sync\n"
    assert e2.told == [("promote", ["e1"], False, False, True), ("promote", [], True, False, False)]


def test_promote_says_what_the_node_that_is_down_knows_of_it(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its broker is dead, its sidecar lives, and knows since when nothing was confirmed: what an operator is told to compare with."""
    e1, e2, e3 = serve(Node("e1", Role.STANDALONE)), serve(Node("e2")), Node("e3")
    e1.reason = "lrq@127.0.0.1:5672 vhost lrq cannot be reached"
    options = lab(tmp_path, e1, e2, e3)
    known = f"the sidecar of e1 answers: it is standalone since 12:00:00 ({e1.reason}), and has confirmed nothing since then"
    for dry_run in (["--dry-run"], []):
        assert main(["promote", "e2", "--down", "e3", "e1,e1", *dry_run, *options]) == 0
        assert capsys.readouterr().out == f"done; {known}\n"
    e1.role, e1.reason = Role.ACTIVE, ""
    assert main(["promote", "e2", "--down", "e1", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == "done; the sidecar of e1 answers: it is active since 12:00:00, and so NOT down\n"
    e1.role, e1.since = Role.CATCH_UP, ""
    assert main(["promote", "e2", "--down", "e1", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == "done; the sidecar of e1 answers: it is catch-up\n"


def test_promote_does_not_wait_for_a_node_that_does_not_answer(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    e1, e2 = Node("e1"), serve(Node("e2"))
    assert list_nodes.ASKING_TIMEOUT_S == 2.0
    monkeypatch.setattr(list_nodes, "ASKING_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", e1.port)):
        began = time.monotonic()
        assert main(["promote", "e2", "--down", "e1", *lab(tmp_path, e1, e2)]) == 0
        assert time.monotonic() - began < asking.STATUS_TIMEOUT_S
    assert capsys.readouterr().out == "done\n"


def test_two_that_say_that_they_are_primary(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the older one hears of the newer. It got the orders, if it was named first, and the newer one's backups were shown by its word."""
    e1, e2 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2", Role.ACTIVE))
    e2.epoch, e1.peers, e2.peers = 0x402, {"e3": {"lag_entries": 77}}, {"e3": {"lag_entries": 3}}
    options = lab(tmp_path, e1, e2, serve(Node("e3")))
    both = "several nodes of group east say that they are primary: e1 (epoch 3.1), e2 (epoch 4.2); the highest epoch counts\n"
    assert main(["list", *options]) == 0
    said = capsys.readouterr()
    assert said.err == both
    assert "    3  " in said.out.splitlines()[3]
    assert "77" not in said.out
    assert main(["remove", "e3", *options]) == 0
    assert capsys.readouterr().err == both
    assert (e1.told, e2.told) == ([], [("remove", "e3", False)])


def test_a_list_that_cannot_be_written(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    options = lab(tmp_path, serve(Node("e1")))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["list", *options]) == 1
    assert capsys.readouterr().err == "lrq-ha: standard output cannot be written: No space left on device\n"


def test_a_pause_is_shown_while_there_is_a_primary(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, it was only when nobody led: when it was too late."""
    e1, e2 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2"))
    e2.paused = True
    assert main(["list", *lab(tmp_path, e1, e2)]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.endswith("started")
    assert second.endswith("started; paused: takes no epoch by itself until lrq-ha resume")


@pytest.mark.parametrize("nodes", [{}, {"e1": {"http": "nonsense"}}])
def test_a_lab_without_nodes_that_can_be_asked(nodes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab.json").write_text(json.dumps({"groups": {"east": {"nodes": nodes}}}))
    for command in (["list"], ["promote", "e1"], ["pause"]):
        assert main([*command, "--dir", str(tmp_path)]) == 1
        assert "lab.json is not the description of a lab" in capsys.readouterr().err


def test_what_does_not_speak_http_is_shown_as_such(tmp_path: Path, not_http: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a door does, whose port stands in the place of the other."""
    e1 = Node("e1")
    e1.url = not_http
    options = lab(tmp_path, e1)
    assert main(["list", *options]) == 1
    assert f"tried {e1.url}/status: the answer is not HTTP, or not whole" in capsys.readouterr().out
    assert main(["promote", "e1", *options]) == 1
    assert "the answer is not HTTP, or not whole" in capsys.readouterr().err


def test_promote_of_an_unknown_or_silent_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = Node("e1"), Node("e2")
    options = lab(tmp_path, e1, e2)
    assert main(["promote", "w1", *options]) == 1
    assert capsys.readouterr().err == "lrq-ha: there is no node w1. Known nodes: e1, e2\n"
    assert main(["promote", "e2", "--down", "e7", *options]) == 1
    assert capsys.readouterr().err == "lrq-ha: there is no node e7. Known nodes: e1, e2\n"
    assert main(["promote", "e2", *options]) == 1
    assert f"e2 does not answer (POST {e2.url}/promote: connection refused)" in capsys.readouterr().err


def test_remove_is_told_to_the_primary(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e1, e2 = serve(Node("e1", Role.ACTIVE)), Node("e2")
    options = lab(tmp_path, e1, e2)
    assert main(["remove", "e2", *options]) == 0
    assert e1.told == [("remove", "e2", False)]
    e1.role = Role.RECOVERING
    assert main(["remove", "3", *options]) == 0, "it waits for one that nobody has configured any more"
    assert e1.told[1:] == [("remove", "3", False)]
    assert main(["remove", "e3", *options]) == 1
    assert capsys.readouterr().err == "lrq-ha: there is no node e3. Known nodes: e1, e2\n"
    e1.role = Role.CATCH_UP
    assert main(["remove", "e2", *options]) == 1
    assert "group east has no primary that answers" in capsys.readouterr().err


# ---- definitions -----------------------------------------------------------------------------------------------------


def test_differing_definitions_are_listed_and_taken(serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e2 = serve(Node("e2"))
    options = lab(tmp_path, e2)
    assert main(["definitions", "diff", "e2", *options]) == 0
    assert capsys.readouterr().out == "e2 has what the log has\n"
    e2.differences = [{"object": "user 'a\nb'", "how": "is here only"}]
    assert main(["definitions", "diff", "e2", *options]) == 1
    assert capsys.readouterr().out == "user 'a\\x0ab' is here only\n"
    assert main(["definitions", "take", "e2", "--dry-run", *options]) == 0
    assert main(["definitions", "take", "e2", *options]) == 0
    assert e2.told == [("take", True), ("take", False)]
    e2.answer = False, "e2 is primary"
    assert main(["definitions", "take", "e2", *options]) == 1
    assert main(["definitions", "diff", "e2", *lab(tmp_path, Node("e2"))]) == 1
    assert "e2 does not answer" in capsys.readouterr().err


def test_a_dry_switchover_names_logins_that_only_one_node_has(
    serve: Callable[[Node], Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e1, e2, e3 = serve(Node("e1", Role.ACTIVE)), serve(Node("e2")), serve(Node("e3"))
    options = lab(tmp_path, e1, e2, e3)
    e1.users, e2.vhosts = {"app": ["b", "management"], "new": []}, ["/", "old"]
    assert main(["switchover", "--dry-run", *options]) == 0
    said = capsys.readouterr().out
    assert "e1 and e2 differ: only e2 has the vhosts 'old', only e1 has the users 'new', other tags have the users 'app'" in said
    assert "e1 and e3 differ: only e1 has the users 'new'" in said
    e1.users = e2.users
    assert main(["switchover", "e3", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == "done; e1 and e3 have equal users and vhosts\n"
    e3.error = LrqError("its broker's management API is not reachable")
    assert main(["switchover", "e3", "--dry-run", *options]) == 0
    assert "users and vhosts of e3 were not compared: its broker's management API is not reachable" in capsys.readouterr().out
    assert main(["switchover", "e2", *options]) == 0
    assert capsys.readouterr().out == "done\n", "it is compared before, not in the end"
