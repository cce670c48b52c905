"""The command line as a whole: help, exit codes, one line per error, no passwords in logs or errors."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.amqp.connection import Connection
from lrq_ha.cli import list_nodes
from lrq_ha.cli.adopt import _dies_by_key, read_definitions
from lrq_ha.cli.flood import WARNINGS_MAX
from lrq_ha.cli.main import main
from lrq_ha.cli.sidecar import redact, set_up_logging
from lrq_ha.errors import LrqError
from lrq_ha.sidecar import process
from lrq_ha.sidecar.config import sample

NOBODY = "amqp://app:SECRET@127.0.0.1:1"
QUEUE = {"vhost": "/", "name": "orders", "durable": True, "auto_delete": False, "arguments": {}}
DEFINITIONS: dict[str, list[dict[str, Any]]] = {
    "vhosts": [{"name": "/"}],
    "exchanges": [QUEUE | {"name": "books", "type": "topic"}],
    "queues": [QUEUE],
    "bindings": [
        {"vhost": "/", "source": "books", "destination": "orders", "destination_type": "queue", "routing_key": "#", "arguments": {}},
    ],
    "policies": [{"vhost": "/", "pattern": "^orders", "apply-to": "all", "priority": 0, "definition": {}}],
}
ENTRY = {
    "epoch": "1.1", "sequence": 7, "kind": "publish", "user": "app", "replication_id": "shop/3",
    "vhost": "/", "exchange": "", "routing_key": "orders", "header": base64.b64encode(b"header").decode(), "body": "",
}  # fmt: skip


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    for part in ("sidecar", "lab", "list", "promote", "remove", "demo", "examples:", "exit codes:"):
        assert part in text


@pytest.mark.parametrize("command", ["adopt", "reinit", "republish"])
def test_addresses_in_examples_have_a_password(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, it would be the client's default, which is refused."""
    exit_code(command, "--help")
    addresses = re.findall(r"amqp://\S+", capsys.readouterr().out)
    assert addresses
    assert all(re.match(r"amqp://\w+:\w+@", address) for address in addresses)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["promote"], ["sidecar"], ["list", "--format", "xml"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    assert "usage: lrq-ha" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["switchover", "demote", "renew"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "1e12", "-4000", "3601", "soon"])
def test_a_timeout_that_no_node_takes_is_a_wrong_argument(command: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, f"--timeout={seconds}") == 2
    assert f"argument --timeout: '{seconds}' is not a number of seconds from 0 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("lab up --group", "east=²"), ("demo --flights", "-3")])
def test_numbers_that_are_none_are_wrong_arguments(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*f"{option}={value}".split()) == 2
    assert f"'{value}' is not " in capsys.readouterr().err


def test_a_group_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one counted, without a word."""
    assert main(["lab", "up", "--dir", str(tmp_path), "--broker", "2.8", "--group", "east=2", "--group", "east=1"]) == 1
    assert "A group is named twice" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "--report", str(tmp_path / "file"), "--broker", "2.8"]) == 1
    assert "file cannot be the report's folder: File exists" in capsys.readouterr().err


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(list_nodes, "find_targets", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == ""


def test_sample_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "--sample"]) == 0
    text = capsys.readouterr().out
    assert text == sample()
    (tmp_path / "e1.toml").write_text(text)
    assert main(["sidecar", "--config", str(tmp_path / "e1.toml"), "--check"]) == 0
    assert "is valid: node e1 (id 1) of group east; peers: e2; sites: west" in capsys.readouterr().out


def test_a_file_with_passwords_that_others_may_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check and the start say so, and go on."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(process, "run", lambda config, file: 0)
    file = tmp_path / "e1.toml"
    file.write_text(sample())
    said = f"{file} holds secrets, and other users may use it (its mode is {{}}): run: chmod go-rwx {file}\n"
    for mode in (0o644, 0o640, 0o600):
        file.chmod(mode)
        for options, level in ((["--check"], "lrq-ha: warning: "), ([], " WARNING lrq_ha.config: ")):
            assert main(["sidecar", "--config", str(file), *options]) == 0
            told = capsys.readouterr().err
            assert told.endswith(level + said.format(f"{mode:04o}")) if mode != 0o600 else not told


def test_a_bad_configuration_is_one_line_without_the_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e1.toml").write_text(sample().replace("amqp://lrq:SECRET@127", "http://lrq:SECRET@127"))
    assert main(["sidecar", "--config", str(tmp_path / "e1.toml"), "--check"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("lrq-ha: ")
    assert text.count("\n") == 1
    assert "broker.url" in text
    assert "SECRET" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to amqp://lrq:p/w@127.0.0.1:5672 now", "to amqp://lrq:***@127.0.0.1:5672 now"),
        ("amqp://a:p@x@h:1 'amqp://b:q@i:2'", "amqp://a:***@h:1 'amqp://b:***@i:2'"),
        ("lrq:pw@host", "lrq:***@host"),
        ("url=amqp://a:b@h,amqp://c:d@i", "url=amqp:***@i"),
        ("amqp://USER:PASSWORD@HOST:PORT", "amqp://USER:PASSWORD@HOST:PORT"),
        ("amqp://USER:PASSWORD@b:SECRET@h", "amqp://USER:***@h"),
        ("http://127.0.0.1:8080/status", "http://127.0.0.1:8080/status"),
    ],
)
def test_passwords_are_masked(text: str, shown: str) -> None:
    assert redact(text) == shown


@given(
    st.sampled_from(["", "to ", "url=", "amqp://", "url=amqp://", "/", "'amqps://", "amqp://a:b@h,amqp://"]),
    st.lists(st.sampled_from(["amqp://", "a", ":", "/", "@", "x=", "?", "#", "SECRET"]), max_size=9),
)
def test_nothing_of_a_password_is_shown(before: str, password: list[str]) -> None:
    assert "SECRET" not in redact(f"{before}lrq:SECRET{''.join(password)}@h:1/v it failed")


def test_a_line_as_long_as_a_stranger_likes() -> None:
    """One that holds the whole sidecar up would cost all of its clients: with the pattern that stood here before, this took minutes."""
    for line in ("x" * 100_000 + " @", "a:" * 50_000 + "@", ":@" * 50_000, "/" * 100_000 + ":@", "w://" * 30_000 + "@"):
        began = time.process_time()
        redact(line)
        assert time.process_time() - began < 2.0


def test_logs_have_level_and_logger_and_no_password(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logging("info")
    logging.getLogger("lrq_ha.door").info("to %s", "amqp://lrq:SECRET@h:1")
    text = capsys.readouterr().err
    assert "INFO lrq_ha.door: to amqp://lrq:***@h:1" in text


def test_a_flood_of_warnings_does_not_fill_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logging("info")
    for number in range(10 * WARNINGS_MAX):
        logging.getLogger("lrq_ha.door").warning("client %d is refused", number)
    assert capsys.readouterr().err.count("is refused") == WARNINGS_MAX


def test_a_name_makes_no_line_of_its_own_in_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logging("info")
    try:
        raise ValueError
    except ValueError:
        logging.getLogger("lrq_ha.door").exception("queue '%s' is odd", "a\nERROR lrq_ha.core: \x1b[31mdiverged\x9b")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("queue 'a\\x0aERROR lrq_ha.core: \\x1b[31mdiverged\\x9b' is odd")
    assert others[0].startswith("Traceback"), "which has its lines"


@pytest.mark.parametrize(
    "url",
    ["amqp://lrq:SECRET/more@h:1", "amqp://lrq:1234/SECRET@h:1", "amqp://lrq:1234?SECRET@h:1", "amqp://lrq:1234#SECRET@h:1",
     "amqp://lrq:1234@SECRET/more@h:1", "amqp://lrq:SECRET\u2100@h:1", "http://lrq:SECRET@h:1"],
)  # fmt: skip
def test_the_address_of_a_door_is_not_shown(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps(DEFINITIONS))
    for command in (["republish", str(file)], ["adopt", "--definitions", str(file)]):
        assert main([*command, "--to", url]) == 1
        text = capsys.readouterr().err
        assert "Write amqp://USER:PASSWORD@HOST:PORT" in text
        assert "SECRET" not in text
        assert "1234" not in text


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind, given in DEFINITIONS.items() for key in given[0]],
)
def test_definitions_that_lack_something_are_refused_before_anything_is_declared(
    kind: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(read_definitions(json.dumps(DEFINITIONS))[0].bindings) == 1
    for row in ({name: value for name, value in DEFINITIONS[kind][0].items() if name != key}, DEFINITIONS[kind][0] | {key: None}):
        (tmp_path / "definitions.json").write_text(json.dumps(DEFINITIONS | {kind: [row]}))
        assert main(["adopt", "--definitions", str(tmp_path / "definitions.json"), "--to", NOBODY]) == 1
        text = capsys.readouterr().err
        assert text.startswith("lrq-ha: these are not a broker's definitions")
        assert key in text


def bound(source: str, to: str, kind: str = "queue") -> dict[str, Any]:
    return {"vhost": "/", "source": source, "destination": to, "destination_type": kind, "routing_key": "#", "arguments": {}}


def test_queues_and_exchanges_have_names_of_their_own() -> None:
    """A queue beside an auto-delete exchange of its name was left out, and lost at a failover. So were such exchanges, which are replicated."""
    exchange = DEFINITIONS["exchanges"][0]
    passing = exchange | {"name": "orders", "auto_delete": True}
    gone = QUEUE | {"name": "books", "auto_delete": True}
    bindings = [*DEFINITIONS["bindings"], bound("orders", "orders"), bound("orders", "books", "exchange"), bound("amq.topic", "books", "exchange")]
    whole = DEFINITIONS | {
        "exchanges": [exchange, passing, exchange | {"name": "amq.topic"}],
        "queues": [QUEUE, gone, QUEUE | {"name": "amq.gen-1"}],
        "bindings": [*bindings, bound("books", "books"), bound("books", "amq.gen-1"), bound("books", "exclusive")],
    }
    [found] = read_definitions(json.dumps(whole))
    assert [queue["name"] for queue in found.queues] == ["orders"]
    assert [exchange["name"] for exchange in found.exchanges] == ["books", "orders"]
    assert found.bindings == bindings, "but for those of queues that are not replicated"
    assert found.unknown == []


def test_what_is_bound_to_an_exchange_that_is_not_there() -> None:
    """RabbitMQ leaves internal ones out: their bindings were declared, and refused on the backups."""
    lost = [bound("inner", "orders"), bound("books", "inner", "exchange"), bound("inner", "amq.fanout", "exchange")]
    [found] = read_definitions(json.dumps(DEFINITIONS | {"bindings": [*DEFINITIONS["bindings"], *lost]}))
    assert found.bindings == DEFINITIONS["bindings"]
    assert found.unknown == [("inner", each) for each in lost]


def policy(pattern: str, priority: int = 0, /, to: str = "queues", **definition: str) -> dict[str, Any]:
    where = {f"dead-letter-{key}": value for key, value in definition.items()}
    return {"pattern": pattern, "priority": priority, "apply-to": to, "definition": where}


KEYED = {"exchange": "dlx", "routing-key": "dead"}


@pytest.mark.parametrize(
    ("arguments", "policies", "by_key"),
    [
        ({}, [], False),
        ({"x-dead-letter-exchange": "dlx"}, [], True),
        ({"x-dead-letter-exchange": ""}, [], True),
        ({"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "dead"}, [], False),
        ({"x-dead-letter-exchange": "dlx"}, [policy("orders", **{"routing-key": "dead"})], False),
        ({"x-dead-letter-routing-key": "dead"}, [policy("orders", exchange="dlx")], False),
        ({}, [policy("rder", exchange="dlx")], True),
        ({}, [policy("^rder", exchange="dlx")], False),
        ({}, [policy("^orders$", 2, exchange="dlx"), policy(".*", 1, **KEYED)], True),
        ({}, [policy("^orders$", 1, exchange="dlx"), policy(".*", 2, **KEYED)], False),
        ({}, [policy("orders", to="all", exchange="dlx")], True),
        ({}, [policy("orders", to="classic_queues", exchange="dlx")], True),
        ({"x-queue-type": "quorum"}, [policy("orders", to="classic_queues", exchange="dlx")], False),
        ({}, [policy("orders", to="exchanges", exchange="dlx")], False),
        ({}, [policy("^(?<n>orders)$", exchange="dlx")], True),  # nobody here knows whether it applies
        ({}, [policy("[[:alpha:]]", exchange="dlx")], True),
        ({}, [policy("orders\\z", 1, **KEYED)], False),
        ({}, [policy("orders\\z", 2, exchange="dlx"), policy("orders", 1, **KEYED)], True),
        ({}, [policy("orders\\z", 1, exchange="dlx"), policy("orders", 2, **KEYED)], False),
        ({}, [policy("orders\\z", 2, **KEYED), policy("orders", 1, exchange="dlx")], True),
    ],
)
def test_whose_dead_letters_go_by_their_routing_key(arguments: dict[str, str], policies: list[dict[str, Any]], by_key: bool) -> None:
    assert _dies_by_key(QUEUE | {"arguments": arguments}, policies) is by_key


def test_what_sidecars_write_is_not_adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "definitions.json").write_text(json.dumps(DEFINITIONS | {"vhosts": [{"name": "/"}, {"name": "lrq"}]}))
    arguments = ["adopt", "--definitions", str(tmp_path / "definitions.json"), "--to", NOBODY]
    assert main([*arguments, "--vhost", "lrq"]) == 1
    assert "vhost lrq holds what sidecars write, which is not adopted" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "cannot be reached" in capsys.readouterr().err


NASTY = "a\x1b[2Jb\nlrq-ha: done\x9b\u2028\udce9"
SHOWN = "a\\x1b[2Jb\\x0alrq-ha: done\\x9b\\u2028\\udce9"


def test_names_cannot_write_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever may declare a queue could clear the operator's screen, or write lines of his own."""

    class Broker:
        async def channel(self) -> Broker:
            return self

        async def queue_declare(self, *_: object, **__: object) -> tuple[str, int, int]:
            return NASTY, 3, 0

        async def close(self) -> None: ...

    async def connect(*_: object, **__: object) -> Broker:
        return Broker()

    monkeypatch.setattr(Connection, "open", connect)
    (tmp_path / "definitions.json").write_text(json.dumps(DEFINITIONS | {"queues": [QUEUE | {"name": NASTY}], "bindings": [bound(NASTY, NASTY)]}))
    assert main(["adopt", "--definitions", str(tmp_path / "definitions.json"), "--to", NOBODY, "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert f"  {SHOWN}: 3 messages\n" in out
    assert f"exchange {SHOWN} is not in the definitions" in out
    assert out.isascii()
    assert sum(line.startswith("lrq-ha") for line in out.splitlines()) == 0


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise LrqError(f"queue {NASTY}")

    monkeypatch.setattr("lrq_ha.cli.adopt.read_definitions", fails)
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    assert main(["adopt", "--to", NOBODY]) == 1
    assert capsys.readouterr().err == "lrq-ha: queue a\\x1b[2Jb lrq-ha: done\\x9b \\udce9\n"


def test_definitions_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As an archive of them."""
    archive = tmp_path / "definitions.tar.gz"
    archive.write_bytes(b"\x1f\x8b\x08")
    assert main(["adopt", "--definitions", str(archive), "--to", NOBODY]) == 1
    assert capsys.readouterr().err == f"lrq-ha: {archive} cannot be read: it is not text. Give the output of `rabbitmqctl export_definitions -`\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(archive.read_bytes())))
    assert main(["adopt", "--to", NOBODY]) == 1
    assert capsys.readouterr().err == "lrq-ha: standard input cannot be read: it is not text. Give the output of `rabbitmqctl export_definitions -`\n"


WRONG = (("header", "no base64"), ("body", 5), ("sequence", "many"), ("sequence", math.inf))


@pytest.mark.parametrize(("key", "value"), [*((key, None) for key in ENTRY), *WRONG])
def test_a_line_of_a_tail_that_was_cut_by_hand_is_named(key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None: without that key."""
    given = {name: each for name, each in (ENTRY | {key: value}).items() if each is not None}
    tail = tmp_path / "tail.jsonl"
    tail.write_text(json.dumps({"kind": "dequeue"}) + "\n" + json.dumps(given))
    assert main(["republish", str(tail), "--to", NOBODY]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"lrq-ha: {tail}, line 2: not an entry of a tail (")
    assert text.count("\n") == 1
