"""The door of `adopt` and `republish`, or the door or broker of `peek`: its address, user and CA.

Rule: every user of a machine can read the arguments of its processes, so an address with a password may come from the environment instead.
"""

from __future__ import annotations

import argparse
import os

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.tls import client_files

DOOR_VARIABLE = "LRQ_HA_DOOR"


def add_options(parser: argparse.ArgumentParser, what: str, *, needed: bool = True) -> None:
    """Adds `--to`, the address of `what`, and `--ca`. `needed`: the command has no other way to find it."""
    known = known_door()
    parser.add_argument(
        "--to",
        default=known,
        required=needed and not known,
        metavar="URL",
        help=f"{what}: amqp://USER:PASSWORD@HOST:PORT, amqps:// for TLS (default: the environment variable {DOOR_VARIABLE}, which other users of "
        "this machine cannot read)",
    )
    parser.add_argument("--ca", default="", metavar="FILE", help="who may sign the door's certificate (PEM; default: those that the system trusts)")


def known_door() -> str | None:
    """The address that the environment names."""
    return os.environ.get(DOOR_VARIABLE)


def address(args: argparse.Namespace) -> Address:
    """The address by `--to` and `--ca`. Raises LrqError if it is no URL, or the file cannot be used."""
    return Address.parse(args.to, tls=client_files(args.ca, "", "", "1.2"))
