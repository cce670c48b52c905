"""Reads the facts of this machine: files, addresses, limits, certificates."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from broker_plugin.amqp.tls import TlsError, client_files, server_files
from lrq_ha.errors import LrqError
from lrq_ha.sidecar.certificates import read_expiry, shake_hands
from lrq_ha.sidecar.config import Config, find_exposure, secret_files

from .facts import Certificate, Host

PROC = Path("/proc")


def read_host(path: Path, config: Config) -> Host:
    """The facts of this machine that concern a node."""
    return Host(
        now=time.time(),
        exposed=[found for file in secret_files(path, config) if (found := _exposure(file))[0]],
        busy={key: why for key, listen in _addresses(config) if (why := _why_busy(listen))},
        files_max=_files_max(),
        swap=len(_lines(PROC / "swaps")) > 1,
        swappiness=_number(PROC / "sys/vm/swappiness"),
        overcommit=_number(PROC / "sys/vm/overcommit_memory"),
        certificates=list(_certificates(config)),
    )


def _exposure(file: Path) -> tuple[str, str]:
    try:
        return find_exposure(file)
    except OSError as error:
        return f"{file} cannot be looked at: {error.strerror}", ""


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    yield "door.listen", config.door.listen
    yield "http.listen", config.http.listen
    if config.http.probes:
        yield "http.probes", config.http.probes


def _why_busy(listen: str) -> str:
    """Why an address cannot be listened on; empty: it can."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _files_max() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 62 if hard == resource.RLIM_INFINITY else hard


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdecimal() else -1


def _certificates(config: Config) -> Iterator[Certificate]:
    tables = (("door.tls", config.door.tls), ("http.tls", config.http.tls), ("tls", config.tls))
    for name, table in tables:
        if table is None or not table.certificate:
            continue
        try:
            server = server_files(table.certificate, table.key, "", "none", "1.2").context
            yield Certificate(name, table.certificate, read_expiry(server, table.certificate), _untrusted(config, server))
        except (OSError, LrqError):
            continue  # `config` says what is wrong with the file


def _untrusted(config: Config, server: ssl.SSLContext) -> str:
    """Why a client with the [tls] of this configuration does not trust a certificate; empty: it does."""
    if not config.tls.ca:
        return ""
    try:
        context = client_files(config.tls.ca, "", "", "1.2").context
        context.check_hostname = False
        shake_hands(context, server)
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    except (OSError, TlsError):
        return ""
    return ""
