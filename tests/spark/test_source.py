"""The data source against a real broker: exactly what is in a receive queue, or an error that says why not."""

from __future__ import annotations

import datetime as dt
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from pyspark.sql import DataFrame, SparkSession
from receive_queues import ReceiveQueue, transaction

from lrq_ha.errors import MalformedInput
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.spark import reading
from lrq_ha.spark.errors import DataLoss, OptionError
from lrq_ha.spark.options import ReadOptions, parse_options
from lrq_ha.spark.planning import plan
from lrq_ha.spark.ranges import Taken
from lrq_ha.spark.reading import read_batches, read_range
from lrq_ha.streams import node_connection
from lrq_ha.streams.errors import MissingQueue, NoNode, QueueRefused, StreamSilent
from lrq_ha.streams.message import Message
from lrq_ha.streams.node_connection import NodeConnection, address_of

pytestmark = pytest.mark.broker

Make = Callable[..., ReceiveQueue]
COLUMNS = [
    "queue",
    "source",
    "client_name",
    "type",
    "epoch",
    "sequence",
    "transaction",
    "index",
    "replication_id",
    "timestamp",
    "payload",
]


def read(spark: SparkSession, nodes: str, *queues: str, **options: Any) -> DataFrame:
    return spark.read.format("lrq").options(nodes=nodes, subscribe=",".join(queues), **options).load()


def options_of(nodes: str, *queues: str, **options: str) -> ReadOptions:
    return parse_options({"nodes": nodes, "subscribe": ",".join(queues), **options})


def first_range(options: ReadOptions) -> Generator[tuple[Message, Taken], None, None]:
    """The messages of the only range; whoever stops in its middle closes it."""
    steps = read_range(plan(options)[0], options)
    assert isinstance(steps, Generator)
    return steps


def sequences(options: ReadOptions) -> list[int]:
    """What all partitions give, without Spark."""
    return [
        one.position.sequence for part in plan(options) for _, taken in read_range(part, options) for one in taken.transactions
    ]


def fill(queue: ReceiveQueue, count: int, size: int = 1) -> None:
    queue.write_burst(queue.batch(transaction(n, [b"x" * size])) for n in range(1, count + 1))


@pytest.mark.quick
def test_rows_and_schema(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue("east")
    marker = transaction(2, [], kind=pb.SNAPSHOT_SYNC, request="r1", timestamp_us=0)
    marker.replication_id = ""
    queue.write(
        queue.batch(marker, transaction(3, [b"a", b"\x00\xff"], kind=pb.SNAPSHOT_SYNC, request="r1")),
        queue.batch(transaction(5, [b"c"], kind=pb.LAST_FULL_SYNC_ENTRY, request="r1"), transaction(8, [b""], epoch=513)),
    )
    when = dt.datetime(2013, 1, 1, 10, 0, 0, 1, dt.UTC).timestamp()
    east = (queue.name, "east", queue.client_name)
    expected = [
        (*east, "SNAPSHOT_SYNC", 257, 2, None, 0, None, None, None, "r1", True),
        (*east, "SNAPSHOT_SYNC", 257, 3, "app/3", 0, "app/3.0", when, b"a", "r1", False),
        (*east, "SNAPSHOT_SYNC", 257, 3, "app/3", 1, "app/3.1", when, b"\x00\xff", "r1", False),
        (*east, "LAST_FULL_SYNC_ENTRY", 257, 5, "app/5", 0, "app/5.0", when, b"c", "r1", False),
        (*east, "LOG_ENTRY_SYNC", 513, 8, "app/8", 0, "app/8.0", when, b"", None, False),
    ]
    plain = read(spark, nodes, queue.name)
    assert plain.columns == COLUMNS
    assert [kind for _, kind in plain.dtypes] == [
        *("string", "string", "string", "string", "bigint", "bigint", "string", "int", "string", "timestamp", "binary")
    ]

    def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
        return [tuple(v.timestamp() if isinstance(v, dt.datetime) else bytes(v) if isinstance(v, bytearray) else v for v in row)
                for row in frame.collect()]  # fmt: skip

    assert rows(plain) == [row[:11] for row in expected]
    full = read(spark, nodes, queue.name, includeChain=True)
    assert full.columns == [*COLUMNS, "request_id", "restart"]
    assert rows(full) == expected


def test_a_time_that_no_calendar_has_is_null(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    late = [253_402_300_800_000_000, 2**63 - 1, 2**63, 2**64 - 1]
    queue.write(queue.batch(*(transaction(n, timestamp_us=us) for n, us in enumerate([1_000_000, *late], 1))))
    rows = read(spark, nodes, queue.name).select("sequence", "timestamp").collect()
    assert [(row.sequence, row.timestamp and row.timestamp.timestamp()) for row in rows] == [(1, 1.0), (2, None), (3, None), (4, None), (5, None)]


@pytest.mark.quick
def test_repeats_and_partitions_through_spark(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    batches = [queue.batch(transaction(2 * n), transaction(2 * n + 1)) for n in range(1, 301)]
    queue.write_burst([*batches[:200], *batches[120:250], *batches[100:300], *batches[280:290]])
    frame = read(spark, nodes, queue.name, minPartitions=4)
    assert frame.rdd.getNumPartitions() > 1
    assert [row.sequence for row in frame.select("sequence").collect()] == list(range(2, 602))


def test_repeats_however_it_is_cut(nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    batches = [queue.batch(transaction(n)) for n in range(1, 101)]
    queue.write_burst([*batches[:60], *batches[40:], *batches[49:80]])
    for pieces in range(1, 9):
        assert sequences(options_of(nodes, queue.name, minPartitions=str(pieces))) == list(range(1, 101))


def test_many_small_batches(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    fill(queue, 12_000)
    frame = read(spark, nodes, queue.name, minPartitions=3)
    row = frame.selectExpr("count(*)", "count(distinct sequence)", "min(sequence)", "max(sequence)").collect()[0]
    assert tuple(row) == (12_000, 12_000, 1, 12_000)


def test_one_large_batch_is_given_in_arrow_batches_of_bounded_size(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    queue.write(queue.batch(transaction(1, (b"%d" % n for n in range(25_000)))))
    options = options_of(nodes, queue.name, minPartitions="5")
    sizes = [len(batch) for part in plan(options) for batch in read_batches(part, options)]
    assert sizes == [8_334, 8_334, 8_332]
    frame = read(spark, nodes, queue.name)
    row = frame.selectExpr(
        "count(*)", "max(index)", "count(distinct replication_id)", "min(cast(payload as string) = index)"
    ).collect()[0]
    assert tuple(row) == (25_000, 24_999, 25_000, True)


def test_latest_is_the_last_confirmed_message(nodes: str, receive_queue: Make) -> None:
    """Small and large chunks, and messages so large that a chunk comes in many pieces."""
    queue = receive_queue()
    done = 0
    for count, size in ((1, 1), (500, 1), (1, 1), (40, 300_000), (3, 1), (2_000, 100)):
        queue.write_burst(queue.batch(transaction(n, [b"x" * size])) for n in range(done + 1, done + count + 1))
        done += count
        (part,) = plan(options_of(nodes, queue.name))
        assert (part.through.sequence, part.open_until) == (done, done - 1)


@pytest.mark.quick
def test_an_idle_and_an_empty_queue(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    empty, full = receive_queue(), receive_queue()
    fill(full, 3)
    assert read(spark, nodes, empty.name).count() == 0
    assert sequences(options_of(nodes, empty.name, full.name, minPartitions="4")) == [1, 2, 3]


@pytest.mark.quick
def test_a_missing_queue(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    with pytest.raises(Exception, match="Queue LRQ_Recv_none_east does not exist"):
        read(spark, nodes, receive_queue().name, "LRQ_Recv_none_east").count()


def test_a_wrong_option_is_refused_by_load(spark: SparkSession, nodes: str) -> None:
    with pytest.raises(Exception, match=r"Unknown option 'fetchsize'.*Allowed: nodes, user, .*subscribe"):
        read(spark, nodes, "LRQ_Recv_a_east", fetchsize=3)


def test_two_sources(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    east, north = receive_queue("east"), receive_queue("north")
    fill(east, 300)
    fill(north, 10)
    frame = read(spark, nodes, east.name, north.name, minPartitions=5)
    found = {tuple(row) for row in frame.groupBy("queue", "source").agg({"sequence": "count"}).collect()}
    assert found == {(east.name, "east", 300), (north.name, "north", 10)}


def test_bounds(nodes: str, receive_queue: Make) -> None:
    one, two = receive_queue(), receive_queue()
    for queue in (one, two):
        queue.write_burst(queue.batch(transaction(n), transaction(n + 5)) for n in range(10, 1010, 10))
    for pieces in ("1", "3"):
        options = options_of(
            nodes,
            one.name,
            two.name,
            minPartitions=pieces,
            startingOffsets=json.dumps({one.name: 500, two.name: -2}),
            endingOffsets=json.dumps({one.name: 516, two.name: 21}),
        )
        assert sequences(options) == [500, 505, 510, 515, 10, 15, 20]
    assert sequences(options_of(nodes, one.name, startingOffsets=json.dumps({one.name: 1005}))) == [1005]
    assert sequences(options_of(nodes, one.name, startingOffsets=json.dumps({one.name: 1006}))) == []
    with pytest.raises(OptionError, match="received up to sequence 1005"):
        plan(options_of(nodes, one.name, endingOffsets=json.dumps({one.name: 1007})))


def test_bounds_by_time(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    times = [(n, n * 1_000_000) for n in range(10, 1010, 10)]
    queue.write_burst(queue.batch(transaction(n, timestamp_us=us), transaction(n + 5, timestamp_us=us)) for n, us in times)
    within = options_of(nodes, queue.name, startingTimestamp="500000", endingTimestamp="510001", minPartitions="3")
    assert sequences(within) == [500, 505, 510, 515]
    assert sequences(options_of(nodes, queue.name, startingTimestamp="999001")) == [1000, 1005]
    beyond = {"startingTimestamp": "1000001"}
    with pytest.raises(OptionError, match=r"has no transaction from 1970-01-01 00:16:40\.001"):
        plan(options_of(nodes, queue.name, **beyond))
    assert read(spark, nodes, queue.name, **beyond, startingOffsetsByTimestampStrategy="latest").count() == 0


def test_a_partition_has_about_as_many_rows_as_wanted(nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    queue.write_burst(queue.batch(transaction(n, [b"x"] * 50)) for n in range(1, 401))
    options = options_of(nodes, queue.name, maxEntriesPerPartition="1000")
    rows = [sum(len(taken.transactions) * 50 for _, taken in read_range(part, options)) for part in plan(options)]
    assert sum(rows) == 20_000
    assert max(rows) <= 1_100
    assert len(plan(options_of(nodes, queue.name, maxEntriesPerPartition="20000"))) == 1


@pytest.mark.quick
def test_a_user_apart_from_the_addresses(
    spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = receive_queue()
    fill(queue, 3)
    address = urlsplit(nodes)
    bare, user, password = f"amqp://{address.hostname}:{address.port}", str(address.username), str(address.password)
    file = tmp_path / "password"
    file.write_text(f"{password}\n")
    for secret in ({"passwordFile": str(file)}, {"password": password}):
        frame = read(spark, bare, queue.name, user=user, **secret)
        assert frame.count() == 3
        frame.explain("extended")
        assert password not in capsys.readouterr().out
    options = options_of(bare, queue.name, user=user)
    with pytest.raises(OptionError, match="LRQ_PASSWORD is not in the environment"):
        plan(options)
    monkeypatch.setenv("LRQ_PASSWORD", password)
    assert sequences(options) == [1, 2, 3]
    file.write_text("another")
    with pytest.raises(NoNode, match="403"):
        plan(options_of(bare, queue.name, user=user, passwordFile=str(file)))
    file.unlink()
    with pytest.raises(OptionError, match="cannot be used: No such file"):
        plan(options_of(bare, queue.name, user=user, passwordFile=str(file)))


def test_a_trimmed_head(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    limits = {"x-max-length-bytes": 2_000_000, "x-stream-max-segment-size-bytes": 500_000}
    queue = receive_queue(**limits)
    for n in range(1, 61):  # one by one: retention looks at closed segments only
        queue.write(queue.batch(transaction(n, [b"x" * 100_000])))
    left = sequences(options_of(nodes, queue.name))
    assert 1 < left[0] < 60
    assert left == list(range(left[0], 61))
    trimmed = json.dumps({queue.name: left[0] - 1})
    with pytest.raises(Exception, match=f"begins after sequence {left[0] - 1}: startingOffsets {left[0] - 1} is trimmed"):
        read(spark, nodes, queue.name, startingOffsets=trimmed).count()
    assert read(spark, nodes, queue.name, startingOffsets=trimmed, failOnDataLoss=False, minPartitions=2).count() == len(left)
    assert sequences(options_of(nodes, queue.name, startingOffsets=json.dumps({queue.name: left[0]}))) == left


def test_what_is_trimmed_after_planning(nodes: str, receive_queue: Make) -> None:
    limits = {"x-max-length-bytes": 2_000_000, "x-stream-max-segment-size-bytes": 500_000}
    queue = receive_queue(**limits)
    queue.write(*(queue.batch(transaction(n, [b"x" * 100_000])) for n in range(1, 4)))
    strict = options_of(nodes, queue.name)
    (part,) = plan(strict)
    queue.write(*(queue.batch(transaction(n, [b"x" * 100_000])) for n in range(4, 61)))
    with pytest.raises(DataLoss, match=r"lacks what comes after 0\.0"):
        list(read_range(part, strict))
    lenient = replace(strict, fail_on_data_loss=False)
    assert [one for _, taken in read_range(part, lenient) for one in taken.transactions if one.position.sequence <= 3] == []


def test_restarts_where_segments_begin(nodes: str, receive_queue: Make) -> None:
    """Offsets jump there, which was taken for a loss."""
    queue = receive_queue(**{"x-stream-max-segment-size-bytes": 500_000})
    queue.write(*(queue.batch(transaction(n, [b"x" * 100_000]), previous=pb.Position()) for n in range(1, 31)))
    strict = options_of(nodes, queue.name)
    [part] = plan(strict)
    read = [(message.offset, one.position.sequence) for message, taken in read_range(part, strict) for one in taken.transactions]
    assert [sequence for _, sequence in read] == list(range(1, 31))
    assert read[-1][0] > 29, "offsets did jump"


def test_a_hole(spark: SparkSession, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    first, _, third = (queue.batch(transaction(n)) for n in (1, 2, 3))
    queue.write(first, third)
    with pytest.raises(Exception, match=r"lacks what comes after 257\.1, up to 257\.2"):
        read(spark, nodes, queue.name).count()
    assert read(spark, nodes, queue.name, failOnDataLoss=False).count() == 2


def test_what_is_no_batch_is_named(nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    queue.write(queue.batch(transaction(1)), b"\xff\xff not a batch", queue.batch(transaction(2)))
    with pytest.raises(MalformedInput, match=f"Message 1 of queue {queue.name} is no ReceivedBatch"):
        sequences(options_of(nodes, queue.name))


def test_a_queue_that_is_no_stream(nodes: str, writer: pika.BlockingConnection) -> None:
    channel = writer.channel()
    channel.confirm_delivery()
    channel.queue_declare("LRQ_Recv_classic_east", durable=True)
    channel.basic_publish("", "LRQ_Recv_classic_east", b"x")
    try:
        with pytest.raises(QueueRefused, match=r"Queue LRQ_Recv_classic_east cannot be read at .* streams"):
            plan(options_of(nodes, "LRQ_Recv_classic_east"))
    finally:
        channel.queue_delete("LRQ_Recv_classic_east")


def test_another_copy_of_the_queue_gives_the_same(nodes: str, receive_queue: Make) -> None:
    """As after a failover: the same transactions at other offsets. Hints that were right on one node are wrong on the other."""
    here, there = receive_queue(), receive_queue()
    bodies = [here.batch(transaction(n)) for n in range(1, 201)]
    here.write_burst(bodies)
    there.write_burst([*bodies[:90], *bodies[50:140], *bodies[120:]])
    options = options_of(nodes, here.name, minPartitions="4")
    parts = [replace(part, queue=there.name) for part in plan(options)]
    assert len(parts) == 4
    given = [one.position.sequence for part in parts for _, taken in read_range(part, options) for one in taken.transactions]
    assert given == list(range(1, 201))


def test_another_copy_that_lacks_the_end_is_waited_for(nodes: str, receive_queue: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a new primary's broker has not taken all of the log yet."""
    here, there = receive_queue(), receive_queue()
    bodies = [here.batch(transaction(n)) for n in range(1, 101)]
    here.write_burst(bodies)
    there.write_burst(bodies[:60])
    options = options_of(nodes, here.name)
    (planned,) = plan(options)
    part = replace(planned, queue=there.name)
    monkeypatch.setattr(node_connection, "IDLE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(reading, "RECONNECT_TIMEOUT_S", 4.0)
    with pytest.raises(StreamSilent):
        list(read_range(part, options))
    monkeypatch.undo()
    monkeypatch.setattr(node_connection, "IDLE_TIMEOUT_S", 1.0)
    rest = iter([bodies[60:]])
    monkeypatch.setattr(reading._log, "warning", lambda *_: there.write_burst(next(rest, [])))
    assert [one.position.sequence for _, taken in read_range(part, options) for one in taken.transactions] == list(range(1, 101))


def test_connections_lost_in_mid_range(lab: Lab, nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    fill(queue, 3_000, 2_000)
    options = options_of(nodes, queue.name)
    given: list[int] = []
    lost = False
    with closing(first_range(options)) as steps:
        for _, taken in steps:
            given += [one.position.sequence for one in taken.transactions]
            if len(given) >= 1_000 and not lost:
                lab.ctl("w1", "close_all_user_connections", "app", "a test")
                lost = True
    assert given == list(range(1, 3_001))


def test_nodes_are_tried_in_turn(nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    fill(queue, 3)
    assert sequences(options_of(f"amqp://u:p@127.0.0.1:1,{nodes}", queue.name)) == [1, 2, 3]


def test_a_node_that_does_not_answer_is_passed_by(nodes: str) -> None:
    """Its machine takes connections, but it stands still."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        NodeConnection.open([address_of(f"amqp://u:p@127.0.0.1:{silent.getsockname()[1]}"), address_of(nodes)], "test", 60) as node,
    ):
        assert node.address == nodes.rpartition("@")[2].rstrip("/")


def test_a_first_message_that_takes_its_time(nodes: str, receive_queue: Make) -> None:
    """Its queue is not taken for an empty one, though the broker, which counts now and then, may count none yet."""
    queue = receive_queue()
    queue.write(queue.batch(transaction(1)))
    with late_deliveries(urlsplit(nodes).port or 0) as port, NodeConnection.open([address_of(re.sub(r":\d+$", f":{port}", nodes))], "test") as node:
        last = node.tail(queue.name)
        assert last is not None
        assert last.offset == 0


@contextmanager
def late_deliveries(broker_port: int) -> Iterator[int]:
    """A way to the broker on which the first delivery, and what comes after it, is held up for a while."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward(source: Any, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.read1():
                    target.sendall(data)

        def deliver(source: Any, target: socket.socket) -> None:
            held = False
            while header := source.read(7):
                kind, _, size = struct.unpack(">BHI", header)
                frame = source.read(size + 1)
                if (kind, frame[:4]) == (1, b"\x00\x3c\x00\x3c") and not held:  # a method, basic.deliver
                    held = True
                    time.sleep(1.5)
                target.sendall(header + frame)

        def serve() -> None:
            client, broker = listener.accept()[0], socket.create_connection(("127.0.0.1", broker_port))
            with client, broker, suppress(OSError):
                threading.Thread(target=forward, args=(client.makefile("rb"), broker), daemon=True).start()
                deliver(broker.makefile("rb"), client)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def test_no_node_takes_us(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = urlsplit(nodes)
    tried: list[object] = []
    connect = pika.BlockingConnection
    monkeypatch.setattr("lrq_ha.streams.node_connection.TCP_TIMEOUT_S", 60)
    monkeypatch.setattr(pika, "BlockingConnection", lambda parameters: (tried.append(parameters), connect(parameters))[1])
    with pytest.raises(NoNode, match=f"{url.hostname}:{url.port}: .*") as caught:
        plan(options_of(f"amqp://app:wrong@{url.hostname}:{url.port}", "LRQ_Recv_a_east"))
    assert len(tried) == 1, "a wrong password is not tried again and again"
    assert "wrong" not in str(caught.value)
    assert not caught.value.retriable
    with pytest.raises(NoNode) as caught, NodeConnection.open([address_of("amqp://u:p@127.0.0.1:1")], "test", 0.6):
        pass
    assert caught.value.retriable


def test_a_pattern_finds_queues(nodes: str, receive_queue: Make, listing: tuple[str, list[Any]]) -> None:
    address, answers = listing
    east, north = receive_queue("east"), receive_queue("north")
    fill(east, 2)
    fill(north, 3)
    answers += [None, [east.name, north.name, "LRQ_Status"]]
    pattern = {"nodes": nodes, "http": f"http://127.0.0.1:1,{address}/,{address}", "subscribePattern": "LRQ_Recv_.*_north"}
    assert sequences(parse_options(pattern)) == [1, 2, 3]
    assert sequences(parse_options(pattern | {"subscribePattern": "LRQ_Recv_.*_south"})) == []
    with pytest.raises(OptionError, match="startingOffsets does not name queue"):
        plan(parse_options(pattern | {"startingOffsets": "{}"}))
    answers[0] = {"no": "list"}
    with pytest.raises(NoNode, match="no JSON list of names"):
        plan(parse_options(pattern))


def test_a_queue_that_is_listed_before_it_is_there(
    nodes: str, receive_queue: Make, listing: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar knows of it from the log, before its first batch is safe and applied. One that does not come is an error all the same."""
    address, answers = listing
    north = receive_queue("north")
    north.delete()
    answers.append([north.name])
    pattern = parse_options({"nodes": nodes, "http": address, "subscribePattern": "LRQ_Recv_.*_north"})
    monkeypatch.setattr(reading, "RECONNECT_TIMEOUT_S", 2.0)
    with pytest.raises(MissingQueue):
        plan(pattern)
    monkeypatch.setattr(reading, "RECONNECT_TIMEOUT_S", 60.0)

    def come() -> None:
        time.sleep(1.0)
        north.declare()
        fill(north, 3)

    coming = threading.Thread(target=come)
    coming.start()
    assert set(sequences(pattern)) <= {1, 2, 3}
    coming.join()
    assert sequences(pattern) == [1, 2, 3]


def test_what_is_no_sidecar_is_passed_by(
    nodes: str, receive_queue: Make, listing: tuple[str, list[Any]], not_http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a port that speaks AMQP, a broker's own among them; and sidecars are asked directly, whatever proxy there is."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    address, answers = listing
    queue, broker = receive_queue("north"), f"http://127.0.0.1:{urlsplit(nodes).port}"
    fill(queue, 2)
    answers.append([queue.name])
    pattern = {"nodes": nodes, "http": f"{broker},{not_http},{address}", "subscribePattern": "LRQ_Recv_.*_north"}
    assert sequences(parse_options(pattern)) == [1, 2]
    with pytest.raises(NoNode, match=f"{not_http}: the answer is not HTTP, or not whole"):
        plan(parse_options(pattern | {"http": not_http}))


def test_a_queue_deleted_while_it_is_read(nodes: str, receive_queue: Make) -> None:
    queue = receive_queue()
    fill(queue, 2_000, 5_000)
    options = options_of(nodes, queue.name)
    with closing(first_range(options)) as steps:
        next(steps)
        queue.delete()
        with pytest.raises(MissingQueue):
            list(steps)
