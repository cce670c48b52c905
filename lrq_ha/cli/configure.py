"""`lrq-ha init`, `show-config` and `completion`: what is needed before a node runs. Nothing is connected to."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shtab
from pydantic import BaseModel

from broker_plugin.amqp.errors import grant, impersonate
from lrq_ha.errors import LrqError
from lrq_ha.routing.names import NAME_RULE, ROUTING_VHOST, is_name
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.tables import SECRET

from .list_nodes import CONFIG_VARIABLE, find_config
from .sidecar import redact

USER = "lrq"
DOOR_PORT, HTTP_PORT, BROKER_PORT = 5673, 8080, 5672
_HIDDEN = frozenset({"password", "options"})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], top: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the commands. `top`: makes the whole command line."""
    init = subparsers.add_parser(
        "init",
        help="write the configuration files of a new group",
        description="Writes one small configuration for each node into DIR, with one new password for the sidecars' user, and prints the commands "
        f"that each broker needs. Doors are at port {DOOR_PORT}, HTTP at {HTTP_PORT}, brokers at 127.0.0.1:{BROKER_PORT}.",
        epilog="examples:\n  lrq-ha init /etc/lrq-ha --group east e1=192.0.2.1 e2=192.0.2.2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    init.add_argument("directory", type=Path, metavar="DIR", help="folder for the files")
    init.add_argument("nodes", nargs="+", type=_node, metavar="NODE=HOST", help="each node's name and address, as e1=192.0.2.1")
    init.add_argument("--group", required=True, type=_name, metavar="GROUP", help="the group's name")
    init.set_defaults(run=_init)

    show = subparsers.add_parser(
        "show-config",
        help="show a configuration with all defaults, without secrets",
        description="Shows every key of a node's configuration with the value that counts: the file's, or the default. Passwords are shown as ***.",
    )
    show.add_argument("--config", type=Path, metavar="FILE", help=f"the node's configuration (default: {CONFIG_VARIABLE})")
    show.add_argument("--changed", action="store_true", help="only the keys that the file has")
    show.set_defaults(run=_show)

    completion = subparsers.add_parser(
        "completion",
        help="print the completion of this command for a shell",
        description="Prints a script that completes the commands and options of lrq-ha.",
        epilog="examples:\n  lrq-ha completion bash > /etc/bash_completion.d/lrq-ha\n"
        "  lrq-ha completion zsh > /usr/local/share/zsh/site-functions/_lrq-ha",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    completion.set_defaults(run=lambda args: _complete(top(), args.shell))


# ---- init ------------------------------------------------------------------------------------------------------------


def _name(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: it must be {NAME_RULE}")
    return text


def _node(text: str) -> tuple[str, str]:
    name, _, host = text.partition("=")
    if not host or set(host) & set("/@ '\""):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE=HOST, as e1=192.0.2.1")
    return _name(name), f"[{host}]" if ":" in host and not host.startswith("[") else host


def _init(args: argparse.Namespace) -> int:
    nodes: dict[str, str] = dict(args.nodes)
    if len(nodes) < len(args.nodes) or len(set(nodes.values())) < len(nodes):
        raise LrqError("a name or an address stands twice", todo="Give each node a name and an address of its own, as e1=192.0.2.1")
    files = {name: args.directory / f"{name}.toml" for name in nodes}
    if found := [str(file) for file in files.values() if file.exists()]:
        raise LrqError(f"{', '.join(found)} exists already", todo="Move it away, or name another folder: nothing was written")
    password = secrets.token_hex(16)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
                written.write(_minimal(args.group, name, nodes, password))
    except OSError as error:
        raise LrqError(f"{args.directory} cannot be written: {error.strerror}", todo="Name a folder of yours") from error
    steps = [
        f"rabbitmqctl add_vhost {ROUTING_VHOST}",
        f"rabbitmqctl add_user {USER} '{password}'",
        impersonate(USER),
        grant(ROUTING_VHOST, USER),
        grant("/", USER),
    ]
    print("Written, each for its own machine:", *(f"  {file}" for file in files.values()), "", "Run on each machine:", sep="\n")
    print(*(f"  {step}" for step in steps), "", "Then there:", sep="\n")
    for file in files.values():
        print(f"  lrq-ha doctor --config {file}", f"  lrq-ha sidecar --config {file}", sep="\n")
    return 0


def _minimal(group: str, me: str, nodes: dict[str, str], password: str) -> str:
    numbers = {name: number for number, name in enumerate(nodes, 1)}
    login = f"{USER}:{password}"
    lines = [
        "# Every other key, with its default: lrq-ha show-config --config FILE; their meaning: lrq-ha sidecar --sample",
        "[node]", f'name = "{me}"', f"id = {numbers[me]}", f'group = "{group}"', "",
        "[broker]", f'url = "amqp://{login}@127.0.0.1:{BROKER_PORT}"', "",
        "[door]", f'listen = "{nodes[me]}:{DOOR_PORT}"', "",
        "[http]", f'listen = "{nodes[me]}:{HTTP_PORT}"', "",
    ]  # fmt: skip
    for name, host in nodes.items():
        if name != me:
            lines += ["[[peers]]", f'name = "{name}"', f"id = {numbers[name]}", f'door = "amqp://{login}@{host}:{DOOR_PORT}"',
                      f'http = "http://{host}:{HTTP_PORT}"', ""]  # fmt: skip
    return "\n".join(lines)


# ---- show-config -----------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    print("\n".join(_table_lines("", configuration.read(find_config(args.config)), changed=args.changed)), end="")
    return 0


def _table_lines(heading: str, table: BaseModel, *, changed: bool, listed: bool = False) -> list[str]:
    """The lines of a TOML table, its own keys first, secrets masked. `changed`: only the keys of the file; `listed`: it is one of several."""
    names = [name for name in type(table).model_fields if not changed or name in table.model_fields_set]
    values = {name: value for name in names if (value := getattr(table, name)) is not None}
    inner = {name: found for name, value in values.items() if (found := _tables_in(value))}
    keys = [name for name in values if name not in inner]
    lines = [f"[[{heading}]]" if listed else f"[{heading}]"] if heading and (keys or listed) else []
    lines += [f"{name} = {configuration.toml_value(_mask(name, values[name]))}" for name in keys if not _is_empty_list_of_tables(table, name)]
    lines += [""] if lines else []
    for name, tables in inner.items():
        for key, each in tables:
            where = ".".join(filter(None, (heading, name, key)))
            lines += _table_lines(where, each, changed=changed, listed=isinstance(values[name], list))
    return lines


def _tables_in(value: Any) -> list[tuple[str, BaseModel]]:
    """The tables that a key holds, each with its name if they have names."""
    if isinstance(value, BaseModel):
        return [("", value)]
    if isinstance(value, dict):
        return [(key, each) for key, each in value.items() if isinstance(each, BaseModel)]
    return [("", each) for each in value if isinstance(each, BaseModel)] if isinstance(value, list) else []


def _is_empty_list_of_tables(table: BaseModel, name: str) -> bool:
    return getattr(table, name) in ([], {}) and bool(configuration.models_in(type(table).model_fields[name].annotation))


def _mask(key: str, value: Any) -> Any:
    if key in _HIDDEN:
        return {"***": "***"} if isinstance(value, dict) else "***"
    if key in SECRET:
        return [redact(each) for each in value] if isinstance(value, list) else redact(value)
    return value


# ---- completion ------------------------------------------------------------------------------------------------------


def _complete(top: argparse.ArgumentParser, shell: str) -> int:
    print(shtab.complete(top, shell), end="")
    return 0
