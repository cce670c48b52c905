"""`lrq-ha lab …`: a lab in the foreground, and faults in it from another terminal.

Rules: `up` stays until Ctrl-C, `lab down` or the loss of its terminal, and then leaves nothing behind, its folder included; every other
command finds the lab by its folder, acts once and returns.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from lrq_ha.lab import Lab, LabError, keeper

DEFAULT_DIRECTORY = Path(".lab")
DEFAULT_GROUPS = (("east", 2), ("west", 1))
_DOWN_TIMEOUT_S = 20.0
#: Exit status of a program that a signal has ended, minus the signal's number, as in a shell.
_SIGNALLED = 128


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `lab` and its own commands; each sets `run`, a function from the arguments to the exit status."""
    lab = subparsers.add_parser("lab", help="private brokers and sidecars on this machine, to try things out")
    commands = lab.add_subparsers(dest="lab_command", required=True, metavar="COMMAND")
    up = _command(commands, "up", _up, "start a lab and stay in the foreground; Ctrl-C ends it")
    up.add_argument("--group", action="append", type=_group, metavar="NAME=NODES", help="a group and its size (default: east=2 west=1)")
    up.add_argument("--broker", metavar="VERSION", help="RabbitMQ version, as 3.10, 4.0 or 4.3 (default: the distribution's own)")
    up.add_argument("--coordination", choices=("static", "etcd"), default="static",
                    help="who gives the right to be primary: an operator (static, the default), or an etcd of the lab's own")
    kind = up.add_mutually_exclusive_group()
    kind.add_argument("--brokers-only", action="store_true", help="without sidecars")
    kind.add_argument("--tls", action="store_true", help="doors that take TLS only, with certificates of the lab's own; sidecars use TLS, too")
    _command(commands, "status", _status, "every node's role and processes")
    _command(commands, "down", _down, "end the lab")
    for name, act, text in (("kill", Lab.kill, "SIGKILL"), ("stop", Lab.stop, "SIGSTOP: it stalls"), ("cont", Lab.cont, "SIGCONT"),
                            ("start", Lab.start, "start again what was killed, with its data")):
        command = _command(commands, name, _act(act), text)
        command.add_argument("target", metavar="TARGET", help="a node (e1), a part of it (e1.broker, e1.sidecar), or etcd")
    replace = _command(commands, "replace", _replace, "replace a node's broker by an empty one of another version; its sidecar starts again")
    replace.add_argument("node", metavar="NODE", help="a node (e1)")
    replace.add_argument("--broker", required=True, metavar="VERSION", help="RabbitMQ version, as 4.3")
    ctl = _command(commands, "ctl", _ctl, "run rabbitmqctl on a node's broker; its output and exit status are passed on")
    ctl.add_argument("node", metavar="NODE", help="a node (e1)")
    ctl.usage = "%(prog)s [-h] [--dir DIR] NODE ARGS…"
    ctl.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of rabbitmqctl: all that follows NODE")


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str,
             run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help=f"the lab's folder (default: {DEFAULT_DIRECTORY})")
    command.set_defaults(run=run)
    return command


def _group(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NODES, as east=2")
    return name, int(count)


def _once(groups: Sequence[tuple[str, int]]) -> dict[str, int]:
    found = dict(groups)
    if len(found) < len(groups):
        raise LabError("A group is named twice", todo="Name each with --group once, as east=2")
    return found


class _Ended(BaseException):
    """The loss of the terminal or a signal ends the lab. As KeyboardInterrupt, no error: no handler of errors may catch it."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


def _up(arguments: argparse.Namespace) -> int:
    lab = Lab(_once(arguments.group or DEFAULT_GROUPS), arguments.dir, arguments.broker, brokers_only=arguments.brokers_only, tls=arguments.tls,
              coordination={} if arguments.coordination == "etcd" else None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    started = time.monotonic()
    try:
        lab.prepare()
        print(f"Starting {len(lab.nodes)} nodes on RabbitMQ {lab.version} in {arguments.dir} …", flush=True)
        lab.up()
        print(f"Ready after {time.monotonic() - started:.1f} s.\n")
        print(_addresses(lab), _advice(lab, arguments), sep="\n", flush=True)
        lab.wait()
        print("The lab was ended from another terminal.")
    except (KeyboardInterrupt, _Ended):
        print("\nEnding the lab …", flush=True)
    except LabError:
        # The logs stay, for diagnosis.
        lab.down()
        raise
    lab.down()
    lab.remove()
    print("Nothing of it is left.")
    return 0


def _addresses(lab: Lab) -> str:
    rows = [("node", "group", "role", "door: what applications connect to", "the broker itself", "status")]
    for name, node in lab.nodes.items():
        role = "" if node.sidecar_pid is None else "active" if lab.primary(node.group) == name else "ready"
        rows.append((name, node.group, role, node.door if role else "(no sidecar)", node.broker, f"{node.http}/status" if role else ""))
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _advice(lab: Lab, arguments: argparse.Namespace) -> str:
    first = next(iter(lab.nodes))
    backup = next((name for name, node in lab.nodes.items() if name != first and node.group == lab.nodes[first].group), None)
    where = "" if arguments.dir == DEFAULT_DIRECTORY else f" --dir {arguments.dir}"
    program = "lrq-ha" if shutil.which("lrq-ha") else sys.argv[0]
    tries = [("lab status", "roles and processes"),
             (f"lab kill {first}", f"lose a node: broker and sidecar (or {first}.broker, {first}.sidecar)"),
             (f"lab start {first}", "have it back, with its data"),
             (f"lab stop {first}", "stall it; cont to go on"),
             ("lab down", "end the lab")]
    if not arguments.brokers_only:
        tries.insert(1, ("list", "positions, lag and in-sync set"))
        if lab.etcd:
            tries.insert(-1, ("lab kill etcd", "lose etcd: the primary goes on, and no other takes over"))
        elif backup:
            tries.insert(3, (f"promote {backup} --down {first}", f"make {backup} the primary after that"))
    rows = [(f"{program} {command}{where}", text) for command, text in tries]
    rows.insert(-1, (f"{program} lab ctl{where} {first} list_queues", "rabbitmqctl on its broker"))
    lines = f"{_trust(lab)}\nTo try in another terminal:\n{_table(rows)}{_for_spark(lab)}"
    return f"{lines}\n\nAddresses for programs are in {arguments.dir / keeper.LAB_FILE}. Ctrl-C ends the lab."


def _for_spark(lab: Lab) -> str:
    """The doors of each site that receives, as docs/spark/index.md uses them."""
    groups = dict.fromkeys(node.group for node in lab.nodes.values() if node.sidecar_pid is not None)
    doors = {group: ",".join(node.door for node in lab.nodes.values() if node.group == group) for group in list(groups)[1:]}
    rows = [(f"export LRQ_NODES={addresses}", f"# what {group} receives") for group, addresses in doors.items()]
    return f"\n\nFor Spark:\n{_table(rows)}" if rows else ""


def _trust(lab: Lab) -> str:
    """Instructions to connect if doors take TLS only."""
    if lab.ca is None:
        return ""
    door = urlsplit(next(iter(lab.nodes.values())).door)
    rows = [("Python, any AMQP library", f"SSL_CERT_FILE={lab.ca} python application.py"),
            ("one connection of pika", f'parameters.ssl_options = pika.SSLOptions(ssl.create_default_context(cafile="{lab.ca}"), "{door.hostname}")'),
            ("this project's publishers", f'Publisher([…], …, tls=ssl.create_default_context(cafile="{lab.ca}"))'),
            ("the Spark source", f'.option("tlsCa", "{lab.ca}")'),
            ("a look at the certificate", f"openssl s_client -connect {door.hostname}:{door.port} -CAfile {lab.ca} </dev/null")]
    return f"\nThe doors take TLS only. Whoever connects must trust the lab's authority:\n{_table(rows)}\n"


def _status(arguments: argparse.Namespace) -> int:
    lab = Lab.attach(arguments.dir)
    processes = lab.processes()
    rows: list[Sequence[str]] = [("node", "group", "role", "broker", "sidecar")]
    for name, node in lab.nodes.items():
        parts = [_process_state(processes[key]) if (key := f"{name}.{part}") in processes else "none" for part in ("broker", "sidecar")]
        role = "-"
        if parts[1].startswith("runs"):
            try:
                role = str(lab.status(name)["role"])
            except LabError:
                role = "does not answer"
        rows.append((name, node.group, role, *parts))
    if "etcd" in processes:
        rows.append(("etcd", "", "", _process_state(processes["etcd"]), ""))
    print(_table(rows))
    return 0


def _process_state(pid: int | None) -> str:
    if pid is None:
        return "dead"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "dead"
    return f"{'stopped' if state == 'T' else 'runs'} (pid {pid})"


def _down(arguments: argparse.Namespace) -> int:
    keeper.ask(arguments.dir, do="end")
    if not keeper.wait_gone(arguments.dir, _DOWN_TIMEOUT_S):
        raise LabError(f"The lab in {arguments.dir} does not end", todo=f"See {arguments.dir / 'keeper.log'}")
    print("The lab has ended.")
    return 0


def _act(act: Callable[[Lab, str], None]) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        act(Lab.attach(arguments.dir), arguments.target)
        return _status(arguments)
    return run


def _replace(arguments: argparse.Namespace) -> int:
    Lab.attach(arguments.dir).replace(arguments.node, arguments.broker)
    return _status(arguments)


def _ctl(arguments: argparse.Namespace) -> int:
    given = arguments.arguments
    status = Lab.attach(arguments.dir).run_ctl(arguments.node, given[1:] if given[:1] == ["--"] else given)
    return status if status >= 0 else _SIGNALLED - status
