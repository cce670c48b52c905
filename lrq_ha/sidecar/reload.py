"""The configuration's file, compared with the configuration that a sidecar runs with.

Rule: limits and time-outs of `[door]` count at once, all other keys after a restart. An operator is told so, key by key. Certificates and tokens are
files of their own, which are read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lrq_ha.errors import LrqError

from .config import Config, load

#: Keys of `[door]` that wait for a restart: sockets are bound and files allowed at the start.
FIXED = frozenset({"listen", "connections_max", "tls"})


class ConfigFile:
    """The file of a sidecar's configuration.

    Args:
        path: The file; None: there is none.
        config: The configuration that the sidecar has started with.

    Attributes:
        config: The configuration that the sidecar runs with.
        pending: The keys that a restart would change, as of the last look.
    """

    def __init__(self, path: Path | None, config: Config) -> None:
        self._path = path
        self.config = config
        self.pending: list[str] = []

    def look(self) -> tuple[bool, str]:
        """Reads the file again; returns whether it can be used, and the keys that count now, or after a restart. An error in it changes nothing."""
        name = self.config.node.name
        if self._path is None:
            return False, f"{name} was started without a file"
        try:
            found = load(self._path)
            before, self.config = self.config, take_live(self.config, found)
        except LrqError as error:
            self.pending = []
            return False, f"{name} goes on as it was, and would not start again: {error}"
        except ValidationError as error:
            self.pending = list(find_changes(self.config, found))
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            return True, f"{name} goes on as it was, as not all can be changed without a restart ({why}); a restart changes {', '.join(self.pending)}"
        live, self.pending = list(find_changes(before, self.config)), list(find_changes(self.config, found))
        if not live and not self.pending:
            return True, f"{name}: {self._path} says what {name} runs with; its certificates and tokens are read again by themselves"
        now = f"{', '.join(live)} {'counts' if len(live) == 1 else 'count'} from now on" if live else "goes on as it was"
        return True, "; ".join([f"{name}: {now}"] + [f"a restart changes {', '.join(self.pending)}"] * bool(self.pending))


def take_live(config: Config, found: Config) -> Config:
    """A sidecar's configuration with those keys of another that count without a restart.

    Raises:
        ValidationError: The two do not go together, as a limit that needs a larger log.
    """
    live = {key: getattr(found.door, key) for key in type(found.door).model_fields if key not in FIXED}
    mixed = config.model_copy(update={"door": config.door.model_copy(update=live)})
    Config.model_validate({key: getattr(mixed, key) for key in Config.model_fields})  # the rules over several tables
    return mixed


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
