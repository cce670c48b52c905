"""GET /cluster, /history, /version and the files of the page."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from node_config import MINIMAL
from served_node import TIMEOUT_S, Node, call, serving

from lrq_ha import __version__
from lrq_ha.errors import LrqError
from lrq_ha.lab.certificates import Authority
from lrq_ha.overview.asking import Report, Target
from lrq_ha.overview.group import group_values
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.config import load
from lrq_ha.sidecar.http.shared_answer import SharedAnswer

LEADERS = [{"epoch": "3.1", "leader": "e1", "from": "e2", "at": "2026-01-02T03:04:05.678+00:00", "why": "lease", "end": 9, "steps": {"all": 40}}]


@pytest.fixture
def serve() -> Iterator[Callable[..., Node]]:
    with serving() as start:
        yield start


def fetch(url: str) -> tuple[dict[str, str], str]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
        return {name.lower(): value for name, value in answer.headers.items()}, answer.read().decode()


def test_one_node_tells_of_all(serve: Callable[..., Node]) -> None:
    backup, primary = serve(Node("e2", Role.READY)), serve(Node("e1", Role.ACTIVE))
    primary.peers = {"e2": {"lag_entries": 7, "lag_seconds": 0.25, "log_bytes_left": 3 << 20}}
    primary.reason = "started; <img src=x onerror=alert(1)>"
    backup.others = [Target("e1", "east", primary.url), Target("e3", "east", "http://127.0.0.1:9")]
    code, told = call(f"{backup.url}/cluster")
    assert code == 200
    assert (told["node"], told["group"], told["primary"], told["in_sync"]) == ("e2", "east", "e1", ["e1"])
    assert told["trouble"] == "e1 is alone in the in-sync set: its loss would stop the group, and may lose messages"
    assert [(node["name"], node["answers"]) for node in told["nodes"]] == [("e2", True), ("e1", True), ("e3", False)]
    [table] = told["tables"]
    assert dict(zip(table["headings"], table["rows"][0])) == {
        "NODE": "e2", "GROUP": "east", "ROLE": "ready", "EPOCH": "3.1", "IN SYNC": "no", "LOG END": "120", "LAG": "7", "LAG S": "0.2",
        "LOG LEFT": "3.0 MiB",
    }  # fmt: skip
    assert [heading for heading, number in zip(table["headings"], table["numbers"]) if number] == ["LOG END", "LAG", "LAG S", "LOG LEFT"]
    assert ["e1", "since 12:00:00: started; <img src=x onerror=alert(1)>"] in table["remarks"]
    assert next(text for name, text in table["remarks"] if name == "e3").startswith("tried http://127.0.0.1:9/status: ")


@pytest.mark.parametrize(
    ("roles", "trouble"),
    [
        ((Role.READY, Role.READY), "no node is primary: clients are not served"),
        ((Role.ACTIVE, Role.ACTIVE), "several nodes say that they are primary: e1, e2; the highest epoch counts"),
        ((Role.ACTIVE,), ""),
    ],
)
def test_trouble_of_a_group(roles: tuple[Role, ...], trouble: str) -> None:
    nodes = [Node(f"e{number}", role) for number, role in enumerate(roles, 1)]
    reports = [Report(Target(node.name, "east", node.url), node.status()) for node in nodes]
    assert group_values("east", reports)["trouble"] == trouble


def test_a_node_that_cannot_be_asked_may_be_the_primary() -> None:
    backup = Node("e2", Role.READY)
    reports = [Report(Target("e2", "east", backup.url), backup.status()), Report(Target("e1", "east", "http://e1"), {}, "tried http://e1")]
    assert group_values("east", reports)["trouble"] == "no node that answers is primary; no answer: e1"


def test_a_slow_node_hides_no_other(serve: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes byte by byte: no single wait of it is long. It is not asked again meanwhile; and what is told is of one moment."""
    monkeypatch.setattr("lrq_ha.sidecar.http.group_watch.STATUS_TIMEOUT_S", 0.5)
    node, quick = serve(Node("e1", Role.ACTIVE)), serve(Node("e2", Role.READY))
    asked, over = list[socket.socket](), threading.Event()

    def dribble() -> None:
        connection, _ = listener.accept()
        asked.append(connection)
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
                if over.wait(0.2):
                    return
                connection.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=dribble, daemon=True).start()
        node.others = [Target("e3", "east", f"http://127.0.0.1:{listener.getsockname()[1]}"), Target("e2", "east", quick.url)]
        for _ in range(3):
            began = time.monotonic()
            _, told = call(f"{node.url}/cluster")
            assert time.monotonic() - began < TIMEOUT_S / 2, "a whole answer would take more than three minutes"
            assert [(one["name"], one["answers"]) for one in told["nodes"]] == [("e1", True), ("e3", False), ("e2", True)]
            assert "nothing within" in told["nodes"][1]["failure"]
        over.set()
    assert len(asked) == 1


def test_many_readers_share_an_answer() -> None:
    """One that has gone ends it for no other, an error is told to all, and it is asked again after a while."""
    asked: list[float] = []

    async def ask() -> int:
        asked.append(time.monotonic())
        await asyncio.sleep(0.05)
        if len(asked) == 2:
            raise LrqError("it is away")
        return len(asked)

    async def go() -> None:
        shared = SharedAnswer(ask, 0.1)
        gone, *others = [asyncio.create_task(shared.read()) for _ in range(5)]
        await asyncio.sleep(0)
        gone.cancel()
        assert await asyncio.gather(*others) == [1] * 4
        assert await shared.read() == 1
        await asyncio.sleep(0.1)
        found = await asyncio.gather(shared.read(), shared.read(), return_exceptions=True)
        assert [str(each) for each in found] == ["it is away"] * 2
        await asyncio.sleep(0.1)
        assert await shared.read() == 3

    asyncio.run(go())


def test_other_nodes_are_asked_with_the_certificates_of_the_configuration(tmp_path: Path) -> None:
    """Also where no AMQP address has TLS."""
    authority = Authority(tmp_path / "ca")
    peer = '[[peers]]\nname = "e2"\nid = 2\ndoor = "amqp://lrq:secret@192.0.2.2:5673"\nhttp = "https://192.0.2.2:8080"\n'
    file = tmp_path / "node.toml"
    file.write_text(f'{MINIMAL}{peer}[tls]\nca = "{authority.ca}"\n')
    file.chmod(0o600)
    assert load(file).client_tls is not None


def test_history(serve: Callable[..., Node]) -> None:
    node = serve(Node("e1"))
    node.leaders = LEADERS
    code, told = call(f"{node.url}/history")
    assert (code, told["leaders"]) == (200, LEADERS)
    assert told["table"]["rows"] == [["2026-01-02 03:04:05", "3.1", "e1", "e2", "the lease of the leader before was gone", "9", "40"]]
    node.error = LrqError("it is kept with etcd only")
    assert call(f"{node.url}/history")[0] == 503


def test_version(serve: Callable[..., Node]) -> None:
    code, told = call(f"{serve(Node('e1')).url}/version")
    assert code == 200
    assert (told["node"], told["software"]) == ("e1", __version__)
    assert isinstance(told["protocol"], int)


class Page(HTMLParser):
    """The addresses that a page loads, and whether it has code or styles of its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inline: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [value for name in ("src", "href") if (value := values.get(name))]
        self.inline += [name for name in values if name.startswith("on") or name == "style"] + [tag for _ in [0] if tag == "style"]
        self.ids |= {value} if (value := values.get("id")) else set()


def test_the_page_needs_nothing_from_elsewhere(serve: Callable[..., Node]) -> None:
    node = serve(Node("e1"))
    headers, text = fetch(f"{node.url}/ui")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-security-policy"].startswith("default-src 'self';")
    page = Page(text)
    assert sorted(page.loads) == ["/ui/icon.svg", "/ui/page.css", "/ui/page.js"]
    assert page.inline == []
    headers, script = fetch(f"{node.url}/ui/page.js")
    assert headers["content-type"] == "text/javascript; charset=utf-8"
    used = set(re.findall(r'(?:find|showText)\("([^"]+)"', script))
    assert used <= page.ids, "an element that the script fills is in the page"
    assert "innerHTML" not in script
    headers, _ = fetch(f"{node.url}/ui/page.css")
    assert headers["content-type"] == "text/css; charset=utf-8"
