"""`lrq-ha peek`: what it makes of messages, how it shows them, where it begins to read, and its refusals. Without a broker."""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from broker_plugin.amqp.address import Address
from lrq_ha.cli import peek
from lrq_ha.cli.entry_format import Form, as_json, as_text, read_payload
from lrq_ha.cli.main import main
from lrq_ha.cli.queue_entry import Entry, EntryReader, Kind, Payload
from lrq_ha.cli.queue_scan import PastEnd, Scan, Wanted
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.sidecar.config import sample
from lrq_ha.streams.message import Record
from lrq_ha.streams.node_connection import NodeConnection

RECEIVED, SENT, ROWS, STATUS = "LRQ_Recv_orders_east", "LRQ_Send_LogEntries", "LRQ_Send_SnapSync", "LRQ_Status"
E1 = 0x101  # epoch 1.1


def received(offset: int, *sequences: int, previous: int = 0, life: int = 1, **fields: Any) -> Record:
    """A message of a receive queue."""
    fields = dict[str, Any](type=pb.LOG_ENTRY_SYNC, payloads=[b"x"], replication_id="app/1") | fields
    transactions = [pb.ReceivedTransaction(position=pb.Position(epoch=E1, sequence=sequence), **fields) for sequence in sequences]
    before = pb.Position(epoch=E1 if previous else 0, sequence=previous)
    batch = pb.ReceivedBatch(source="east", client_name="orders", previous=before, transactions=transactions)
    return Record(offset, {"x-lrq-pos": f"{E1}.{offset + 1}/{life}"}, batch.SerializeToString())


def stamped(offset: int, sequence: int, message: pb.Transaction | pb.Status, life: int = 1) -> Record:
    return Record(offset, {"x-lrq-pos": f"{E1}.{sequence}/{life}"}, message.SerializeToString())


def sent(offset: int, sequence: int, life: int = 1) -> Record:
    return stamped(offset, sequence, pb.Transaction(client_name="orders", type=pb.LOG_ENTRY_SYNC, payloads=[b"x"]), life)


def opened(offset: int, life: int) -> Record:
    return Record(offset, {"x-lrq-open": life}, b"")


def read(queue: str, *records: Record, from_head: bool = False) -> list[Entry]:
    reader = EntryReader(queue, from_head=from_head)
    return [entry for record in records for entry in reader.take(record)]


# ---- what an entry is ------------------------------------------------------------------------------------------------


def test_the_markers_of_a_snapshot_in_words() -> None:
    start = received(0, 10, type=pb.SNAPSHOT_SYNC, payloads=[], request_id="r1")
    rows = received(1, 11, previous=10, type=pb.SNAPSHOT_SYNC, request_id="r1")
    delta = received(2, 12, previous=11)
    end = received(3, 13, previous=12, type=pb.LAST_FULL_SYNC_ENTRY, payloads=[], request_id="r1")
    found = read(RECEIVED, start, rows, delta, end, from_head=True)
    assert [entry.kind for entry in found] == [Kind.SNAPSHOT_START, Kind.SNAPSHOT_ROWS, Kind.DELTA, Kind.SNAPSHOT_END]
    assert [entry.restarts for entry in found] == [True, False, False, False]
    assert [entry.hole_after for entry in found] == [None] * 4
    assert {entry.client_name for entry in found} == {"orders"}
    assert (found[1].request_id, found[2].replication_id, found[3].position) == ("r1", "app/1", Position(E1, 13))


def test_an_end_marker_without_its_start_is_an_empty_snapshot() -> None:
    def end(offset: int, sequence: int, previous: int) -> Record:
        return received(offset, sequence, previous=previous, type=pb.LAST_FULL_SYNC_ENTRY, payloads=[], request_id="r2")

    other = received(0, 10, type=pb.SNAPSHOT_SYNC, payloads=[], request_id="r1")
    assert read(RECEIVED, end(0, 10, 0))[0].kind is Kind.EMPTY_SNAPSHOT
    assert read(RECEIVED, other, end(1, 11, 10))[1].kind is Kind.EMPTY_SNAPSHOT
    assert read(RECEIVED, end(1, 11, 10))[0].kind is Kind.SNAPSHOT_END, "its start may stand before"


def test_a_transaction_that_is_read_again_is_a_repeat() -> None:
    found = read(RECEIVED, received(0, 10, 11), received(1, 12, 13, previous=11), received(2, 12, 13, 14, previous=11))
    assert [(entry.position.sequence, entry.repeat) for entry in found if entry.position] == [
        (10, False), (11, False), (12, False), (13, False), (12, True), (13, True), (14, False)
    ]  # fmt: skip
    assert {entry.hole_after for entry in found} == {None}


def test_what_is_known_to_stand_before_makes_a_repeat_and_no_hole() -> None:
    reader = EntryReader(RECEIVED, written=Position(E1, 12))
    found = [entry for record in (received(7, 12, previous=11), received(8, 13, previous=12)) for entry in reader.take(record)]
    assert [(entry.repeat, entry.hole_after) for entry in found] == [(True, None), (False, None)]


def test_a_hole_is_named_by_what_is_before_it() -> None:
    assert read(RECEIVED, received(0, 10), received(1, 20, previous=15))[1].hole_after == Position(E1, 15)
    assert read(RECEIVED, received(5, 20, previous=15), from_head=True)[0].hole_after == Position(E1, 15), "trimmed"
    assert read(RECEIVED, received(5, 20, previous=15))[0].hole_after is None, "it may stand before"
    again = read(RECEIVED, received(0, 10), received(1, 20, type=pb.SNAPSHOT_SYNC, payloads=[], request_id="r"))[1]
    assert (again.restarts, again.hole_after) == (True, None)


def test_a_transaction_of_a_send_queue_with_its_destinations() -> None:
    routes = [pb.RoutingTableEntryMsg(destinations=names, payload=number) for names, number in ((["w", "n"], 0), (["s"], 0), (["w"], 1))]
    message = pb.Transaction(client_name="orders", type=pb.SNAPSHOT_SYNC, request_id="r", payloads=[b"ab", b"c"], entries=routes)
    [found] = read(ROWS, stamped(3, 40, message))
    assert (found.kind, found.position, found.offset) == (Kind.SNAPSHOT_ROWS, Position(E1, 40), 3)
    assert found.destinations == ("n", "s", "w")
    assert found.payloads == (Payload(b"ab", ("n", "s", "w")), Payload(b"c", ("w",)))


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (pb.FullSyncRequest.REQUESTED, Kind.FULL_SYNC_REQUESTED),
        (pb.FullSyncRequest.COMPLETED, Kind.FULL_SYNC_COMPLETED),
        (pb.FullSyncRequest.CANCELLED, Kind.FULL_SYNC_CANCELLED),
    ],
)
def test_a_full_sync_in_the_status_queue(state: pb.FullSyncRequest.State, kind: Kind) -> None:
    status = pb.Status(full_sync=pb.FullSyncRequest(client_name="orders", destination="west", request_id="r", reason="why", state=state))
    [found] = read(STATUS, stamped(0, 5, status))
    assert (found.kind, found.client_name, found.request_id, found.destinations, found.text) == (kind, "orders", "r", ("west",), "why")


@pytest.mark.parametrize(("provides", "text"), [(True, "supplies full syncs"), (False, "supplies no full syncs")])
def test_a_client_in_the_status_queue(provides: bool, text: str) -> None:
    [found] = read(STATUS, stamped(0, 5, pb.Status(client=pb.ClientStatus(client_name="orders", full_sync_provider=provides))))
    assert (found.kind, found.client_name, found.text) == (Kind.CLIENT, "orders", text)


def test_the_record_of_a_sidecars_start() -> None:
    [found] = read(SENT, opened(4, 3))
    assert (found.kind, found.position, found.text) == (Kind.OPEN, None, "this node's sidecar has started: number 3")


@pytest.mark.parametrize("queue", [RECEIVED, SENT, STATUS])
def test_a_message_of_another_form_is_shown_as_unreadable(queue: str) -> None:
    [found] = read(queue, Record(9, {}, b"\xff\xff\xff"))
    assert (found.kind, found.offset, found.position) == (Kind.UNREADABLE, 9, None)
    assert f"Message 9 of queue {queue} is no " in found.text


def test_values_that_this_version_does_not_know() -> None:
    [found] = read(RECEIVED, received(0, 5, type=pb.NONE))
    assert (found.kind, found.text) == (Kind.UNREADABLE, "type 0 is not known")
    [found] = read(STATUS, stamped(0, 5, pb.Status(key="client/x")))
    assert "is a Status without a value" in found.text
    [found] = read(SENT, Record(0, {}, pb.Transaction(type=pb.LOG_ENTRY_SYNC).SerializeToString()))
    assert (found.kind, found.position, found.text) == (Kind.DELTA, None, "without a position in the log")


# ---- how it is shown -------------------------------------------------------------------------------------------------

ENTRY = Entry(
    3,
    Kind.SNAPSHOT_ROWS,
    Position(E1, 40),
    repeat=True,
    restarts=True,
    hole_after=Position(E1, 30),
    client_name="orders",
    request_id="r",
    replication_id="app/7",
    timestamp_us=1_700_000_000_123_456,
    destinations=("n", "w"),
    payloads=(Payload(b'{"a": "\xc3\xa9"}', ("n", "w")), Payload(b"\xff")),
    text="why",
)


def test_an_entry_as_one_line() -> None:
    assert list(as_text(ENTRY, Form.NONE)) == [
        "      40  epoch 1.1  snapshot rows  app/7  client orders  request r  to n, w  2 payloads, 12 bytes  2023-11-14 22:13:20.123Z  why  REPEAT"
        "  RESTART: nothing before this leads to it  HOLE: it follows 30 of epoch 1.1, and what is between is not here"
    ]
    assert list(as_text(Entry(8, Kind.OPEN, text="started"), Form.HEX)) == ["       -  offset 8  open  started"]


def test_names_cannot_write_to_the_terminal() -> None:
    [line] = as_text(Entry(0, Kind.CLIENT, Position(E1, 1), client_name="a\x1b[2J\nb"), Form.NONE)
    assert "client a\\x1b[2J\\x0ab" in line


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        (Form.HEX, "payload 1, 11 bytes, to n, w: 7b2261223a2022c3a9227d", "payload 2, 1 byte: ff"),
        (Form.UTF8, 'payload 1, 11 bytes, to n, w: {"a": "é"}', "payload 2, 1 byte, which is not utf8: ff"),
        (Form.JSON, 'payload 1, 11 bytes, to n, w: {"a": "é"}', "payload 2, 1 byte, which is not json: ff"),
    ],
)
def test_payloads_are_lines_of_their_own(form: Form, first: str, second: str) -> None:
    assert [line.strip() for line in as_text(ENTRY, form)][1:] == [first, second]


def test_an_entry_as_json() -> None:
    found = json.loads(as_json(ENTRY, Form.JSON))
    assert found == {
        "offset": 3, "epoch": E1, "epoch_name": "1.1", "sequence": 40, "type": "snapshot rows", "repeat": True, "restart": True,
        "hole_after": {"epoch": E1, "sequence": 30}, "client_name": "orders", "request_id": "r", "replication_id": "app/7",
        "timestamp_us": 1_700_000_000_123_456, "destinations": ["n", "w"], "bytes": 12, "text": "why",
        "payloads": [{"bytes": 11, "destinations": ["n", "w"], "json": {"a": "é"}}, {"bytes": 1, "destinations": [], "hex": "ff"}],
    }  # fmt: skip
    hidden = json.loads(as_json(ENTRY, Form.NONE))
    assert hidden["payloads"] == [{"bytes": 11, "destinations": ["n", "w"]}, {"bytes": 1, "destinations": []}]
    bare = json.loads(as_json(Entry(8, Kind.OPEN), Form.NONE))
    assert {bare[key] for key in ("epoch", "sequence", "hole_after", "client_name", "timestamp_us", "text")} == {None}


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b'{"a": -Infinity}', b"[" * 100_000, b"1" * 5_000])
def test_payloads_that_are_no_json(body: bytes) -> None:
    assert read_payload(body, Form.JSON) == ("hex", body.hex())


@pytest.mark.parametrize("timestamp_us", [2**63, 253_402_300_800_000_000])
def test_a_time_that_is_in_no_calendar(timestamp_us: int) -> None:
    assert f"time {timestamp_us} us" in next(as_text(Entry(0, Kind.DELTA, Position(E1, 1), timestamp_us=timestamp_us), Form.NONE))


# ---- where it begins -------------------------------------------------------------------------------------------------


class Stream:
    """A node with one stream. Further messages come once all have been read."""

    def __init__(self, records: Iterable[Record], later: Iterable[Record] = ()) -> None:
        self.records, self.later = list(records), list(later)
        self.reads = 0

    def first_record(self, _queue: str) -> Record | None:
        return self.records[0] if self.records else None

    def tail_record(self, _queue: str) -> Record | None:
        return self.records[-1] if self.records else None

    def follow_records(self, _queue: str, offset: int, _idle_s: float, _prefetch: int) -> Generator[list[Record], None, None]:
        self.reads += 1
        yield [record for record in self.records if record.offset >= offset]
        yield []
        yield self.later
        raise AssertionError("it reads on")


def scan(stream: Stream, queue: str = SENT, sequence: int | None = None, count: int | None = 10, *, follow: bool = False) -> Scan:
    return Scan(cast(NodeConnection, stream), Wanted(queue, sequence, count, follow))


def shown(entries: Iterable[Entry]) -> list[tuple[int, bool]]:
    return [(entry.position.sequence if entry.position else 0, entry.repeat) for entry in entries]


#: Three lives of a sidecar: each begins with a record of its own, and writes again what the one before had written last.
ROW = [(1, range(1, 401)), (2, range(301, 501)), (3, range(480, 600))]
LIVES: list[Record] = []
for number, sequences in ROW:
    LIVES.append(opened(len(LIVES), number))
    LIVES += [sent(len(LIVES) + place, sequence, number) for place, sequence in enumerate(sequences)]


def test_the_newest_entries() -> None:
    assert shown(scan(Stream(LIVES), count=3).entries()) == [(597, False), (598, False), (599, False)]
    assert len(shown(scan(Stream(LIVES), count=10_000).entries())) == len(LIVES)


@pytest.mark.parametrize("count", range(1, len(LIVES), 23))
def test_a_repeat_is_known_wherever_reading_begins(count: int) -> None:
    whole = shown(read(SENT, *LIVES))
    assert shown(scan(Stream(LIVES), count=count).entries()) == whole[-count:]


@pytest.mark.parametrize("sequence", [1, 2, 150, 299, 300, 301, 350, 400, 401, 479, 480, 499, 500, 501, 598, 599])
def test_reading_begins_with_the_first_copy_of_an_entry(sequence: int) -> None:
    stream = Stream(LIVES)
    assert shown(scan(stream, sequence=sequence, count=1).entries()) == [(sequence, False)]
    assert stream.reads < 80


def test_the_first_entries() -> None:
    assert shown(scan(Stream(LIVES), sequence=0, count=2).entries()) == [(0, False), (1, False)]


def test_a_sequence_past_the_end() -> None:
    with pytest.raises(PastEnd, match=r"ends with entry 599 of epoch 1\.1: there is no entry 600, and none behind it"):
        list(scan(Stream(LIVES), sequence=600).entries())
    with pytest.raises(PastEnd, match="holds no entry: there is no entry 1"):
        list(scan(Stream([opened(0, 1)]), sequence=1).entries())


def test_a_sequence_that_was_trimmed() -> None:
    trimmed = scan(Stream(LIVES[100:]), sequence=5, count=1)
    assert shown(trimmed.entries()) == [(100, False)]
    assert trimmed.gone
    whole = scan(Stream([received(0, 10)]), RECEIVED, sequence=5, count=1)
    assert shown(whole.entries()) == [(10, False)]
    assert not whole.gone, "a receive queue has a part of the source's entries"


def test_the_last_records_are_of_no_entry() -> None:
    stream = [*LIVES, *(opened(len(LIVES) + number, 4 + number) for number in range(9))]
    assert shown(scan(Stream(stream), sequence=599, count=1).entries()) == [(599, False)]
    assert shown(scan(Stream(stream), count=1).entries()) == [(0, False)]


def test_a_batch_is_shown_from_the_entry_asked_for() -> None:
    stream = Stream([received(0, 1, 2, 3), received(1, 4, 5, 6, previous=3), received(2, 7, previous=6)])
    assert shown(scan(stream, RECEIVED, sequence=5, count=2).entries()) == [(5, False), (6, False)]
    assert shown(scan(stream, RECEIVED, count=2).entries()) == [(6, False), (7, False)]


def test_following() -> None:
    def follow(stream: Stream, **options: Any) -> list[tuple[int, bool]]:
        found: list[Entry] = []
        with pytest.raises(AssertionError, match="reads on"):
            found.extend(scan(stream, follow=True, **options).entries())
        return shown(found)

    assert follow(Stream([sent(0, 1), sent(1, 2)], [sent(2, 3)]), count=1) == [(2, False), (3, False)]
    assert follow(Stream([sent(0, 1), sent(1, 2)], [sent(2, 3)]), sequence=2, count=None) == [(2, False), (3, False)]
    assert follow(Stream([sent(0, 1)], [sent(1, 2)]), sequence=2, count=None) == [(2, False)], "past the end"
    assert follow(Stream([], [sent(0, 1)]), count=3) == [(1, False)]
    assert follow(Stream([], [sent(0, 1)]), sequence=0, count=None) == [(1, False)]


def test_following_ends_with_the_count() -> None:
    assert shown(scan(Stream([sent(0, 1)], [sent(1, 2), sent(2, 3)]), sequence=1, count=2, follow=True).entries()) == [(1, False), (2, False)]


def test_an_empty_queue() -> None:
    empty = scan(Stream([]), sequence=5)
    assert (empty.is_empty, list(empty.entries())) == (True, [])


# ---- what is refused -------------------------------------------------------------------------------------------------

GONE = "amqp://app:SECRET@127.0.0.1:1"


@pytest.mark.parametrize("queue", ["orders", "LRQ_HA_east", "LRQ_Recv_orders", "LRQ_Recv_a_b_c", "lrq_status"])
def test_other_queues_are_wrong_arguments(queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["peek", queue])
    said = capsys.readouterr().err
    assert f"'{queue}' is none of the queues that can be shown" in said
    assert "LRQ_Recv_<client_name>_<remote_id>, LRQ_Send_LogEntries, LRQ_Send_SnapSync, LRQ_Status" in said


@pytest.mark.parametrize("option", ["--from=0", "--from=-1", "--from=newest", "--from=٣", "--count=0", "--count=100001", "--payload=xml"])
def test_other_values_are_wrong_arguments(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["peek", STATUS, option])


def said_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refusal."""
    assert main(["peek", *arguments]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    return error


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert "127.0.0.1:1 cannot be read: ConnectionRefusedError: " in said_of(capsys, STATUS, "--to", GONE)


def test_an_address_that_cannot_be_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The address in --to has another virtual host" in said_of(capsys, STATUS, "--to", f"{GONE}/shop")
    assert "The address in --to is not an amqp:// URL" in said_of(capsys, STATUS, "--to", "http://127.0.0.1")
    assert "so --node, --group, --config and --dir have no meaning" in said_of(capsys, STATUS, "--to", GONE, "--node", "e1")
    monkeypatch.setenv("LRQ_HA_DOOR", GONE)
    assert "127.0.0.1:1 cannot be read" in said_of(capsys, STATUS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of node e1, whose broker and peer are not there."""
    file = tmp_path / "e1.toml"
    text = sample().replace("127.0.0.1:5672", "127.0.0.1:1").replace("192.0.2.2:5673", "127.0.0.1:2").replace("192.0.2.2:8080", "127.0.0.1:3")
    file.write_text(text)
    return file


def test_the_configured_node_is_read_at_its_broker(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "node e1 cannot be read: " in said_of(capsys, STATUS, "--config", str(config))
    assert "there is no node e9. Known nodes: e1, e2" in said_of(capsys, STATUS, "--config", str(config), "--node", "e9")
    assert "there is no group west" in said_of(capsys, STATUS, "--config", str(config), "--group", "west")


def test_another_node_is_read_at_its_door(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(parameters: list[Any], *_: object) -> None:
        asked.extend(parameters)
        raise KeyboardInterrupt

    monkeypatch.setattr(NodeConnection, "open", answer)
    assert main(["peek", STATUS, "--config", str(config), "--node", "e2"]) == 130
    assert [(each.port, each.virtual_host, each.credentials.username) for each in asked] == [(2, "lrq", "lrq")]


def test_a_broker_behind_the_proxy_protocol(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("proxy_protocol = false", "proxy_protocol = true"))
    assert "expects the PROXY protocol, which peek does not speak" in said_of(capsys, STATUS, "--config", str(config))


@pytest.mark.parametrize(
    ("said", "retriable", "todo"),
    [
        ("ConnectionRefusedError", True, "Is it running"),
        ("(320) 'node e2 is a backup; primary is e1'", False, "A backup's door takes no readers"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED]", False, "with --ca"),
        ("(403) 'ACCESS_REFUSED - Login was refused'", False, "Check user and password, and the rights of user app in vhost lrq"),
    ],
)
def test_what_to_do_if_no_connection_is_taken(said: str, retriable: bool, todo: str) -> None:
    error = peek._closed(peek._Place("node e1", Address.parse(GONE)), said, retriable=retriable)
    assert error.what == f"node e1 cannot be read: {said}"
    assert todo in error.todo


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ([RECEIVED], "though the group has it: nothing has come since this node got its log"),
        (["LRQ_Recv_other_east"], "Receive queues there: LRQ_Recv_other_east"),
        ([], "Receive queues there: none yet"),
        (None, "check the name, or wait for it"),
    ],
)
def test_why_a_receive_queue_is_missing(known: list[str] | None, said: str, monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    monkeypatch.setattr(peek, "_receive_queues", lambda _target: known)
    monkeypatch.chdir(config.parent)
    monkeypatch.setenv("LRQ_HA_CONFIG", "e1.toml")
    place = peek._find_place(argparse.Namespace(to=None, node=None, group=None, config=None, dir=None, token_file=None, ca=""))
    assert said in str(peek._missing(RECEIVED, place))
    assert "A sidecar makes it at its start" in str(peek._missing(STATUS, place))
