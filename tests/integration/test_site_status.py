"""Operators see how far a site is: its lag while it is away, and that the lag is over when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from load import eventually, set_up, told
from patience import PATIENT_DOOR
from test_sites import Source, arrived, follows, fresh

from lrq_ha.cli.main import main
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

IN_STEP = (0, 0, 0.0)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    found = Lab({"east": 1, "west": 1}, tmp_path_factory.mktemp("sites") / "lab", broker_version, sites={"east": ["west"]}, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


def session_of(lab: Lab, client: str) -> dict[str, Any]:
    return dict(told(lab, "e1")["sessions"]["west"]["clients"].get(client, {}))


def lag_of(lab: Lab, client: str) -> tuple[Any, ...]:
    session = session_of(lab, client)
    return session["lag_entries"], session["lag_bytes"], session["lag_seconds"]


def listed(lab: Lab, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line that `lrq-ha list` prints."""
    assert main(["list", "--dir", str(lab.directory)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.quick
def test_the_lag_of_a_site_grows_while_it_is_away_and_is_over_when_it_is_back(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(lab, name := fresh("lag"))
    follows(lab, name, "west")
    source.send(3, "west")
    arrived(lab, "w1", source)
    eventually("the site in step", lambda: lag_of(lab, name) == IN_STEP, 60, seen=lambda: session_of(lab, name))
    before = session_of(lab, name)
    assert before["bytes_left"] > 0
    assert before["snapshot"] is None
    eventually("the site's word", lambda: told(lab, "w1")["receiving"][f"LRQ_Recv_{name}_east"]["age_s"] is not None, 60)

    lab.kill("w1.sidecar")
    eventually("the link to be lost", lambda: session_of(lab, name)["state"] == "waiting_for_connection", 60)
    assert lag_of(lab, name) == IN_STEP, "it has everything"
    source.send(20, "west")
    eventually("the lag", lambda: lag_of(lab, name)[0] >= 20, 60, seen=lambda: session_of(lab, name))
    away = session_of(lab, name)
    assert away["lag_bytes"] > 0
    assert away["bytes_left"] < before["bytes_left"]
    eventually("the lag to grow older", lambda: session_of(lab, name)["lag_seconds"] > away["lag_seconds"], 60)
    lines = listed(lab, capsys)
    assert ["west", name, "waiting_for_connection", str(away["lag_entries"])] in [words[:4] for words in lines]

    lab.start("w1.sidecar")
    source.finish()
    arrived(lab, "w1", source)
    eventually("the site in step again", lambda: lag_of(lab, name) == IN_STEP, 60, seen=lambda: session_of(lab, name))
    lines = listed(lab, capsys)
    assert ["west", name, "in_log_entry_sync", "0", "0.0"] in [words[:5] for words in lines]
    assert ["east", name] in [words[:2] for words in lines], "the sink's queue"
