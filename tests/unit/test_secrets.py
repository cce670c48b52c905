"""References to secrets in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_config import MINIMAL

from lrq_ha.cli.main import main
from lrq_ha.sidecar.config import ConfigError, load, read, secret_files
from lrq_ha.sidecar.secrets import UNREAD, resolve


def write(folder: Path, reference: str) -> Path:
    (folder / "e1.toml").write_text(MINIMAL.replace(":secret@", f":{reference}@"))
    (folder / "e1.toml").chmod(0o600)
    return folder / "e1.toml"


@pytest.mark.parametrize("reference", ["${LRQ_PASSWORD}", "${credential:lrq}", "${file:passwords/lrq}"])
def test_a_password_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str) -> None:
    """With characters that an address would take for its own."""
    for folder in ("passwords", "credentials"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lrq").write_text("p/w@:1${x}\nthe former one\n")
    monkeypatch.setenv("LRQ_PASSWORD", "p/w@:1${x}")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    config = load(write(tmp_path, reference))
    assert config.credentials.password == b"p/w@:1${x}"
    assert config.broker_address("/").password == "p/w@:1${x}"


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("${LRQ_NONE}", "is not set"), ("${credential:lrq}", "is not set"), ("${file:none}", "cannot be read: No such file or directory"),
        ("${file:empty}", "is not set or empty"),
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reference: str, why: str
) -> None:
    """A sidecar does not start. An operator's command, which may run without the secrets, finds the nodes."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    (tmp_path / "empty").touch()
    path = write(tmp_path, reference)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"broker.url: {reference} {why}" in str(caught.value)
    assert "docs/configuration.md" in str(caught.value)
    assert read(path).credentials.password == UNREAD.encode()
    assert main(["sidecar", "--config", str(path), "--check"]) == 1
    assert reference in capsys.readouterr().err


def test_every_string_is_looked_at_and_nothing_else_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "h")
    tables = {"a": {"b": ["${HOST}:1", 2, True], "c": "$${HOST} $HOST {HOST} ^x$"}, "d": [{"e": "http://${HOST}"}]}
    assert resolve(tables, tmp_path) == {"a": {"b": ["h:1", 2, True], "c": "${HOST} $HOST {HOST} ^x$"}, "d": [{"e": "http://h"}]}


def test_a_file_of_secrets_that_others_may_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lrq").write_text("secret\n")
    (tmp_path / "lrq").chmod(0o644)
    path = write(tmp_path, "${file:lrq}")
    assert secret_files(path, load(path)) == [path, tmp_path / "lrq"]
    assert main(["sidecar", "--config", str(path), "--check"]) == 0
    assert f"{tmp_path / 'lrq'} holds secrets, and other users may use it (its mode is 0644): run: chmod go-rwx" in capsys.readouterr().err
