"""Checks the demo's claims against the brokers themselves."""

from __future__ import annotations

import zlib
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pika
from pika.exceptions import ConnectionClosedByBroker

from broker_plugin.log import codec
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.log import Acceptance, LogIndex

QUIET_S = 0.5
FIRST_QUIETS = 20  # the stream's writer notifies readers, and may be busy with its disk
PREFETCH = 500


def with_vhost(url: str, vhost: str) -> str:
    """The URL with another vhost."""
    return urlunsplit(urlsplit(url)._replace(path="/" + vhost))


def read_stream(url: str, queue: str, vhost: str = "lrq") -> list[tuple[dict[str, Any], bytes]]:
    """Every message of a stream in a vhost (as in a URL), until none has come for a while, though the broker has answered a request meanwhile.

    Messages that were ready then come before its answer: so a machine that stands still does not look like the stream's end.
    """
    connection = pika.BlockingConnection(pika.URLParameters(with_vhost(url, vhost)))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    found: list[tuple[dict[str, Any], bytes]] = []
    arguments = {"x-stream-offset": "first"}
    quiets = 0
    for method, properties, body in channel.consume(queue, inactivity_timeout=QUIET_S, arguments=arguments):
        if method is None:
            quiets += 1
            if quiets > (1 if found else FIRST_QUIETS):
                break
            channel.queue_declare(queue, passive=True)
            continue
        quiets = 0
        found.append((properties.headers, body))
        if len(found) % (PREFETCH // 4) == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
    # A primary goes on writing: pika rejects messages that have come since, and a stream then closes the connection.
    with suppress(ConnectionClosedByBroker):
        connection.close()
    return found


def log_digest(url: str, group: str, node: int) -> list[tuple[int, int, int, int]]:
    """(epoch, first, last, checksum) of every batch in a node's log, as a reader sees it: without batches that were cut off."""
    index = LogIndex(node)
    batches: list[tuple[int, int, int, int]] = []
    joiner: codec.Joiner[dict[str, Any]] = codec.Joiner()
    for record in read_stream(url, f"LRQ_HA_{group}"):
        whole = joiner.take(record[0], *record)
        if whole is None:
            continue
        headers, body = whole
        if codec.FENCE in headers:
            index.fence(headers[codec.FENCE], headers[codec.FENCE_OUT])
        elif codec.FIRST in headers:
            header, _ = codec.parse_batch(headers)
            if index.accept(header) is Acceptance.APPEND:
                while batches and batches[-1][2] >= header.first:
                    batches.pop()
                batches.append((header.epoch, header.first, header.last, zlib.crc32(body)))
    return batches


def view_digest(url: str, queue: str) -> list[tuple[int, int]]:
    """(sequence, checksum) of every entry of a view, repeats skipped as readers do."""
    last, found = 0, []
    for headers, body in read_stream(url, queue):
        if codec.OPEN in headers:  # a sidecar has looked for the stream's end
            continue
        sequence = int(str(headers["x-lrq-pos"]).split(".")[1].split("/")[0])
        if sequence > last:
            last = sequence
            found.append((sequence, zlib.crc32(body)))
    return found


def received(url: str, queue: str) -> tuple[list[pb.ReceivedTransaction], int]:
    """The transactions of a receive queue as readers see them, and the number of repeats skipped."""
    last, found, repeats = 0, [], 0
    for _, body in read_stream(url, queue):
        for transaction in pb.ReceivedBatch.FromString(body).transactions:
            if transaction.position.sequence <= last:
                repeats += 1
                continue
            last = transaction.position.sequence
            found.append(transaction)
    return found, repeats


def depth(url: str, queue: str) -> int:
    """Messages ready in a queue."""
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
