"""`lrq-ha edit-config`: what it changes, says, and refuses; a file that it refuses stays as it is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from node_config import MINIMAL

from lrq_ha.cli.main import main
from lrq_ha.sidecar import config as configuration

FILE = f'# the first node\n{MINIMAL}\n[replication]\nmode = "available"  # or strict\nbackup_timeout_s = 7.5\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "e1.toml"
    path.write_text(FILE)
    path.chmod(0o640)
    return path


def edit(file: Path, *arguments: str) -> int:
    return main(["edit-config", "--config", str(file), *arguments])


def test_keys_are_changed_and_all_else_stays(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edit(file, "-s", "door.stop_timeout_s=20", "-s", "replication.mode=strict", "--unset", "replication.backup_timeout_s") == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"{file}: changed door.stop_timeout_s, replication.mode, replication.backup_timeout_s",
        "  door.stop_timeout_s: counts after `lrq-ha reload`",
        "  replication.mode, replication.backup_timeout_s: count after a restart of the sidecar",
    ]
    text = file.read_text()
    assert text.startswith("# the first node\n")
    assert 'mode = "strict"  # or strict\n' in text
    assert "backup_timeout_s" not in text
    config = configuration.read(file)
    assert (config.door.stop_timeout_s, config.replication.mode) == (20, "strict")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(file.parent) == ["e1.toml"]


def test_a_table_that_the_file_lacks_is_added(file: Path) -> None:
    assert edit(file, "-s", "receive.on_backlog=hold", "-s", "http.probes='127.0.0.1:9000'") == 0
    config = configuration.read(file)
    assert (config.receive.on_backlog, config.http.probes) == ("hold", "127.0.0.1:9000")


def test_what_would_change(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edit(file, "--dry-run", "-s", "replication.mode=strict") == 0
    assert "would change replication.mode" in capsys.readouterr().out
    assert file.read_text() == FILE
    assert edit(file, "-s", "replication.mode=available") == 0
    assert "stays as it is" in capsys.readouterr().out
    assert file.read_text() == FILE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no key is named"),
        (("-s", "door.stop_timeout_s"), "is not KEY=VALUE"),
        (("-s", "mode=strict"), "is no key of a table. Write it as TABLE.KEY"),
        (("-s", "door..x=1"), "is no key of a table"),
        (("-s", "replication.mode=strange"), "replication.mode: Input should be 'available' or 'strict'"),
        (("-s", "replication.modus=strict"), "replication.modus: unknown key; allowed here:"),
        (("-s", "door.stop_timeout_s=soon", "-s", "replication.mode=strict"), "door.stop_timeout_s"),
        (("-s", "node.name.first=x"), "node.name.first: name is no table. Change it with an editor"),
        (("--unset", "replication.completion"), "has no key replication.completion"),
        (("--unset", "receive.bytes_max"), "receive is not in the file"),
        (("--unset", "node.id"), "node.id: missing"),
    ],
)
def test_what_is_refused(file: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert edit(file, *arguments) == 1
    assert said in capsys.readouterr().err
    assert file.read_text() == FILE


def test_no_secret_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edit(file, "-s", "broker.url=amqp://lrq:s3same@127.0.0.1:5672") == 0
    assert edit(file, "-s", "broker.url=http://lrq:s3same@127.0.0.1:5672") == 1
    said = capsys.readouterr()
    assert "s3same" not in said.out + said.err
    assert "changed broker.url" in said.out


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert edit(link, "-s", "replication.mode=strict") == 0
    assert (link.is_symlink(), configuration.read(file).replication.mode) == (True, "strict")


def test_a_file_that_is_no_configuration_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    for text, said in ((None, "cannot be read"), ("[node\n", "is not TOML"), ("[node]\n", "node.name: missing")):
        if text is not None:
            broken.write_text(text)
        assert edit(broken, "-s", "replication.mode=strict") == 1
        assert said in capsys.readouterr().err
        assert text is None or broken.read_text() == text


def test_a_key_that_waits_for_another_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the door that needs a larger log counts with the log, after a restart, as `lrq-ha reload` says, too."""
    log_bytes_max = configuration.read(file).replication.log_bytes_max
    changes = ("-s", f"door.transaction_bytes_max={log_bytes_max}", "-s", f"replication.log_bytes_max={100 * log_bytes_max}")
    assert edit(file, *changes) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  door.transaction_bytes_max, replication.log_bytes_max: count after a restart of the sidecar"
    ]


def test_a_disk_that_is_full(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    assert edit(file, "-s", "replication.mode=strict") == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert (file.read_text(), os.listdir(file.parent)) == (FILE, ["e1.toml"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_takes_no_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.chmod(0o500)
    try:
        assert edit(file, "-s", "replication.mode=strict") == 1
    finally:
        file.parent.chmod(0o700)
    assert "Run it as the owner of the file and its folder" in capsys.readouterr().err
    assert file.read_text() == FILE
