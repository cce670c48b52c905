"""References to secrets in the strings of a configuration: the environment, systemd's credentials, files.

    ${NAME}             the environment variable NAME
    ${credential:NAME}  the file NAME in $CREDENTIALS_DIRECTORY, as LoadCredential= of a unit makes it
    ${file:PATH}        a file; PATH begins at the folder of the configuration
    $${                 the characters ${

Rules:

- Of a file the first line counts.
- In an address (with ://) each character of a secret that is no letter or digit is written as % and two digits.
- An error names the key and the reference, and never a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lrq_ha.errors import LrqError

CREDENTIALS = "CREDENTIALS_DIRECTORY"
#: Takes the place of a secret that an operator's command cannot read, and does not need.
UNREAD = "unread"
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(credential|file):)?([^{}]*)\}")


class MissingSecret(LrqError):
    """A reference that leads to no secret."""


def resolve(tables: Any, folder: Path, *, strict: bool = True) -> Any:
    """The tables of a configuration with all references replaced.

    Args:
        tables: As tomllib gives them.
        folder: Of the configuration's file.
        strict: A reference that leads to no secret is an error; else UNREAD takes its place.

    Raises:
        MissingSecret: A reference leads to no secret.
    """
    return _walk(tables, "", partial(_replace, folder, strict))


def find_files(tables: Any, folder: Path) -> list[Path]:
    """The files that the references of a configuration name; systemd sees to those of its credentials."""
    found: list[Path] = []

    def note(_: str, text: str) -> str:
        for reference in _REFERENCE.finditer(text):
            if reference[1] == "file":
                found.append(folder / reference[2])
        return text

    _walk(tables, "", note)
    return found


def _walk(value: Any, key: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return change(key, value)
    if isinstance(value, dict):
        return {name: _walk(inner, f"{key}.{name}" if key else name, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, key, change) for inner in value]
    return value


def _replace(folder: Path, strict: bool, key: str, text: str) -> str:
    def secret_of(reference: re.Match[str]) -> str:
        if reference[2] is None:
            return "${"
        try:
            found = _read(reference[1], reference[2], folder)
        except (LookupError, OSError, UnicodeDecodeError) as error:
            if not strict:
                return UNREAD
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not set or empty"
            raise MissingSecret(f"{key}: {reference[0]} {why}", todo="docs/configuration.md, 'Secrets', says where a secret may be") from error
        return quote(found, safe="") if "://" in text else found

    return _REFERENCE.sub(secret_of, text)


def _read(kind: str | None, name: str, folder: Path) -> str:
    """A secret. Raises LookupError, OSError or UnicodeDecodeError."""
    file = _file_of(kind, name, folder)
    if file is None:
        return os.environ[name]
    lines = [line for line in file.read_text("utf-8").splitlines() if line]
    if not lines:
        raise LookupError(file)
    return lines[0]


def _file_of(kind: str | None, name: str, folder: Path) -> Path | None:
    """The file that a reference leads to; None: the environment. Raises LookupError: There is no folder of credentials."""
    if kind == "credential":
        return Path(os.environ[CREDENTIALS]) / name
    return folder / name if kind == "file" else None
