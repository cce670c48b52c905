"""Who may give a sidecar commands over HTTP: the token, TLS, the second address for probes, and the limits on strangers."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_config import MINIMAL
from served_node import TIMEOUT_S, Node, call, serving

from broker_plugin.amqp.tls import client_files, server_files
from lrq_ha.cli.main import main
from lrq_ha.direct_http import HttpAccess
from lrq_ha.errors import LrqError
from lrq_ha.lab.certificates import Authority
from lrq_ha.lab.ports import free_ports
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.config import load, unprotected
from lrq_ha.sidecar.http import listener
from lrq_ha.sidecar.http.commands import COMMANDS
from lrq_ha.sidecar.http.server import PROTECTED, HttpServer
from lrq_ha.sidecar.http.tokens import TokenFile, read_tokens

NEW, OLD, WRONG = "new-0123456789abcdef", "old-0123456789abcdef", "bad-0123456789abcdef"


@pytest.fixture
def serve() -> Iterator[Callable[..., Node]]:
    with serving() as start:
        yield start


def token_file(folder: Path, *tokens: str) -> Path:
    file = folder / "token"
    file.write_text("\n".join(tokens) + "\n")
    return file


def ordered(node: Node, **headers: str) -> int:
    code, _ = call(f"{node.url}/pause", b'{"paused": true}', **headers)
    return int(code)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_without_the_token_no_command_is_taken(serve: Callable[..., Node], tmp_path: Path) -> None:
    node = serve(Node("e1"), tokens=TokenFile(token_file(tmp_path, NEW)))
    wrong = [*map(bearer, (WRONG, "", NEW[:-1], NEW + "x")), {"Authorization": f"Basic {NEW}"}, {"Authorization": NEW}, {"X-Token": NEW}]
    for headers in wrong:
        for name in COMMANDS:
            code, answer = call(f"{node.url}/{name}", b'{"paused": true}', **headers)
            assert code == 401
            assert "--token-file" in answer["text"]
        assert [call(f"{node.url}{path}", None, **headers)[0] for path in PROTECTED] == [401] * len(PROTECTED)
    assert node.told == []
    assert ordered(node, **bearer(NEW)) == ordered(node, authorization=f"bearer {NEW}") == 200
    assert node.told == [("pause", True)] * 2


def test_status_and_probes_need_no_token(serve: Callable[..., Node], tmp_path: Path) -> None:
    node = serve(Node("e1", Role.ACTIVE), tokens=TokenFile(token_file(tmp_path, NEW)))
    for path in ("/status", "/primary", "/queues", "/levels"):
        assert call(node.url + path)[0] == 200


def test_a_token_is_replaced_without_a_pause(serve: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = serve(Node("e1"), tokens=TokenFile(token_file(tmp_path, OLD)))

    def accepted() -> list[bool]:
        return [ordered(node, **bearer(token)) == 200 for token in (NEW, OLD)]

    assert accepted() == [False, True]
    token_file(tmp_path, NEW, OLD)
    assert accepted() == [True, True]
    token_file(tmp_path, "")
    assert accepted() == [True, True], "a file that cannot be used changes nothing"
    (tmp_path / "token").unlink()
    assert accepted() == [True, True]
    assert [record.levelname for record in caplog.records if "the tokens stay as they were" in record.message] == ["ERROR", "ERROR"]
    token_file(tmp_path, NEW)
    assert accepted() == [True, False]
    assert not [secret for secret in (NEW, OLD) if secret in caplog.text]


@pytest.mark.parametrize("content", ["", "\n\n", "short", "with a space in it, and long", f"{NEW}\n{OLD}\n{WRONG}", "x" * 513, "ü" * 20])
def test_a_file_without_a_token_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(LrqError, match=r"holds no token.*openssl rand -hex 32") as caught:
        read_tokens(file)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_token_file_that_is_missing_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL + 'token_file = "token"\n')
    with pytest.raises(LrqError, match=r"node.toml: http.token_file: .*token cannot be read"):
        load(file)
    token_file(tmp_path, NEW)
    assert load(file).tokens


@pytest.mark.parametrize(
    ("listen", "warned"),
    [*((host, False) for host in ("127.0.0.1", "127.0.0.2", "[::1]", "localhost")), *((host, True) for host in ("0.0.0.0", "192.0.2.1", "e1"))],
)
def test_an_address_that_takes_commands_of_strangers_is_told(listen: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.toml"
    text = MINIMAL.replace("127.0.0.1:8080", f"{listen}:8080")
    file.write_text(text)
    file.chmod(0o600)
    assert bool(unprotected(load(file))) is warned
    assert main(["sidecar", "--check", "--config", str(file)]) == 0
    assert ("set http.token_file" in capsys.readouterr().err) is warned
    token_file(tmp_path, NEW).chmod(0o644)
    file.write_text(text + 'token_file = "token"\n')
    assert unprotected(load(file)) == ""
    assert main(["sidecar", "--check", "--config", str(file)]) == 0
    assert f"chmod go-rwx {tmp_path / 'token'}" in capsys.readouterr().err


# ---- the second address ----------------------------------------------------------------------------------------------


def test_the_second_address_has_the_probes_only(serve: Callable[..., Node], tmp_path: Path) -> None:
    port = next(free_ports())
    node = serve(Node("e1", Role.ACTIVE), probes_listen=f"127.0.0.1:{port}", tokens=TokenFile(token_file(tmp_path, NEW)))
    other = f"http://127.0.0.1:{port}"
    assert call(f"{other}/primary")[0] == call(f"{node.url}/primary")[0] == 200
    for name in COMMANDS:
        assert call(f"{other}/{name}", b"{}", **bearer(NEW))[0] in (404, 405)
    for path in (*PROTECTED, "/status", "/queues", "/levels"):
        assert call(other + path, None, **bearer(NEW))[0] == 404
    assert node.told == []
    assert call(f"{node.url}/status")[0] == 200


def test_both_addresses_are_not_one(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL + 'probes = "127.0.0.1:8080"\n')
    with pytest.raises(LrqError, match="probes and listen need addresses of their own"):
        load(file)


def test_a_second_address_that_is_taken_says_so(serve: Callable[..., Node]) -> None:
    node = serve(Node("e1"))
    with pytest.raises(LrqError, match=f"address 127.0.0.1:{node.port} is in use.*change http.probes"):
        serve(Node("e2"), probes_listen=f"127.0.0.1:{node.port}")


# ---- TLS -------------------------------------------------------------------------------------------------------------


def https(node: Node, ca: Path, certificate: Path | str = "", key: Path | str = "") -> int:
    access = HttpAccess(tls=client_files(str(ca), str(certificate), str(key), "1.2").context)
    with access.open(f"https://127.0.0.1:{node.port}/status", TIMEOUT_S) as answer:
        return int(answer.status)


def test_tls_with_and_without_clients_certificates(serve: Callable[..., Node], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "another")
    certificate, key = map(str, authority.issue("http"))
    plain = serve(Node("e1"), tls=server_files(certificate, key, "", "none", "1.2"))
    assert https(plain, authority.ca) == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        https(plain, other.ca)
    with pytest.raises(OSError, match=r"reset|closed|violation|Remote end"):
        call(f"{plain.url}/status")
    strict = serve(Node("e2"), tls=server_files(certificate, key, str(authority.ca), "required", "1.2"))
    assert https(strict, authority.ca, *authority.issue("operator")) == 200
    for shown in (("", ""), other.issue("stranger")):
        with pytest.raises(OSError, match=r"(?i)certificate|unknown.ca|reset|closed|broken pipe|EOF"):
            https(strict, authority.ca, *shown)


def test_a_certificate_that_changes_counts_from_the_next_connection_on(serve: Callable[..., Node], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = map(str, authority.issue("http"))
    node = serve(Node("e1"), tls=server_files(certificate, key, "", "none", "1.2"))
    trusts = client_files(str(authority.ca), "", "", "1.2").context

    def serial() -> str:
        with socket.create_connection(("127.0.0.1", node.port), TIMEOUT_S) as raw, trusts.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
            return str((connection.getpeercert() or {})["serialNumber"])

    before = serial()
    open_before = trusts.wrap_socket(socket.create_connection(("127.0.0.1", node.port), TIMEOUT_S), server_hostname="127.0.0.1")
    authority.issue("http")
    deadline = time.monotonic() + TIMEOUT_S
    while serial() == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with open_before:
        open_before.sendall(b"GET /liveness HTTP/1.1\r\nHost: e1\r\n\r\n")
        assert open_before.recv(12) == b"HTTP/1.1 200", "connections that stand go on"


def test_certificates_are_read_again_by_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGHUP: also where no file has changed. A half-written one changes nothing."""
    authority = Authority(tmp_path / "ca")
    certificate, key = map(str, authority.issue("http"))
    node = Node("e1")

    async def said(text: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while text not in caplog.text:
                await asyncio.sleep(0.02)

    async def go() -> None:
        server = HttpServer(f"127.0.0.1:{node.port}", node, tls=server_files(certificate, key, "", "none", "1.2"))
        await server.start()
        try:
            server.reload()
            await said("the certificates of http.listen were read again")
            Path(key).write_text("half")
            await said("the certificates of http.listen stay as they were")
            assert await asyncio.to_thread(https, node, authority.ca) == 200
        finally:
            await server.close()

    with caplog.at_level("INFO", "lrq_ha.http"):
        asyncio.run(go())


# ---- the commands of lrq-ha ------------------------------------------------------------------------------------------


def test_commands_send_the_token_and_trust_by_the_configuration(
    serve: Callable[..., Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = map(str, authority.issue("http"))
    tokens = token_file(tmp_path, NEW, OLD)
    nodes = [
        serve(Node(name), tokens=TokenFile(token_file(tmp_path, OLD)), tls=server_files(certificate, key, "", "none", "1.2")) for name in ("e1", "e2")
    ]
    token_file(tmp_path, NEW, OLD)
    config = tmp_path / "e1.toml"

    def write(http: str, tls: str) -> None:
        config.write_text(
            MINIMAL.replace('listen = "127.0.0.1:8080"', f'listen = "127.0.0.1:{nodes[0].port}"\n{http}\n[http.tls]\ncertificate = "x"\nkey = "y"')
            + f'[[peers]]\nname = "e2"\nid = 2\ndoor = "amqp://u:p@127.0.0.1:5674"\nhttp = "https://127.0.0.1:{nodes[1].port}"\n{tls}'
        )

    write('token_file = "token"', f'[tls]\nca = "{authority.ca}"')
    assert main(["pause", "--config", str(config)]) == 0
    assert [node.told for node in nodes] == [[("pause", True)]] * 2
    write("", "")
    assert main(["pause", "--config", str(config)]) == 1
    assert "its certificate is not trusted" in capsys.readouterr().err
    trusting = ["--config", str(config), "--ca", str(authority.ca)]
    assert main(["list", *trusting]) == 0
    assert main(["pause", *trusting]) == 1
    assert "lrq-ha takes it from the file in --token-file" in capsys.readouterr().err
    assert main(["pause", *trusting, "--token-file", str(tokens)]) == 0
    assert [node.told for node in nodes] == [[("pause", True)] * 2] * 2
    assert main(["pause", *trusting, "--token-file", str(tmp_path / "gone")]) == 1
    assert "gone cannot be read" in capsys.readouterr().err


def test_the_token_goes_with_commands_only(tmp_path: Path) -> None:
    """`list --watch` would send it each second, also where there is no TLS; and a redirect would take it elsewhere."""
    heard: list[bytes] = []
    ports = free_ports()
    first, second = next(ports), next(ports)

    def answer(port: int, text: bytes, count: int) -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            ready.release()
            for _ in range(count):
                connection, _ = server.accept()
                with connection:
                    heard.append(connection.recv(65_536))
                    connection.sendall(text)

    ready = threading.Semaphore(0)
    redirect = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/tail\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % second
    done = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    threads = [threading.Thread(target=answer, args=arguments, daemon=True) for arguments in ((first, redirect, 2), (second, done, 2))]
    for thread in threads:
        thread.start()
        ready.acquire()
    access = HttpAccess(NEW)
    for authorized in (False, True):
        access.open(f"http://127.0.0.1:{first}/tail", TIMEOUT_S, authorized=authorized).close()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [NEW.encode() in request for request in heard] == [False, False, True, False]


# ---- strangers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr("lrq_ha.sidecar.http.commands.BODY_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("before", [b"", b"HEAD /liveness HTTP/1.1\r\nHost: e1\r\n\r\n"], ids=["first", "further"])
@pytest.mark.parametrize("sent", [b"", b"GET /sta", b"GET /status HTTP/1.1\r\nHost: e1\r\n"])
def test_a_head_that_does_not_end_ends_the_connection(sent: bytes, before: bytes, serve: Callable[..., Node]) -> None:
    node = serve(Node("e1"))
    with socket.create_connection(("127.0.0.1", node.port), TIMEOUT_S) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(65_536).endswith(b"\r\n\r\n")
        connection.sendall(sent)
        began = time.monotonic()
        dripping = threading.Thread(target=drip, args=(connection,), daemon=True)
        if sent:
            dripping.start()
        assert connection.recv(1) == b""
        assert time.monotonic() - began < TIMEOUT_S / 2
    assert call(f"{node.url}/liveness")[0] == 200


def drip(connection: socket.socket) -> None:
    """A byte now and then: each is progress, and the head never ends."""
    try:
        while True:
            connection.sendall(b"x")
            time.sleep(0.1)
    except OSError:
        pass


@pytest.mark.usefixtures("hurried")
def test_a_request_may_take_longer_than_its_head(serve: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a renewal does; and a connection may be used again after a refusal."""
    node = Node("e1")

    async def waits(*_: object, **__: object) -> tuple[bool, str]:
        await asyncio.sleep(1.2)
        return True, "done"

    monkeypatch.setattr(node, "pause", waits)
    serve(node, tokens=TokenFile(token_file(tmp_path, NEW)))
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=TIMEOUT_S)
    codes = []
    for headers in ({}, bearer(NEW)):
        connection.request("POST", "/pause", b'{"paused": true}', {"Content-Type": "application/json", **headers})
        with connection.getresponse() as answer:
            answer.read()
            codes.append(answer.status)
    connection.close()
    assert codes == [401, 200]


@pytest.mark.usefixtures("hurried")
def test_a_body_that_does_not_end_is_refused(serve: Callable[..., Node]) -> None:
    node = serve(Node("e1"))
    with socket.create_connection(("127.0.0.1", node.port), TIMEOUT_S) as connection:
        connection.sendall(b"POST /pause HTTP/1.1\r\nHost: e1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 408 ")
    assert node.told == []


def test_more_requests_than_are_served_at_once_are_told_so(serve: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUESTS_MAX", 2)
    node, gate = Node("e1"), threading.Event()

    async def waits(*_: object, **__: object) -> tuple[bool, str]:
        await asyncio.to_thread(gate.wait, TIMEOUT_S)
        return True, "done"

    monkeypatch.setattr(node, "pause", waits)
    serve(node)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(ordered(node))) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while (answered := call(f"{node.url}/liveness"))[0] == 200:
        assert time.monotonic() < deadline
    assert answered == (503, {"ok": False, "text": "2 requests are being served: try again"})
    gate.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert codes == [200, 200]
    assert call(f"{node.url}/liveness")[0] == 200


def test_connections_beyond_the_limit_are_closed_at_once(serve: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take the files that the door needs for clients."""
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 3)
    node = serve(Node("e1"))
    held = [socket.create_connection(("127.0.0.1", node.port), TIMEOUT_S) for _ in range(6)]
    try:
        states = []
        for connection in held:
            connection.settimeout(0.3)
            try:
                states.append(connection.recv(1) == b"")
            except ConnectionResetError:
                states.append(True)
            except TimeoutError:
                states.append(False)
        assert sorted(states) == [False] * 3 + [True] * 3
    finally:
        for connection in held:
            connection.close()
