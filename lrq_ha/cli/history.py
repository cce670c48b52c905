"""`lrq-ha history`: the leaders of a group that etcd coordinates, each with its right to lead and how long its recovery took.

Rule: etcd is asked, not the nodes: the history is there while all of them are down.
"""

from __future__ import annotations

import argparse
import asyncio

from lrq_ha.errors import LrqError
from lrq_ha.overview.history import history_table
from lrq_ha.overview.text import align_table
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.coordination import open_register

from .commands import add_group, find_group
from .list_nodes import WATCH_INTERVAL_S, add_command, find_targets

ETCD_TIMEOUT_S = 5.0  # of a request to one endpoint: no lease hangs on it


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    history = add_command(
        subparsers,
        "history",
        "the leaders of a group that etcd coordinates",
        "The last leaders of a group, the newest last: since when, of which epoch, why, where the log ended, and the milliseconds until the door was "
        "open. etcd has the last 200.",
        "examples:\n  lrq-ha history\n  lrq-ha history --follow",
    )
    add_group(history)
    history.add_argument("-f", "--follow", action="store_true", help="go on, with a line for each new leader, until Ctrl-C")
    history.set_defaults(run=_history)


def _history(args: argparse.Namespace) -> int:
    group = find_group(find_targets(args), args.group)
    file = next((target.config for target in group if target.config), None)
    if file is None:
        raise LrqError(f"no configuration of a node of group {group[0].group} is on this machine", todo="Name one with --config FILE")
    config = configuration.load(file)
    if config.coordination is None:
        raise LrqError(f"{file} has no [coordination]", todo='The history is kept with replication.coordination = "etcd" only')
    asyncio.run(_show(config, follow=args.follow))
    return 0


async def _show(config: configuration.Config, *, follow: bool) -> None:
    etcd, register = open_register(config, ETCD_TIMEOUT_S)
    shown: list[str] = []
    try:
        while True:
            table = history_table(await register.read_history())
            lines = align_table(table.headings, table.rows)
            # The recovery of an epoch is in its line once it is over. A line that was shown without it is shown again.
            print("".join(f"{line}\n" for line in lines if line not in shown), end="", flush=True)
            shown = lines
            if not follow:
                return
            await asyncio.sleep(WATCH_INTERVAL_S)
    finally:
        await etcd.close()
