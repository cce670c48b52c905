"""The configuration's file, compared with the configuration that a sidecar runs with.

Rule: nothing of a changed file counts before a restart, and an operator is told so, key by key. Certificates and tokens are files of their own, which
are read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lrq_ha.errors import LrqError

from .config import Config, load


class ConfigFile:
    """The file of a sidecar's configuration.

    Args:
        path: The file; None: there is none.
        config: The configuration that the sidecar runs with.

    Attributes:
        pending: The keys that a restart would change, as of the last look.
    """

    def __init__(self, path: Path | None, config: Config) -> None:
        self._path = path
        self._config = config
        self.pending: list[str] = []

    def look(self) -> tuple[bool, str]:
        """Reads the file again; returns whether it can be used, and what a restart would change."""
        name = self._config.node.name
        if self._path is None:
            return False, f"{name} was started without a file"
        try:
            found = load(self._path)
        except LrqError as error:
            self.pending = []
            return False, f"{name} goes on as it was started, and would not start again: {error}"
        self.pending = list(find_changes(self._config, found))
        if not self.pending:
            return True, f"{name}: {self._path} says what {name} was started with; its certificates and tokens are read again by themselves"
        return True, f"{name} goes on as it was started; a restart changes {', '.join(self.pending)}"


def find_changes(one: BaseModel, other: BaseModel, table: str = "") -> Iterator[str]:
    """The keys in which two configurations differ, by their names in the file, without values."""
    for key in type(one).model_fields:
        before, after = getattr(one, key), getattr(other, key)
        where = f"{table}.{key}" if table else key
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from find_changes(before, after, where)
        elif _is_named(before) and _is_named(after):
            yield from _changed_tables({each.name: each for each in before}, {each.name: each for each in after}, where)
        else:
            yield where


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, BaseModel) and "name" in type(each).model_fields for each in value)


def _changed_tables(before: dict[str, Any], after: dict[str, Any], where: str) -> Iterator[str]:
    for name in {**before, **after}:
        if name not in after:
            yield f"{where} ({name} goes)"
        elif name not in before:
            yield f"{where} ({name} comes)"
        elif before[name] != after[name]:
            for key in find_changes(before[name], after[name]):
                yield f"{where}.{key} ({name})"
