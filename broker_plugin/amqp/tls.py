"""TLS contexts made from files, and made again when the files change.

Rules:
- A context is never changed, only replaced: established connections keep their context, the next handshake gets the
  new one.
- Files that cannot be used (a key of another certificate, a half-written file) leave the old context in place, and
  are reported once per change.
- An error names a file or a key of the configuration; contents of the files are never shown.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from lrq_ha.errors import LrqError

Verify = Literal["none", "optional", "required"]
Version = Literal["1.2", "1.3"]
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsError(LrqError):
    """A file with a certificate or a key that cannot be used."""


class TlsFiles:
    """A context and its files.

    Args:
        build: Makes a context.
        files: Read by `build`.

    Attributes:
        context: The newest that could be made.

    Raises:
        TlsError: The first cannot be made.
    """

    def __init__(self, build: Callable[[], ssl.SSLContext], files: Sequence[str]) -> None:
        self._build = build
        self._files = [Path(file) for file in files if file]
        self._seen = self._signature()
        self.context = build()

    def refresh(self, force: bool = False) -> bool:
        """Makes a new context if a file has changed since the last look, or in any case with `force`; returns
        whether it did.

        Raises:
            TlsError: The files cannot be used; the context stays.
        """
        seen = self._signature()
        if seen == self._seen and not force:
            return False
        self._seen = seen
        self.context = self._build()
        return True

    def _signature(self) -> list[tuple[int, int, int] | None]:
        return [read_stamp(file) for file in self._files]


def read_stamp(file: Path) -> tuple[int, int, int] | None:
    """Time, size and inode of a file, one of which changes when it is written or replaced; None: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def server_files(certificate: str, key: str, ca: str, verify: Verify, minimum: Version) -> TlsFiles:
    """The context for accepted connections.

    Args:
        certificate, key: PEM files of this side; the certificate with its chain.
        ca: PEM file of the CAs for clients' certificates; empty if `verify` is "none".
        verify: Whether a client needs a certificate.
        minimum: Least version of TLS.
    """

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[minimum]
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        _load(context, certificate, key)
        if verify != "none":
            _load_ca(context, ca)
        context.verify_mode = _VERIFY[verify]
        return context

    return TlsFiles(build, (certificate, key, ca))


def client_files(ca: str, certificate: str, key: str, minimum: Version) -> TlsFiles:
    """The context for outgoing connections; the other side's certificate and name are always checked.

    Args:
        ca: PEM file of the CAs for the other side's certificate; empty for those that the system trusts.
        certificate, key: PEM files of this side, empty if it shows none.
        minimum: Least version of TLS.
    """

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _VERSIONS[minimum]
        if ca:
            _load_ca(context, ca)
        else:
            context.load_default_certs()
        if certificate:
            _load(context, certificate, key)
        return context

    return TlsFiles(build, (ca, certificate, key))


def _no_password() -> str:
    raise TlsError("the key is encrypted", todo="Give a key without a pass phrase, readable by the sidecar's user only")


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    for file in (certificate, key):
        _readable(file)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except TlsError as error:
        raise TlsError(f"{key}: {error.what}", todo=error.todo) from error
    except (ssl.SSLError, ValueError) as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise TlsError(f"{key} is not the key of {certificate}", todo="Replace both") from error
        todo = "Look at them with openssl x509 and openssl pkey"
        raise TlsError(f"{certificate} and {key} hold no certificate and its key in PEM form", todo=todo) from error
    except OSError as error:  # a file has gone since
        raise _unreadable(f"{certificate} or {key}", error) from error


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    _readable(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TlsError(f"{ca} holds no certificate in PEM form", todo="Look at it with openssl x509") from error
    except OSError as error:  # the file has gone since
        raise _unreadable(ca, error) from error


def _readable(file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(files: str, error: OSError) -> TlsError:
    todo = "Correct the path, or give the sidecar's user the right to read it"
    return TlsError(f"{files} cannot be read: {error.strerror}", todo=todo)
