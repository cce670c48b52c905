"""What the fuzzers begin with: whole sessions as a client sends them, and bytes that once were a problem; and what they make of it.

`python tests/fuzz/corpus.py` writes the files in corpus/ anew; a file that is added by hand (an input that broke something) stays. An input is
made from its number alone, so one that breaks something is had again by it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames

FOLDER = Path(__file__).parent / "corpus"
SEED = int(os.environ.get("LRQ_FUZZ_SEED", "1"))


def publish(channel: int, key: str, body: bytes, fields: bytes = b"", frame_max: int = frames.FRAME_MAX_BYTES) -> bytes:
    header = content_header.header_payload(len(body), content_header.properties(fields, content_type="text/plain", correlation_id="c"))
    return encode.publish_method(channel, "", key) + b"".join(encode.content(channel, header, body, frame_max))


def method(channel: int, one: object) -> bytes:
    return encode.method_frame(channel, one)  # type: ignore[arg-type]


def sessions() -> dict[str, bytes]:
    """Name and bytes of each."""
    login = frames.PROTOCOL_HEADER + b"".join(
        method(0, one)
        for one in (
            commands.Connection.StartOk({"lrq_producer": "fuzz", "capabilities": {"basic.nack": True}}, "PLAIN", "\0app\0secret", "en_US"),
            commands.Connection.TuneOk(2047, 131_072, 0),
            commands.Connection.Open("/"),
        )
    )
    opened = method(1, commands.Channel.Open()) + method(1, commands.Confirm.Select())
    stamped = content_header.field(b"x-lrq-id", b"fuzz/1") + content_header.field(b"x-lrq-pos", b"1.1/1")
    amqplain = content_header.field(b"LOGIN", b"app") + content_header.field(b"LOGIN", b"lrq") + content_header.field(b"PASSWORD", b"secret")
    tiny = publish(1, "q", b"x" * 300, frame_max=9)
    return {
        "login": login,
        "amqplain-twice": frames.PROTOCOL_HEADER
        + encode.raw_method_frame(
            0, frames.CONNECTION_START_OK, b"\0\0\0\0", encode.short_string("AMQPLAIN"), len(amqplain).to_bytes(4, "big") + amqplain, b"\x05en_US"
        ),
        "publishes": opened + publish(1, "q", b"one") + publish(1, "q", b"") + publish(1, "q", b"two", stamped),
        "large": opened + publish(1, "q", b"y" * 5_000, frame_max=frames.FRAME_MIN_BYTES),
        "tiny-frames": opened + tiny,
        "topology": opened
        + b"".join(
            method(1, one)
            for one in (
                commands.Queue.Declare(queue="q", durable=True, arguments={"x-queue-type": "classic"}),
                commands.Exchange.Declare(exchange="e", exchange_type="topic", durable=True),
                commands.Queue.Bind(queue="q", exchange="e", routing_key="#"),
                commands.Queue.Unbind(queue="q", exchange="e", routing_key="#"),
                commands.Queue.Purge(queue="q"),
                commands.Queue.Delete(queue="q"),
                commands.Exchange.Delete(exchange="e"),
            )
        ),
        "consumer": opened
        + b"".join(
            method(1, one)
            for one in (
                commands.Basic.Qos(0, 10, False),
                commands.Basic.Consume(queue="q", consumer_tag="c"),
                commands.Basic.Get(queue="q"),
                commands.Basic.Ack(1, True),
                commands.Basic.Nack(2, True, True),
                commands.Basic.Reject(3, False),
                commands.Basic.Recover(True),
                commands.Basic.Cancel("c"),
                commands.Tx.Select(),
                commands.Channel.Flow(True),
                commands.Channel.Close(200, "", 0, 0),
            )
        ),
        "transaction": opened
        + method(2, commands.Channel.Open())
        + method(2, commands.Tx.Select())
        + publish(2, "q", b"one")
        + method(2, commands.Basic.Get(queue="q"))
        + method(2, commands.Basic.Ack(1, False))
        + method(2, commands.Tx.Commit())
        + publish(2, "q", b"two")
        + method(2, commands.Tx.Rollback()),
        "channels-never-opened": b"".join(method(number, commands.Basic.Qos()) for number in range(1, 65_536, 1_000)),
        "declares-when-closed": opened
        + method(9, commands.Basic.Qos())
        + publish(1, "q", b"one")
        + method(1, commands.Queue.Declare(queue="q", durable=True)),
        "publishes-behind-its-close": opened + method(0, commands.Connection.Close(200, "bye", 0, 0)) + publish(1, "q", b"one"),
        "refused-by-a-name-that-is-not-utf-8": method(1, commands.Channel.Open()) + encode.publish_method(1, "\udcff", "\udcff")
        + b"".join(encode.content(1, content_header.header_payload(1), b"x")),
        "close-ok-unasked": opened + publish(1, "q", b"one") + method(1, commands.Channel.CloseOk()) + publish(1, "q", b"two"),
        "declares-behind-a-refusal": opened
        + publish(1, "q", b"one") * 20
        + method(1, commands.Basic.Consume(queue="none"))
        + method(1, commands.Queue.Declare(queue="q", durable=True)),
        "transaction-behind-a-refusal": method(1, commands.Channel.Open())
        + publish(1, "q", b"one")
        + method(1, commands.Basic.Consume(queue="none"))
        + method(1, commands.Tx.Select()),
        "begun": b"".join(encode.publish_method(number, "", "q") for number in range(1, 100)),
        "cancel-cut-short": opened
        + method(1, commands.Basic.Consume(queue="q", consumer_tag="c"))
        + encode.raw_method_frame(1, frames.BASIC_CANCEL, b"\1c"),
        "gets": opened + method(1, commands.Basic.Get(queue="q")) * 20,
        "heartbeats": frames.HEARTBEAT_FRAME * 3 + method(0, commands.Connection.Close(200, "bye", 0, 0)),
        "size-that-lies": b"\x01\x00\x01\x7f\xff\xff\xff" + b"x" * 64,
        "body-that-lies": opened + publish(1, "q", b"z" * 40).replace((40).to_bytes(8, "big"), (1 << 62).to_bytes(8, "big")),
        "table-past-its-frame": encode.publish_method(1, "", "q")
        + b"".join(encode.content(1, content_header.header_payload(1, b"\x20\x00" + (1 << 20).to_bytes(4, "big") + b"\x01aI\0\0\0\1"), b"x")),
        "nested": opened + publish(1, "q", b"n", b"\x01aF" + b"\0\0\0\x07\x01aF" * 60),
        "header-alone": encode.frame(frames.HEADER, 1, content_header.header_payload(0)),
        "class-0": opened + b"".join(encode.raw_method_frame(1, kind, b"x") for kind in (frames.HEARTBEAT, frames.HEADER, frames.BODY)),
        "other-protocol": b"AMQP\x00\x01\x00\x00",
    }


def corpus() -> list[bytes]:
    """Every file's bytes, in order of their names."""
    return [file.read_bytes() for file in sorted(FOLDER.glob("*.bin"))]


def rng_of(number: int) -> random.Random:
    """What decides everything about this input."""
    return random.Random(SEED << 40 | number)


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One to three sessions after each other, with a few octets changed, cut out, put in, repeated or set to an extreme."""
    data = bytearray(b"".join(rng.choice(seeds) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.randint(0, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 200)]
            case _:
                size = rng.choice([1, 2, 4, 8])
                data[at : at + size] = rng.choice([0, 1, (1 << 8 * size - 1) - 1, 1 << 8 * size - 1, (1 << 8 * size) - 1]).to_bytes(size, "big")
    return bytes(data)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in sessions().items():
        (FOLDER / f"{name}.bin").write_bytes(data)
