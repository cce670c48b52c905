"""`lrq-ha peek`: shows what stands in a routing queue, at one node. It changes nothing.

Rules:

- The queue is read at the node's own broker, with the sidecar's own user, where the node's configuration is at hand (in a lab, that of every node).
  Another node is read at its door: a primary's door gives out `LRQ_Recv_*` and `LRQ_Status`, no door gives out `LRQ_Send_*`.
- Payloads may be secrets: they are shown only if asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pika

from broker_plugin.amqp.address import Address
from lrq_ha import urls
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.overview.asking import STATUS_TIMEOUT_S, Target, ask_all
from lrq_ha.overview.nodes import primary_of
from lrq_ha.overview.text import one_line
from lrq_ha.routing.names import ROUTING_VHOST, SEND_LOG_ENTRIES, SEND_SNAP_SYNC, parse_recv_queue
from lrq_ha.sidecar import config as configuration
from lrq_ha.streams.errors import MissingQueue, NoNode, QueueRefused
from lrq_ha.streams.node_connection import NodeConnection, suit_readers

from . import door_options
from .commands import add_group, find_group
from .entry_format import Form, as_json, as_text
from .list_nodes import add_command, find_targets, named
from .queue_entry import QUEUES, check_queue
from .queue_scan import Scan, Wanted

COUNT_DEFAULT, COUNT_MAX = 10, 100_000
SEQUENCE_MAX = 2**63 - 1
_SEND = (SEND_LOG_ENTRIES, SEND_SNAP_SYNC)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `peek`."""
    peek = add_command(
        subparsers,
        "peek",
        "show what stands in a routing queue",
        f"Shows entries of QUEUE, one line each, and changes nothing. QUEUE is one of {QUEUES}. "
        "Sequences are those of the source's log in LRQ_Recv_*, else of this group's. The queue is read at the broker of the node whose "
        "configuration is known, else at the node's door, which gives out LRQ_Recv_* and LRQ_Status at a primary, and never LRQ_Send_*.",
        "examples:\n  lrq-ha peek LRQ_Status --from first\n  lrq-ha peek LRQ_Recv_orders_east --group west --payload json --follow\n"
        "  lrq-ha peek LRQ_Send_LogEntries --from 1200 --count 50 --format json\n"
        "  lrq-ha peek LRQ_Recv_orders_east --to amqp://app:SECRET@192.0.2.2:5673",
        ca=False,
    )
    peek.add_argument("queue", metavar="QUEUE", type=_queue, help="the queue's name")
    add_group(peek)
    peek.add_argument("--node", metavar="NODE", help="the node to read at (default: the configured one; in a lab, the primary)")
    door_options.add_options(peek, "the broker or door to read at instead", needed=False)
    peek.add_argument(
        "--from", dest="begin", type=_begin, default="last", metavar="first|last|SEQUENCE",
        help="the oldest entries; the newest ones (the default); those from entry SEQUENCE of the log on",
    )
    peek.add_argument(
        "--count", type=_count, metavar="N", help=f"how many entries (default: {COUNT_DEFAULT}; with --follow, all from the first one shown on)"
    )
    peek.add_argument("--follow", action="store_true", help="wait for further entries, until Ctrl-C")
    peek.add_argument(
        "--payload", choices=[form.value for form in Form], default=Form.NONE.value, help="show payloads in this form (default: %(default)s)"
    )
    peek.add_argument("--format", choices=("text", "json"), default="text", help="json: one object a line (default: %(default)s)")
    peek.set_defaults(run=_peek)


def _queue(text: str) -> str:
    try:
        return check_queue(text)
    except MalformedInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _begin(text: str) -> int | str:
    if text in ("first", "last"):
        return text
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= SEQUENCE_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not first, last or the sequence of an entry, which is a number from 1 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {COUNT_MAX}")
    return int(text)


def _peek(args: argparse.Namespace) -> int:
    place = _find_place(args)
    sequence = {"first": 0, "last": None}.get(args.begin, args.begin)
    newest = COUNT_DEFAULT if sequence is None or not args.follow else None
    try:
        with NodeConnection.open([_parameters(place.address)], f"lrq-ha peek {args.queue}", 0) as node:
            _show(Scan(node, Wanted(args.queue, sequence, args.count or newest, args.follow)), place, args)
    except NoNode as error:
        raise _closed(place, "; ".join(error.answers.values()), retriable=error.retriable) from error
    except MissingQueue as error:
        raise _missing(args.queue, place) from error
    except QueueRefused as error:
        raise _refused(place, args.queue, error.said) from error
    return 0


def _show(scan: Scan, place: _Place, args: argparse.Namespace) -> None:
    if scan.is_empty:
        print(f"Queue {args.queue} at {place.name} is empty", file=sys.stderr)
    form = Form(args.payload)
    for number, entry in enumerate(scan.entries()):
        if number == 0 and scan.gone:
            print(f"Queue {args.queue} at {place.name} no longer holds what was before", file=sys.stderr)
        lines = [as_json(entry, form)] if args.format == "json" else as_text(entry, form)
        for line in lines:
            print(line, flush=args.follow)


# ---- where to read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a queue is read.

    Attributes:
        name: For texts.
        address: Of the broker or door, with the user.
        target: The node; None: not known.
        is_broker: It is a broker; None: not known.
    """

    name: str
    address: Address
    target: Target | None = None
    is_broker: bool | None = None


def _find_place(args: argparse.Namespace) -> _Place:
    named_here = args.node or args.group or args.config or args.dir
    if args.to and args.to != door_options.known_door() and named_here:
        raise LrqError("--to is the place to read at, so --node, --group, --config and --dir have no meaning", todo="Leave --to or the others out")
    if args.to and not named_here:
        if fault := urls.amqp_fault(args.to, ROUTING_VHOST):
            raise MalformedInput(f"The address in --to {fault}", todo=f"Give amqp://USER:PASSWORD@HOST:PORT; {urls.PASSWORD_RULE}")
        address = door_options.address(args)
        return _Place(f"{address.host}:{address.port}", address)
    targets = find_targets(args)
    if args.node:
        group = find_group(targets, args.group or named(args.node, targets).group)
        return _place_of(named(args.node, group), group)
    group = find_group(targets, args.group)
    return _place_of(_choose_node(group), group)


def _choose_node(group: Sequence[Target]) -> Target:
    """The node whose configuration is here; if it is that of several, the primary."""
    known = [target for target in group if target.config] or list(group)
    primary = primary_of(group[0].group, ask_all(known)) if len(known) > 1 else None
    return primary.target if primary else known[0]


def _place_of(target: Target, group: Sequence[Target]) -> _Place:
    name = f"node {target.name}"
    if target.config:
        address = configuration.read(target.config).broker_address(ROUTING_VHOST)
        if address.proxied:
            raise LrqError(
                f"the broker of {name} expects the PROXY protocol, which peek does not speak",
                todo="Read at the primary's door, with --to: it gives out LRQ_Recv_* and LRQ_Status",
            )
        return _Place(name, address, target, is_broker=True)
    for config in (configuration.read(other.config) for other in group if other.config):
        for peer in config.peers:
            if peer.name == target.name:
                return _Place(name, config.door_address(peer.door, ROUTING_VHOST), target, is_broker=False)
    raise LrqError(f"the address of {name} is not known here", todo="Name it with --to")


def _parameters(address: Address) -> pika.ConnectionParameters:
    tls = address.tls.context if address.tls else None
    return suit_readers(
        pika.ConnectionParameters(
            host=address.host,
            port=address.port,
            credentials=pika.PlainCredentials(address.user, address.password),
            ssl_options=pika.SSLOptions(tls, address.server_name or address.host) if tls else None,
        )
    )


# ---- what keeps a queue from being read ------------------------------------------------------------------------------


def _closed(place: _Place, said: str, *, retriable: bool) -> LrqError:
    """The place takes no connection."""
    todo = "Is it running, and is the address right?"
    if "is a backup" in said:
        todo = "A backup's door takes no readers: read it on its own machine, with --config, or at its broker, with --to"
    elif "CERTIFICATE" in said:
        todo = "Name who signs its certificate: with --ca, or in [tls] of the configuration"
    elif not retriable:
        todo = f"Check user and password, and the rights of user {place.address.user} in vhost {ROUTING_VHOST}"
    return LrqError(f"{place.name} cannot be read: {said}", todo=todo, retriable=retriable)


def _refused(place: _Place, queue: str, said: str) -> LrqError:
    """The place does not let the user read the queue."""
    if queue in _SEND and not place.is_broker:
        todo = "No door gives it out: read it on the node's own machine, with --config, or at its broker, with --to and the sidecars' user"
    elif "PRECONDITION_FAILED" in said:
        todo = "Routing queues are streams that a sidecar makes: another queue has this name"
    else:
        todo = f"A reader needs the right to read it: rabbitmqctl list_permissions -p {ROUTING_VHOST}"
    return LrqError(f"{place.name} does not give out queue {queue}: {said}", todo=todo)


def _missing(queue: str, place: _Place) -> LrqError:
    """Why a queue is not there, as far as the node's sidecar knows."""
    what = f"{place.name} has no queue {queue} in vhost {ROUTING_VHOST}"
    if parse_recv_queue(queue) is None:
        return LrqError(what, todo="A sidecar makes it at its start: did one run beside this broker?")
    known = _receive_queues(place.target) if place.target else None
    if known is None:
        return LrqError(what, todo="A receive queue appears with the first batch from that site: check the name, or wait for it")
    if queue in known:
        return LrqError(
            f"{what}, though the group has it: nothing has come since this node got its log",
            todo="Read it at another node, with --node, or wait for the next batch",
        )
    listed = one_line(", ".join(known)) or "none yet"
    return LrqError(what, todo=f"It appears with the first batch from that site. Receive queues there: {listed}")


def _receive_queues(target: Target) -> list[str] | None:
    """The receive queues of a node's group; None: its sidecar does not say."""
    try:
        with target.access.open(f"{target.http}/queues", timeout=STATUS_TIMEOUT_S) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    return [str(name) for name in found] if isinstance(found, list) else None
