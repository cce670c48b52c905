"""`lrq-ha adopt`: brings a broker's earlier messages, queues and exchanges into the replicated log, so that a backup has them too.

Rules:

- Everything goes through the primary's door, as an ordinary client would do it: exchanges, queues and bindings are declared again as they are, and
  each message that has no position yet is published to the end of its queue; the old copy is acknowledged when the new one is confirmed.
- A queue is adopted by a single pass over as many messages as it has at the beginning. Messages that are adopted already are held until all of those
  have come by, and requeued, so an interrupted run is simply repeated; it may leave up to WINDOW_MESSAGES of a queue twice, as they have no identity.
  If priorities count, new copies overtake old messages, and are held, too. A pass that has not seen everything says so, and the
  command fails. If a requeue counts as a delivery attempt, and these are limited, the pass ends at the first adopted message, and says so.
- A copy comes from the default exchange, with the queue's name as its routing key. If dead letters keep their routing key, those of a
  message with another key would go to another queue, or none: from the window on that has one, such a queue is left as it is, and the command fails.
- Not adopted: exclusive, auto-delete and `amq.*` queues, messages of streams and of queues with another level than `all`,
  and policies of the broker. Only the door knows levels by name: messages of such a queue go to its end, all and in order, to no effect.
- RabbitMQ leaves internal exchanges out of definitions. A backup cannot bind anything to or from a missing exchange: each such
  binding is named, and the command fails. A binding with numbers as arguments fails too: their AMQP types are part of its identity, and JSON
  has lost them. Declared with another type it would be a second binding, which its application cannot remove.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Channel, Connection
from broker_plugin.amqp.content_header import COUNTS, cut, keeps_its_ways
from broker_plugin.amqp.errors import ChannelClosed
from broker_plugin.amqp.requeue import in_steps, requeue_is_free
from broker_plugin.log.definitions import ALONE
from broker_plugin.log.stamps import position
from lrq_ha.errors import LrqError
from lrq_ha.overview.text import one_line
from lrq_ha.replication import levels
from lrq_ha.replication.levels import Level
from lrq_ha.routing.names import ROUTING_VHOST

from . import door_options

WINDOW_MESSAGES = 200
#: Adopted messages that one more reader may hold; a connection has some two thousand channels.
HELD_MESSAGES = 1_000
IDLE_S = 5.0
QUIET_S = 0.05
#: Above every consumer that an application is likely to have.
PRIORITY = 1_000
#: The other queues that a message names have copies of their own; RabbitMQ's counts of the old copy start again.
NOT_ADOPTED = (b"CC", *COUNTS)
BY_KEY = (
    "it dead-letters by routing key, which a moved message does not keep. "
    "Let it be emptied first, or set a dead-letter-routing-key by a policy, and export the definitions again"
)

#: Keys of each kind of definition that are used, and must be there.
_USED: dict[str, dict[str, type]] = {
    "vhosts": {"name": str},
    "exchanges": {"vhost": str, "name": str, "type": str, "durable": bool, "auto_delete": bool, "arguments": dict},
    "queues": {"vhost": str, "name": str, "durable": bool, "auto_delete": bool, "arguments": dict},
    "bindings": {"vhost": str, "source": str, "destination": str, "destination_type": str, "routing_key": str, "arguments": dict},
    "policies": {"vhost": str, "pattern": str, "apply-to": str, "priority": int, "definition": dict},
}

Delivered = tuple[Channel, int, str, bytes, bytes]  # channel of its ack, delivery tag, routing key, content header, body


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `adopt`."""
    adopt = subparsers.add_parser(
        "adopt",
        help="bring what a broker held before into the replicated log",
        description="Declares everything in a broker's definitions again through the primary's door, and brings the messages that its queues hold "
        "into the replicated log. Run it once, before applications use the door: messages go to the end of their queue.",
        epilog="example:\n  rabbitmqctl export_definitions - | lrq-ha adopt --to amqp://admin:SECRET@127.0.0.1:5673 --dry-run\n\n"
        "On the backups' brokers, import that file first (rabbitmqctl import_definitions): users, vhosts, permissions and policies are theirs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    adopt.add_argument("--definitions", type=Path, metavar="FILE", help="as from rabbitmqctl export_definitions (default: standard input)")
    door_options.add_options(adopt, "the primary's door, with a user who may configure, write and read everything")
    adopt.add_argument("--vhost", action="append", metavar="VHOST", help="only this one; may be repeated")
    adopt.add_argument("--dry-run", action="store_true", help="only say what would be declared, and how many messages each queue has")
    adopt.set_defaults(run=_run)


@dataclass(frozen=True)
class _Definitions:
    """The definitions to declare in one vhost."""

    vhost: str
    exchanges: list[dict[str, Any]]
    queues: list[dict[str, Any]]
    bindings: list[dict[str, Any]]
    unknown: list[tuple[str, dict[str, Any]]]  # a missing exchange, and its bindings
    typeless: list[dict[str, Any]]  # bindings with numbers as arguments
    policies: list[dict[str, Any]]  # the broker's own: not declared, but they may set dead-letter exchanges


def read_definitions(text: str, vhosts: Iterable[str] | None = None) -> list[_Definitions]:
    """The definitions of a broker, without its own objects.

    Args:
        text: JSON, as `rabbitmqctl export_definitions` writes it.
        vhosts: Only these.

    Raises:
        LrqError: The text is something else, or a vhost is not in it.
    """
    try:
        whole = json.loads(text)
        found = {kind: [_checked(each, used) for each in whole[kind]] for kind, used in _USED.items()}
        known = [vhost["name"] for vhost in found["vhosts"]]
        wanted = [vhost for vhost in known if vhost != ROUTING_VHOST] if vhosts is None else list(vhosts)
        definitions = [_of(vhost, found) for vhost in wanted]
    except (ValueError, KeyError, TypeError) as error:
        raise LrqError(f"these are not a broker's definitions: {error!r}", todo="Get them with: rabbitmqctl export_definitions FILE") from error
    if ROUTING_VHOST in wanted:
        raise LrqError(f"vhost {ROUTING_VHOST} holds what sidecars write, which is not adopted", todo="Name the vhosts of applications, or none")
    missing = [vhost for vhost in wanted if vhost not in known]
    if missing:
        raise LrqError(f"the definitions have no vhost {', '.join(missing)}", todo=f"There are: {', '.join(known)}")
    return definitions


def _of(vhost: str, found: dict[str, list[dict[str, Any]]]) -> _Definitions:
    exchanges, queues, bindings = ([each for each in found[kind] if each["vhost"] == vhost] for kind in ("exchanges", "queues", "bindings"))
    exchanges = [e for e in exchanges if not e["name"].startswith(("amq.", ALONE))]
    bindings = [b for b in bindings if not b["source"].startswith(ALONE)]
    queues = [q for q in queues if not q["auto_delete"] and not q["name"].startswith("amq.")]
    exchange_names, queue_names = {e["name"] for e in exchanges}, {q["name"] for q in queues}
    definitions = _Definitions(vhost, exchanges, queues, [], [], [], [policy for policy in found["policies"] if policy["vhost"] == vhost])
    for b in bindings:
        to_queue = b["destination_type"] == "queue"
        if to_queue and b["destination"] not in queue_names:
            continue
        ends = [b["source"]] if to_queue else [b["source"], b["destination"]]
        unknown = next((name for name in ends if name not in exchange_names and not name.startswith("amq.")), None)
        if unknown is not None:
            definitions.unknown.append((unknown, b))
        elif _has_numbers(b["arguments"]):
            definitions.typeless.append(b)
        else:
            definitions.bindings.append(b)
    return definitions


def _has_numbers(value: object) -> bool:
    """Whether JSON has lost an AMQP type of it: numbers have several."""
    if isinstance(value, dict):
        return any(map(_has_numbers, value.values()))
    if isinstance(value, list):
        return any(map(_has_numbers, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checked(definition: dict[str, Any], used: dict[str, type]) -> dict[str, Any]:
    for key, kind in used.items():
        if not isinstance(definition[key], kind):
            raise TypeError(f"{key} is {definition[key]!r}")
    return definition


def _run(args: argparse.Namespace) -> int:
    try:
        text = args.definitions.read_text("utf-8") if args.definitions else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        what = f"{args.definitions or 'standard input'} cannot be read: {why}"
        raise LrqError(what, todo="Give the output of `rabbitmqctl export_definitions -`") from error
    to = door_options.address(args)
    # rabbitmqctl may print a line of its own first.
    whole = [asyncio.run(_adopt(each, to, dry_run=args.dry_run)) for each in read_definitions(text[max(text.find("{"), 0) :], args.vhost)]
    return 0 if all(whole) else 1


def _say(text: str) -> None:
    print(one_line(text), flush=True)


async def _adopt(definitions: _Definitions, to: Address, *, dry_run: bool) -> bool:
    """Returns whether every message to adopt was seen."""
    whole = not (definitions.unknown or definitions.typeless)
    connection = await Connection.open(replace(to, vhost=definitions.vhost))
    try:
        channel = await connection.channel()
        if not dry_run:
            await _declare(channel, definitions)
        said = "would be declared" if dry_run else "declared"
        counts = f"{len(definitions.exchanges)} exchanges, {len(definitions.queues)} queues, {len(definitions.bindings)} bindings"
        _say(f"vhost {definitions.vhost}: {counts} {said}")
        for exchange, b in definitions.unknown:
            _say(f"  exchange {exchange} is not in the definitions, so {b['source']} is not bound to {b['destination']} (key '{b['routing_key']}')")
        if definitions.unknown:
            _say('  RabbitMQ leaves internal exchanges out: add them to the definitions, with "internal": true, and run this again')
        for b in definitions.typeless:
            arguments = json.dumps(b["arguments"])
            _say(f"  {b['source']} is not bound to {b['destination']}: of the numbers in {arguments} the definitions do not say the types")
        if definitions.typeless:
            _say("  let their applications declare these bindings through the door, and leave them out of the definitions")
        for queue in definitions.queues:
            name = queue["name"]
            if _kind(queue) == "stream":
                _say(f"  {name}: a stream; what it holds stays on this broker")
                continue
            level = queue["arguments"].get(levels.ARGUMENT, Level.ALL.value)
            if level != Level.ALL.value:
                _say(f"  {name}: {levels.ARGUMENT} is {level}; what it holds stays on this broker")
                continue
            try:
                _, depth, _ = await channel.queue_declare(name, passive=True)
            except ChannelClosed as error:
                if not (dry_run and error.no_such_queue):
                    raise
                _say(f"  {name}: would be made")
                channel = await connection.channel()
                continue
            if dry_run:
                _say(f"  {name}: {depth} messages")
            else:
                # Quorum queues have priorities since RabbitMQ 4.
                by_priority = "x-max-priority" in queue["arguments"] or (_kind(queue) == "quorum" and requeue_is_free(connection))
                limited = "x-delivery-limit" in queue["arguments"] and not requeue_is_free(connection)
                dies_by_key = _dies_by_key(queue, definitions.policies)
                if limited and dies_by_key and depth:  # looking and requeueing uses up deliveries
                    _say(f"  {name}: none of {depth} messages was looked at: {BY_KEY}")
                    whole = False
                    continue
                this = _Pass(connection, name, depth, by_priority=by_priority, limited=limited, dies_by_key=dies_by_key)
                whole &= await this.run()
                _say(f"  {name}: {this.told()}")
    finally:
        await connection.close()
    return whole


def _kind(queue: dict[str, Any]) -> str:
    return str(queue["arguments"].get("x-queue-type") or queue.get("type") or "classic")


def _dies_by_key(queue: dict[str, Any], policies: Iterable[dict[str, Any]]) -> bool:
    """Whether its dead letters keep, or may keep, their routing key.

    Its arguments decide each setting, or else from the one policy that applies to it: the first match, unless an earlier one cannot be read.
    """
    applies_to = ("all", "queues", f"{_kind(queue)}_queues")
    rivals: list[dict[str, Any]] = []
    for policy in sorted(policies, key=lambda policy: -policy["priority"]):
        matches = _matches(policy["pattern"], queue["name"]) if policy["apply-to"] in applies_to else False
        if matches is not False:
            rivals.append(policy["definition"])
        if matches:
            break
    else:
        rivals.append({})

    def has(what: str, policy: dict[str, Any]) -> bool:
        return f"x-{what}" in queue["arguments"] or what in policy

    return any(has("dead-letter-exchange", policy) and not has("dead-letter-routing-key", policy) for policy in rivals)


def _matches(pattern: str, name: str) -> bool | None:
    """None: the pattern is valid in Erlang alone, or has another meaning in Python."""
    try:
        with warnings.catch_warnings(action="error", category=FutureWarning):
            return re.search(pattern, name) is not None
    except (re.error, FutureWarning):
        return None


async def _declare(channel: Channel, definitions: _Definitions) -> None:
    for e in definitions.exchanges:
        flags = {"durable": e["durable"], "auto_delete": e["auto_delete"], "internal": e.get("internal", False)}
        await channel.exchange_declare(e["name"], e["type"], arguments=e["arguments"], **flags)
    for q in definitions.queues:
        arguments = {**q["arguments"], "x-queue-type": _kind(q)}
        await channel.queue_declare(q["name"], durable=q["durable"], arguments=arguments)
    for b in definitions.bindings:
        bind = channel.queue_bind if b["destination_type"] == "queue" else channel.exchange_bind
        await bind(b["destination"], b["source"], b["routing_key"], b["arguments"])


class _Pass:
    """One pass over a queue of `depth` messages."""

    def __init__(self, connection: Connection, queue: str, depth: int, *, by_priority: bool, limited: bool, dies_by_key: bool) -> None:
        self._connection = connection
        self._queue = queue
        self._depth = depth
        self._by_priority = by_priority
        self._limited = limited  # messages that are requeued too often are lost
        self._dies_by_key = dies_by_key
        self._arrived: asyncio.Queue[Delivered] = asyncio.Queue()
        self._readers: list[Channel] = []
        self._consumer = ""  # of the last reader; the others only hold their messages
        self._room = 0  # how many more the last reader may hold
        self._adopted = 0
        self._held = 0  # messages with a position: requeued at the end
        self._obstacle = ""  # why not everything was seen
        self._unanswered: set[int] = set()  # publish tags
        self._refused: set[int] = set()

    def told(self) -> str:
        """The result, in words."""
        said = f"{self._adopted} of {self._depth} messages adopted"
        if self._obstacle:
            return f"{said}, and not all were seen: {self._obstacle}"
        if self._limited and self._held:
            return f"{said} (up to the first that has a position: to look behind it would count as delivery attempts, and there is a limit)"
        return said if self._adopted else f"{said} (none was without a position)"

    async def run(self) -> bool:
        """Returns whether it has seen every message of the pass. Raises LrqError if the broker refuses a message, which then stays in its place."""
        writer = await self._connection.channel(on_confirm=self._answered)
        await writer.confirm_select()
        try:
            while not self._obstacle and not await self._is_over():
                if self._room:
                    await self._move(writer, await self._window())
                else:
                    await self._read_on()
        except ChannelClosed as error:
            todo = "Mend what the broker names, then run this again"
            raise LrqError(f"queue {self._queue}: the broker refuses to take a message again: {error.text}", todo=todo) from error
        await self._give_back()
        await writer.close()
        return not self._obstacle

    async def _give_back(self) -> None:
        """Requeues held messages, and deliveries beyond the pass: in order, when none is on its way any more; and if RabbitMQ has a way that
        does not count as a delivery attempt, in that way.
        """
        if self._readers:
            await self._all_arrived(self._readers[-1])
            await self._readers[-1].cancel(self._consumer)
        for reader in self._readers:
            if requeue_is_free(self._connection):
                reader.nack(0, multiple=True)
            await reader.close()

    async def _all_arrived(self, reader: Channel) -> None:
        """Waits until no delivery is on its way. Messages that the queue had given out when it answered stand in the broker's channel by then."""
        met = -1
        while met != self._arrived.qsize():
            met = self._arrived.qsize()
            await asyncio.sleep(QUIET_S)
            await reader.queue_declare(self._queue, passive=True)
            await reader.flow()

    async def _read_on(self) -> None:
        """Opens one more reader, as the one before holds its maximum."""
        try:
            reader = await self._connection.channel()
        except ChannelClosed as error:
            self._obstacle = f"{self._held} with a position came first, and no more can be held ({error.text})"
            return
        if self._readers:
            await self._readers[-1].cancel(self._consumer)
        self._room = HELD_MESSAGES if self._readers else WINDOW_MESSAGES
        await reader.qos(self._room)
        self._consumer = await reader.consume(
            self._queue,
            lambda tag, _redelivered, _exchange, key, header, body: self._arrived.put_nowait((reader, tag, key, header, body)),
            arguments={"x-priority": PRIORITY},
        )
        self._readers.append(reader)

    @property
    def _left(self) -> int:
        """Number of old messages without a position that may still come. If priorities count, copies come by before them."""
        if self._limited and self._held:
            return 0
        return self._depth - self._adopted - (0 if self._by_priority else self._held)

    async def _is_over(self) -> bool:
        if self._left <= 0:
            return True
        if not self._by_priority or self._held < self._depth or not self._arrived.empty():
            return False
        # As many deliveries as old and published messages have come by. If another client published, old ones may still be behind.
        _, ready, _ = await self._readers[-1].queue_declare(self._queue, passive=True)
        return ready == 0 and self._arrived.empty()

    async def _window(self) -> list[Delivered]:
        """The messages that have come, at most WINDOW_MESSAGES; empty if no more come."""
        window: list[Delivered] = []
        try:
            async with asyncio.timeout(IDLE_S):
                window.append(await self._arrived.get())
        except TimeoutError:
            self._obstacle = f"nothing more came for {IDLE_S:g} s. Does a consumer hold or take them? End it, and run this again"
        while not self._arrived.empty() and len(window) < min(WINDOW_MESSAGES, self._left):
            window.append(self._arrived.get_nowait())
        return window

    async def _move(self, writer: Channel, window: list[Delivered]) -> None:
        new = [delivered for delivered in window if position(delivered[3]) is None]
        if self._dies_by_key and not all(keeps_its_ways(self._queue, key, header) for _, _, key, header, _ in new):
            self._obstacle = BY_KEY
            return
        published: dict[int, Delivered] = {}
        try:
            for delivered in new:
                header = delivered[3]
                for key in NOT_ADOPTED:
                    header = cut(header, key)
                tag = writer.publish_content("", self._queue, header, delivered[4])
                self._unanswered.add(tag)
                published[tag] = delivered
            await writer.confirmed()
        except ChannelClosed:
            await self._let_go(published)
            raise
        if self._refused:
            await self._let_go(published)
            raise LrqError(f"queue {self._queue} refuses messages (it has a length limit)", todo="Raise the limit, then run this again")
        for reader, tag, *_ in new:
            reader.ack(tag)
        self._adopted += len(new)
        self._held += len(window) - len(new)
        self._room -= len(window) - len(new)

    def _answered(self, tag: int, multiple: bool, ok: bool) -> None:
        """The broker has confirmed or refused publishes."""
        tags = {each for each in self._unanswered if each <= tag} if multiple else {tag}
        self._unanswered -= tags
        if not ok:
            self._refused |= tags

    async def _let_go(self, published: dict[int, Delivered]) -> None:
        """Acknowledges the confirmed messages of an incomplete window: the next run would adopt them again."""
        taken = [delivered for tag, delivered in published.items() if tag not in self._unanswered and tag not in self._refused]
        for reader in self._readers:
            await in_steps(reader, [tag for its, tag, *_ in taken if its is reader], reader.ack)
