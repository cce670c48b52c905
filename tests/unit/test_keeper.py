"""A lab that is asked: one that does not answer is not taken for one that is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lrq_ha.lab import Lab, LabError, keeper
from lrq_ha.lab.errors import NoLab


def test_a_keeper_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lab runs: nobody may use its folder for another one."""
    with pytest.raises(NoLab, match="No lab runs in"):
        keeper.ask(tmp_path, do="list")
    monkeypatch.setattr(keeper, "_ANSWER_TIMEOUT_S", 0.01)
    (tmp_path / "kept").touch()
    with socket.socket(socket.AF_UNIX) as listener, keeper._address(tmp_path) as address:
        listener.bind(address)
        listener.listen()
        for look in (lambda: keeper.ask(tmp_path, do="list"), lambda: keeper.wait_gone(tmp_path, 60.0), Lab({"east": 1}, tmp_path).prepare):
            with pytest.raises(LabError, match=r"has not answered within 0\.01 s") as caught:
                look()
            assert not isinstance(caught.value, NoLab)
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize("group", ["ea st", "-east", "east_1", ""])
def test_a_group_is_named_as_a_sidecar_takes_it(group: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="A group's name has 1 to 64 letters, digits, dots or hyphens"):
        Lab({group: 1}, tmp_path)
    Lab({"north-east.2": 1}, tmp_path)


@pytest.mark.parametrize("below", ["", "lab"], ids=["a file", "below a file"])
def test_what_cannot_be_a_folder_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    directory = tmp_path / "file" / below
    with pytest.raises(LabError, match=f"{directory} cannot be a lab's folder: (File exists|Not a directory)"):
        Lab({"east": 1}, directory).prepare()
    assert (tmp_path / "file").read_text() == "kept"
