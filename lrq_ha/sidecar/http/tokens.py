"""The file with the token that commands need.

Rules:

- A line is a token; the first is the one to send. With two lines, the new and the old one, both are accepted, so that all sides can be changed one
  after the other.
- The file is read again when it has changed. One that cannot be used then leaves the tokens as they were, and is reported once per change.
- A token is compared in constant time, and is in no text.
"""

from __future__ import annotations

import hmac
import logging
import re
from pathlib import Path

from broker_plugin.amqp.tls import read_stamp
from lrq_ha.errors import LrqError

log = logging.getLogger("lrq_ha.http")

TOKENS_MAX = 2
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}", re.ASCII)
_HOW = "Put a token into it, as `openssl rand -hex 32` makes: 16 to 512 letters, digits and ._~+/=- on a line; on the next line the old one, if any"
_SCHEME = "bearer "


def read_tokens(file: Path) -> list[str]:
    """The tokens of a file, the one to send first. Raises LrqError if the file cannot be read, or holds none, or something else."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except OSError as error:
        raise LrqError(f"{file} cannot be read: {error.strerror}", todo="Correct the path, or give this user the right to read it") from error
    except UnicodeDecodeError as error:
        raise LrqError(f"{file} holds no token", todo=_HOW) from error
    tokens = [line for line in lines if line]
    if not 0 < len(tokens) <= TOKENS_MAX or not all(map(_TOKEN.fullmatch, tokens)):
        raise LrqError(f"{file} holds no token, or more than {TOKENS_MAX}, or something else", todo=_HOW)
    return tokens


class TokenFile:
    """The tokens that are accepted.

    Args:
        file: Has them.

    Raises:
        LrqError: As `read_tokens`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = read_stamp(file)
        self._tokens = read_tokens(file)

    def accepts(self, authorization: str) -> bool:
        """Whether the value of a header Authorization has one of the tokens."""
        self._refresh()
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return False
        given = authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(given, token.encode()) for token in self._tokens)

    def _refresh(self) -> None:
        seen = read_stamp(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._tokens = read_tokens(self._file)
        except LrqError as error:
            log.error("the tokens stay as they were: %s", error)
        else:
            log.info("%s was read again", self._file)
