"""The command line as a whole: help, exit codes, one line per error, no passwords in logs or errors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lrq_ha.cli import nodes
from lrq_ha.cli.main import main
from lrq_ha.cli.sidecar import redact, set_up_logging
from lrq_ha.sidecar.config import sample


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    for part in ("sidecar", "lab", "list", "promote", "remove", "demo", "examples:", "exit codes:"):
        assert part in text


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["promote"], ["sidecar"], ["list", "--format", "xml"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    assert "usage: lrq-ha" in capsys.readouterr().err


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes, "find_targets", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == ""


def test_sample_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "--sample"]) == 0
    text = capsys.readouterr().out
    assert text == sample()
    (tmp_path / "e1.toml").write_text(text)
    assert main(["sidecar", "--config", str(tmp_path / "e1.toml"), "--check"]) == 0
    assert "is valid: node e1 (id 1) of group east; peers: e2; sites: west" in capsys.readouterr().out


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
        ("http://127.0.0.1:8080/status", "http://127.0.0.1:8080/status"),
    ],
)
def test_passwords_are_masked(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_logs_have_level_and_logger_and_no_password(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logging("info")
    logging.getLogger("lrq_ha.door").info("to %s", "amqp://lrq:SECRET@h:1")
    text = capsys.readouterr().err
    assert "INFO lrq_ha.door: to amqp://lrq:***@h:1" in text
