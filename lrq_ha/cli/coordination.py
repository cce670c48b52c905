"""`lrq-ha coordination release`: a sidecar that has ended without a word gives its right to lead back, so that a backup takes over at once.

Rule: it takes nothing from another node: the leader's key in etcd goes only if it is this node's, and has not changed meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from lrq_ha.errors import LrqError
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.coordination import open_register


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    coordination = subparsers.add_parser("coordination", help="this node's right to lead in etcd")
    commands = coordination.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = (
        "Gives the right to lead back that this node's sidecar has in etcd, if it has ended without doing so itself: for ExecStopPost of its unit. "
        "A sidecar that runs takes it again."
    )
    release = commands.add_parser("release", help="give it back after the sidecar was killed", description=text)
    release.add_argument("--config", type=Path, required=True, metavar="FILE", help="the node's configuration")
    release.set_defaults(run=_release)


def _release(args: argparse.Namespace) -> int:
    config = configuration.load(args.config)
    if config.coordination is None:
        raise LrqError(f"{args.config} has no [coordination]", todo='It is of use with replication.coordination = "etcd" only')
    released = asyncio.run(_ask(config))
    print(f"{config.node.name} {'has given the right to lead back' if released else 'has no right to lead'}")
    return 0


async def _ask(config: configuration.Config) -> bool:
    etcd, register = open_register(config)
    try:
        return await register.release(config.node.id)
    finally:
        await etcd.close()
