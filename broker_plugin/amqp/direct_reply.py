"""RabbitMQ's direct reply-to: its pseudo-queue, and answers that have no queue. No I/O."""

from __future__ import annotations

from . import encode, frames

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
NOBODY = f"{DIRECT_REPLY_TO}.gone"


def is_answer(method: bytes) -> bool:
    """Whether this publishes to a client that waits for a direct reply."""
    if DIRECT_REPLY_TO.encode() not in method:
        return False
    route = frames.publish_route(method)
    return not route.exchange and route.routing_key.startswith(DIRECT_REPLY_TO)


def answer_to_nobody(method: bytes) -> bytes:
    """The publish with an address where no client waits: a broker checks it and then drops it."""
    return method[:6] + encode.short_string("") + encode.short_string(NOBODY) + method[-1:]
