"""`lrq-ha edit-config`: changes keys of a node's configuration file.

Rules: comments and order stay. A file that would not be a configuration is not written. The written file replaces the former one at once, with its
owner and mode. Nothing is connected to: `lrq-ha reload` has the sidecar read it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AbstractTable

from lrq_ha.errors import LrqError
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.reload import find_changes, take_live

from .list_nodes import CONFIG_VARIABLE, find_config


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    edit = subparsers.add_parser(
        "edit-config",
        help="change keys of a configuration file, if the result is valid",
        description="Changes keys of a node's configuration file. The result is checked before it is written; comments and order stay. A key of a "
        "peer or site is changed with an editor.",
        epilog="examples:\n  lrq-ha edit-config --config /etc/lrq-ha/e1.toml -s door.stop_timeout_s=20 --dry-run\n"
        "  lrq-ha edit-config --config /etc/lrq-ha/e1.toml -s 'replication.mode=\"strict\"' --unset receive.bytes_max",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    edit.add_argument("--config", type=Path, metavar="FILE", help=f"the node's configuration (default: {CONFIG_VARIABLE})")
    edit.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments",
                      help="set a key, as door.stop_timeout_s=20; VALUE is TOML, or text")  # fmt: skip
    edit.add_argument("--unset", action="append", default=[], metavar="KEY", help="take a key out, so that its default counts")
    edit.add_argument("--dry-run", action="store_true", help="only say what would change")
    edit.set_defaults(run=_edit)


def _edit(args: argparse.Namespace) -> int:
    if not args.assignments and not args.unset:
        raise LrqError("no key is named", todo="Name keys with -s KEY=VALUE or --unset KEY")
    path = find_config(args.config)
    before = configuration.read(path)
    document = tomlkit.parse(path.read_text("utf-8"))
    for assignment in args.assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise LrqError(f"{assignment!r} is not KEY=VALUE", todo="Write it as door.stop_timeout_s=20")
        table, name = _find_table(document, key, make=True)
        table[name] = _parse_value(value)
    for key in args.unset:
        table, name = _find_table(document, key, make=False)
        if name not in table:
            raise LrqError(f"{path} has no key {key}", todo="`lrq-ha show-config --changed` shows the keys that it has")
        del table[name]
    text = tomlkit.dumps(document)
    try:
        after = configuration.parse(text, path)
    except configuration.ConfigError as error:
        raise LrqError(error.what, todo="Nothing was written: docs/configuration.md has every key") from error
    live, waiting = _split_changes(before, after)
    if not live and not waiting:
        print(f"{path} stays as it is: these values count already")
        return 0
    if not args.dry_run:
        _write(path, text)
    print(f"{path}: {'would change' if args.dry_run else 'changed'} {', '.join(live + waiting)}")
    for keys, when in ((live, "after `lrq-ha reload`"), (waiting, "after a restart of the sidecar")):
        if keys:
            print(f"  {', '.join(keys)}: {'counts' if len(keys) == 1 else 'count'} {when}")
    return 0


def _split_changes(before: configuration.Config, after: configuration.Config) -> tuple[list[str], list[str]]:
    """The keys that count after a reload, and those that wait for a restart, without values."""
    try:
        mixed = take_live(before, after)
    except ValidationError:  # the keys that count at once do not go with the former values of the others
        mixed = before
    return list(find_changes(before, mixed)), list(find_changes(mixed, after))


def _find_table(document: tomlkit.TOMLDocument, key: str, *, make: bool) -> tuple[Any, str]:
    """The table of a key, and the key's name in it. `make`: a table that the file lacks is added."""
    *names, name = key.split(".")
    if not names or not all((*names, name)):
        raise LrqError(f"{key!r} is no key of a table", todo="Write it as TABLE.KEY, for example door.stop_timeout_s")
    table: Any = document
    for each in names:
        if each not in table and make:
            table[each] = tomlkit.table()
        found = table.get(each)
        if not isinstance(found, AbstractTable):
            what = "is no table" if found is not None else "is not in the file"
            raise LrqError(f"{key}: {each} {what}", todo="Change it with an editor, then check the file with `lrq-ha sidecar --check`")
        table = found
    return table, name


def _parse_value(text: str) -> Any:
    """A value in TOML; text that is no TOML stands for itself."""
    try:
        return tomlkit.value(text)
    except (TOMLKitError, ValueError):
        return text


def _write(path: Path, text: str) -> None:
    """Replaces a file at once. Its owner and mode stay, and a link stays a link."""
    path, new = path.resolve(), None
    try:
        found = path.stat()
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=f".{path.name}.", dir=path.parent, delete=False) as written:
            new = Path(written.name)
            written.write(text)
            written.flush()
            os.fsync(written.fileno())
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(new, found.st_uid, found.st_gid)
        new.chmod(found.st_mode & 0o7777)
        new.replace(path)
    except OSError as error:
        if new is not None:
            new.unlink(missing_ok=True)
        raise LrqError(f"{path} cannot be written: {error.strerror}", todo="Run it as the owner of the file and its folder") from error
