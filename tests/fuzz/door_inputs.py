"""What a hostile client sends to a door, made from a number alone. Pure.

Rules:
- An attack is one connection. It gets as far as its stage by the book, then sends its inputs, one after the other, each on channels of its own,
  as long as the connection stands.
- An input is made in one of three ways: octets of the corpus changed at random (most of them end at the frame scanner), its frames put in another
  order or changed inside (they end in what reads methods and headers), or methods of any kind with any arguments (they get to what keeps state).
- Nearly every such input ends its connection, and a login is what costs most. So most of those before the last are tame: methods and contents of any
  kind with any arguments, for which a broker closes their channel at worst. What is wild comes upon all that they have left behind.
- What is declared for all nodes stops all clients for a moment: that is seldom drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from corpus import FOLDER, mutated, rng_of
from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames

INPUTS_MAX = 24
WILD = 0.05  # of the inputs before the last
CHANNELS_EACH = 3  # of one input
MARK = b"hunter2"  # stands in what must never be logged
DECLARING = 0.04
PRODUCERS = 200  # two at once with the same name end each other
QUEUES = ("", "q", "q", "fuzz-own", "nowhere", "LRQ_HA_east")
EXCHANGES = ("", "", "", "e", "amq.direct", "amq.topic", "amq.fanout", "nowhere")
TAGS = ("", "c", "d")
NUMBERS = (0, 1, 1, 2, 3, 10, 1 << 31, (1 << 63) - 1)

SEEDS = {file.stem: file.read_bytes() for file in sorted(FOLDER.glob("*.bin"))}
LOGINS = [SEEDS["login"], SEEDS["amqplain-twice"], SEEDS["other-protocol"]]
DECLARES = [data for name, data in SEEDS.items() if name == "topology" or name.startswith("declares-")]
PLAIN_SEEDS = [data for data in SEEDS.values() if data not in (*DECLARES, *LOGINS)]


class Stage(Enum):
    """What a client has done by the book before its inputs come."""

    CONNECTED = "nothing"
    GREETED = "it has sent the protocol header, and was asked who it is"
    TUNING = "it has logged in, and was asked for its limits"
    OPEN = "its connection is open"


@dataclass(frozen=True)
class Attack:
    """One hostile connection.

    Attributes:
        number: What it is made from.
        vhost: Where it logs in.
        producer: The name it announces; empty for none.
        count: How many inputs it has.
        write_bytes: How much of an input is written at a time.
        answers: It answers a channel.close as a client does.
        leaves: It is gone with the last input, and waits for nothing.
        resets: It goes without TCP's goodbye.
    """

    number: int
    stage: Stage
    vhost: str
    producer: str
    count: int
    write_bytes: int
    answers: bool
    leaves: bool
    resets: bool

    @property
    def properties(self) -> dict[str, Any]:
        """Client properties."""
        return {"lrq_producer": self.producer} if self.producer else {}

    def input(self, i: int) -> bytes:
        """What it sends after its stage, as the i-th of `count`."""
        rng = rng_of(self.number << 8 | i + 1)
        if self.stage is not Stage.OPEN:
            return _early_input(rng, self.stage)
        base = 1 + CHANNELS_EACH * i
        if i + 1 < self.count and rng.random() >= WILD:
            return _tame_input(rng, base, self.producer)
        return _wild_input(rng, base, self.producer)


def attack(number: int) -> Attack:
    """The attack of this number."""
    rng = rng_of(number << 8)
    stage = rng.choices(list(Stage), (20, 8, 7, 65))[0]
    vhost = "lrq" if rng.random() < 0.06 else "/"
    producer = f"fuzz-{rng.randrange(PRODUCERS)}" if rng.random() < 0.3 else ""
    return Attack(
        number,
        stage,
        vhost,
        producer,
        rng.randint(2, INPUTS_MAX) if stage is Stage.OPEN else 1,
        rng.choices([1 << 20, 100, 7, 1], (70, 20, 6, 4))[0],
        rng.random() < 0.8,
        rng.random() < 0.1,
        rng.random() < 0.5,
    )


def _early_input(rng: random.Random, stage: Stage) -> bytes:
    """Bytes before the connection is open: a login that is changed, or anything else."""
    if stage is Stage.CONNECTED:
        return mutated(rng, [*SEEDS.values()] if rng.random() < 0.6 else LOGINS)
    parts = split(SEEDS["login"][len(frames.PROTOCOL_HEADER) :])[0]
    kept = parts if stage is Stage.GREETED else parts[1:]
    if rng.random() < 0.5:
        return _changed_frames(rng, kept, 0)
    return mutated(rng, [b"".join(kept)])


def _wild_input(rng: random.Random, base: int, producer: str) -> bytes:
    way = rng.random()
    seeds = DECLARES if rng.random() < DECLARING else PLAIN_SEEDS
    if way < 0.3:
        if rng.random() < 0.05:
            return mutated(rng, LOGINS)
        return mutated(rng, [_moved(seed, base) for seed in seeds])
    if way < 0.6:
        parts = [part for _ in range(rng.randint(1, 2)) for part in split(_moved(rng.choice(seeds), base))[0]]
        return _changed_frames(rng, parts, base)
    opened = [encode.method_frame(base, commands.Channel.Open())] if rng.random() < 0.95 else []
    declaring = rng.random() < DECLARING
    return b"".join(opened + [_anything(rng, base, producer, declaring) for _ in range(rng.randint(1, 12))])


def _tame_input(rng: random.Random, base: int, producer: str) -> bytes:
    channels = range(base, base + rng.choice((1, 1, 1, 1, 2)))
    parts = [encode.method_frame(channel, commands.Channel.Open()) for channel in channels]
    kinds = DECLARATIONS if rng.random() < DECLARING else METHODS
    for _ in range(rng.randint(1, 6)):  # the first error of a channel is the last that counts
        channel = rng.choice(channels)
        if rng.random() < 0.3:
            parts.append(_publish(rng, channel, producer))
        else:
            parts.append(encode.method_frame(channel, rng.choice(kinds)(rng)))
    return b"".join(parts)


# ---- frames of the corpus, changed -----------------------------------------------------------------------------------------


@lru_cache(1_000)
def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The frames at the beginning, and what is none."""
    found, at = [], 0
    while at + 8 <= len(data):
        after = at + 8 + int.from_bytes(data[at + 3 : at + 7], "big")
        if after > len(data):
            break
        found.append(data[at:after])
        at = after
    return found, data[at:]


def on_channel(part: bytes, channel: int) -> bytes:
    """The same frame on another channel."""
    return part[:1] + channel.to_bytes(2, "big") + part[3:]


@lru_cache(1_000)
def _moved(data: bytes, base: int) -> bytes:
    """A session whose channel 1 is another one."""
    parts, rest = split(data)
    return b"".join(on_channel(part, base) if part[1:3] == b"\0\1" else part for part in parts) + rest


def _changed_frames(rng: random.Random, parts: list[bytes], base: int) -> bytes:
    """Frames left out, repeated, in another order, on another channel, or with another payload; each by itself is whole."""
    parts = list(parts)
    for _ in range(rng.randint(0, 4)):
        if not parts:
            break
        at = rng.randrange(len(parts))
        match rng.randrange(6):
            case 0:
                del parts[at]
            case 1:
                parts.insert(rng.randrange(len(parts) + 1), parts[at])
            case 2:
                parts.insert(rng.randrange(len(parts)), parts.pop(at))
            case 3:
                parts[at] = on_channel(parts[at], rng.choice([0, base, base + 1, 65_535]))
            case 4:
                parts[at] = bytes((rng.choice([1, 2, 3, 8]),)) + parts[at][1:]
            case _:
                payload = mutated(rng, [parts[at][7:-1]])
                parts[at] = encode.frame(parts[at][0], int.from_bytes(parts[at][1:3], "big"), payload)
    return b"".join(parts)


# ---- methods of any kind ---------------------------------------------------------------------------------------------------


def _bit(rng: random.Random) -> bool:
    return rng.random() < 0.3


def _arguments(rng: random.Random) -> dict[str, Any]:
    keys = ("x-priority", "x-stream-offset", "x-max-length", "x-expires", "x-lrq-replicate", "x-queue-type", "x-dead-letter-exchange", "x-overflow")
    values = (0, -1, 1 << 40, "", "first", "quorum", "none", "reject-publish-dlx", True, None, [1, "a"], {"n": {"n": 1}}, bytearray(b"\xff"))
    return {rng.choice(keys): rng.choice(values) for _ in range(rng.choice((0, 0, 1, 2)))}


METHODS: list[Callable[[random.Random], Any]] = [
    lambda r: commands.Basic.Qos(0, r.choice((0, 1, 10, 65_535)), _bit(r)),
    lambda r: commands.Basic.Consume(0, r.choice(QUEUES), r.choice(TAGS), _bit(r), _bit(r), _bit(r), _bit(r), _arguments(r)),
    lambda r: commands.Basic.Consume(0, "q", r.choice(TAGS), False, _bit(r), False, _bit(r), {}),
    lambda r: commands.Basic.Cancel(r.choice(TAGS), _bit(r)),
    lambda r: commands.Basic.Get(0, r.choice(QUEUES), _bit(r)),
    lambda r: commands.Basic.Get(0, "q", _bit(r)),
    lambda r: commands.Basic.Ack(r.choice(NUMBERS), _bit(r)),
    lambda r: commands.Basic.Nack(r.choice(NUMBERS), _bit(r), _bit(r)),
    lambda r: commands.Basic.Reject(r.choice(NUMBERS), _bit(r)),
    lambda r: commands.Basic.Recover(True),
    lambda r: commands.Confirm.Select(_bit(r)),
    lambda r: commands.Tx.Select(),
    lambda r: commands.Tx.Commit(),
    lambda r: commands.Tx.Rollback(),
    lambda r: commands.Queue.Declare(0, r.choice(QUEUES), True, False, False, False, _bit(r), {}),  # passive
    lambda r: commands.Queue.Declare(0, r.choice(("", "fuzz-own")), False, False, True, _bit(r), _bit(r), _arguments(r)),  # exclusive
    lambda r: commands.Queue.Bind(0, "", r.choice(EXCHANGES), "k", _bit(r), {}),
]
ENDING: list[Callable[[random.Random], Any]] = [  # some end the connection, at once or when more comes on their channel
    *METHODS,
    lambda r: commands.Basic.Recover(False),
    lambda r: commands.Channel.Close(200, "", 0, 0),
    lambda r: commands.Channel.Open(),
]
SELDOM: list[Callable[[random.Random], Any]] = [
    lambda r: commands.Channel.CloseOk(),
    lambda r: commands.Channel.Flow(_bit(r)),
    lambda r: commands.Channel.FlowOk(_bit(r)),
    lambda r: commands.Channel.OpenOk(),
    lambda r: commands.Basic.GetEmpty(""),
    lambda r: commands.Basic.QosOk(),
    lambda r: commands.Tx.CommitOk(),
    lambda r: commands.Queue.DeclareOk("q", 1, 1),
    lambda r: commands.Connection.UpdateSecret(MARK.decode(), ""),
    lambda r: commands.Connection.Blocked(""),
    lambda r: commands.Connection.TuneOk(0, 0, 0),
    lambda r: commands.Connection.Open("/"),
    lambda r: commands.Connection.CloseOk(),
]
DECLARATIONS: list[Callable[[random.Random], Any]] = [
    lambda r: commands.Queue.Declare(0, "q", False, True, False, False, _bit(r), {}),
    lambda r: commands.Queue.Declare(0, r.choice(("q", "fuzz-1", "fuzz-2")), False, _bit(r), False, _bit(r), _bit(r), _arguments(r)),
    lambda r: commands.Queue.Delete(0, r.choice(("q", "fuzz-1", "fuzz-2")), _bit(r), _bit(r), _bit(r)),
    lambda r: commands.Queue.Purge(0, r.choice(QUEUES), _bit(r)),
    lambda r: commands.Queue.Bind(0, "q", r.choice(EXCHANGES), "k", _bit(r), _arguments(r)),
    lambda r: commands.Queue.Unbind(0, "q", r.choice(EXCHANGES), "k", _arguments(r)),
    lambda r: commands.Exchange.Declare(0, "e", r.choice(("topic", "direct", "x-random", "no")), _bit(r), _bit(r), _bit(r), _bit(r), _bit(r), {}),
    lambda r: commands.Exchange.Delete(0, "e", _bit(r), _bit(r)),
]


def _anything(rng: random.Random, base: int, producer: str, declaring: bool) -> bytes:
    """One method or content, on one of an input's channels."""
    channel = base if rng.random() < 0.9 else base + rng.randrange(CHANNELS_EACH)
    draw = rng.random()
    if draw < 0.3:
        return _publish(rng, channel, producer, wild=True)
    if draw < 0.33:
        alone = encode.frame(frames.HEADER, channel, content_header.header_payload(0))
        recover = encode.raw_method_frame(channel, frames.BASIC_RECOVER_ASYNC, b"\1")
        return rng.choice([recover, frames.HEARTBEAT_FRAME, encode.frame(frames.BODY, channel, MARK), alone])
    kinds = SELDOM if draw < 0.35 else DECLARATIONS if declaring else ENDING
    method = rng.choice(kinds)(rng)
    found = encode.method_frame(0 if method.index >> 16 == 10 else channel, method)
    if rng.random() < 0.05:
        return encode.frame(frames.METHOD, channel, found[7:11] + mutated(rng, [found[11:-1]]))
    return found


def _publish(rng: random.Random, channel: int, producer: str, *, wild: bool = False) -> bytes:
    body = MARK * rng.choice((0, 1, 1, 10, 100, 1_000))
    fields = b""
    if producer and rng.random() < 0.7:
        highest = (1 << 64) - 1 if wild else 4
        fields += content_header.field(b"x-lrq-id", f"{producer}/{rng.choice((1, 2, 3, rng.randrange(1 << 20), highest))}".encode())
    if rng.random() < 0.2:
        stamp = content_header.field(b"x-lrq-pos", rng.choice((b"1.1/1", b"", b"99999999.1/1", b"1.1", b"1.99999999999999999999/1")))
        fields += rng.choice((stamp, content_header.field(b"CC", MARK), b"\x07x-deathA\0\0\0\0", b"\x01nF\0\0\0\0"))
    properties = content_header.properties(fields, persistent=_bit(rng), content_type="text/plain" if _bit(rng) else None)
    size = len(body) + (rng.choice((0,) * 12 + (1, -1, 1 << 62)) if wild else 0)
    header = content_header.header_payload(max(size, 0), properties)
    if wild and rng.random() < 0.05:
        header = mutated(rng, [header])
    frame_max = rng.choice((9, 64, frames.FRAME_MIN_BYTES, frames.FRAME_MIN_BYTES))
    parts = encode.content(channel, header, body, max(frame_max, 9 + len(body) // 64))
    key = rng.choice(("q", "q", "nowhere", "LRQ_Send_LogEntries", "LRQ_Status", "amq.rabbitmq.reply-to", "\udcff"))
    return encode.publish_method(channel, rng.choice(EXCHANGES), key, _bit(rng)) + b"".join(parts)
