"""The page of a group, GET /ui, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from load import eventually, promote
from selenium import webdriver
from selenium.webdriver.common.by import By
from served_node import Node, serving

from lrq_ha.lab import Lab
from lrq_ha.overview.asking import Target
from lrq_ha.replication.roles import Role

BROWSER, DRIVER = shutil.which("chromium-headless-shell") or shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="Chromium is not on this machine: apt-get install chromium-headless-shell chromium-driver"
)

Browser = webdriver.Chrome
NASTY = "started; queue '<img src=x onerror=\"document.title = 1\">' is full"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server", "--window-size=1200,800"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER, popen_kw={"start_new_session": True})
    made = webdriver.Chrome(options, service)
    yield made
    made.quit()
    with suppress(ProcessLookupError):
        os.killpg(service.process.pid, signal.SIGKILL)  # Debian's browser is started by a script, and outlives its driver


@pytest.fixture
def serve() -> Iterator[Callable[..., Node]]:
    with serving() as start:
        yield start


def cells(browser: Browser) -> dict[str, list[str]]:
    """The rows of the table of nodes, by node."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll('main section:first-child tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def role(browser: Browser, node: str) -> str:
    return cells(browser).get(node, ["", ""])[1]


def text(browser: Browser, name: str) -> str:
    return browser.find_element(By.ID, name).text


def requested(browser: Browser) -> set[str]:
    """The addresses that the browser has asked for since the last call."""
    told = (json.loads(line["message"])["message"] for line in browser.get_log("performance"))  # type: ignore[no-untyped-call]
    return {one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"}


@pytest.mark.quick
def test_the_page_of_two_nodes(browser: Browser, serve: Callable[..., Node]) -> None:
    """What nodes say stays text, no other host is asked, and it fits a telephone."""
    primary, backup = serve(Node("e1", Role.ACTIVE)), serve(Node("e2", Role.READY))
    primary.peers, primary.reason = {"e2": {"lag_entries": 7}}, NASTY
    primary.coordination = {"etcd": "answers", "since": 0, "leader": "e1", "set": ["e1", "e2"], "version": 3}
    primary.leaders = [{"epoch": "3.1", "leader": "e1", "from": "e2", "at": "2026-01-02T03:04:05.678+00:00", "why": "lease"}]
    primary.others = [Target("e2", "east", backup.url)]
    browser.get(f"{primary.url}/ui")
    eventually("the nodes", lambda: len(cells(browser)) == 2, 20)
    assert cells(browser)["e2"] == ["east", "ready", "3.1", "no", "120", "7", "-", "-"]
    assert (text(browser, "group"), text(browser, "primary"), browser.title) == ("east", "e1", "east: e1")
    assert "is alone in the in-sync set" in text(browser, "trouble")
    assert text(browser, "coordination") == "east: etcd: e1 has the lease; in the set: e1, e2"
    assert NASTY in text(browser, "tables")
    eventually("the history", lambda: "the lease of the leader before was gone" in text(browser, "history"), 20)
    primary.end += 500
    eventually("a rate", lambda: text(browser, "rate") not in ("–", "0"), 20)
    primary.reason = "started"
    eventually("the new reason", lambda: NASTY not in text(browser, "tables"), 20)
    browser.set_window_size(400, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert {url.split("/")[2] for url in requested(browser)} == {primary.url.split("/")[2]}
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    backup.error = RuntimeError("it answers 500")
    eventually("the node that fails", lambda: role(browser, "e2") == "no answer", 20)


@pytest.mark.broker
@pytest.mark.one_version("4.3")
def test_a_kill_is_seen_without_a_reload(browser: Browser, broker_version: str, new_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """By the page of the node that stays; and the page of the killed one says since when it shows older values."""
    lab = new_lab({"east": 2}, broker=broker_version)
    lab.up()
    browser.get(f"{lab.nodes['e2'].http}/ui")
    eventually("both nodes", lambda: (role(browser, "e1"), role(browser, "e2")) == ("active", "ready"), 60)
    lab.kill("e1")
    began = time.monotonic()
    eventually("the kill", lambda: role(browser, "e1") == "no answer", 20)
    assert time.monotonic() - began < 10
    eventually("the trouble", lambda: text(browser, "trouble") == "no node that answers is primary; no answer: e1", 20)
    promote(lab, "e2", "e1")
    eventually("the new primary", lambda: (text(browser, "primary"), role(browser, "e2")) == ("e2", "active"), 60)
    browser.save_screenshot(str(tmp_path / "page.png"))
    lab.kill("e2")
    eventually("the end", lambda: text(browser, "seen").startswith("no answer from "), 20)
