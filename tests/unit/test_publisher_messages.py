"""What the publisher refuses, and what it puts on the wire."""

from __future__ import annotations

import asyncio
import multiprocessing
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pika
import pytest

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import AsyncPublisher
from lrq_ha.publisher import confirm as confirm_module
from lrq_ha.publisher import messages as publisher_messages
from lrq_ha.publisher.confirm import AsyncConfirm, Confirm
from lrq_ha.publisher.core import address
from lrq_ha.publisher.errors import ConfirmTimeout, InvalidArgument, MessageTooLarge, NackedError, NoPrimary
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.nodes import DELAY_MAX_S, STEP_S, Addresses, Rotation
from lrq_ha.publisher.transaction import Transaction
from lrq_ha.publisher.wire import WRITE_BYTES_MAX, Outgoing, writes
from lrq_ha.routing.chain import payloads_of


@pytest.mark.parametrize("name", ["a", "orders-app", "A.b_c-9", "x" * 64])
def test_good_names(name: str) -> None:
    assert publisher_messages.checked_producer(name) == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b", "a b", "ä", "a\n", "-a", None, b"a", "orders.lrq"])
def test_bad_names(name: object) -> None:
    with pytest.raises(InvalidArgument, match="producer is"):
        publisher_messages.checked_producer(name)


@pytest.mark.parametrize("name", ["", "or_ders", "x" * 65, None])
def test_bad_client_names(name: object) -> None:
    with pytest.raises(InvalidArgument, match="client_name is"):
        publisher_messages.checked_client_name(name)


@pytest.mark.parametrize("destinations", [[], "west", b"west", [""], ["west", ""], ["we_st"], [1], None, 7])
def test_bad_destinations(destinations: object) -> None:
    with pytest.raises(InvalidArgument, match="destinations"):
        publisher_messages.checked_destinations(destinations)


@pytest.mark.parametrize("reason", [None, b"x", "x" * 251])
def test_bad_reasons(reason: object) -> None:
    with pytest.raises(InvalidArgument, match="reason is"):
        publisher_messages.checked_reason(reason)


def test_destinations_lose_repeats_and_keep_their_order() -> None:
    assert publisher_messages.checked_destinations(["west", "south", "west"]) == ("west", "south")


def test_bytes() -> None:
    changing = bytearray(b"abc")
    kept = publisher_messages.checked_bytes("payload", changing)
    changing[0] = 0
    assert kept == b"abc"
    assert publisher_messages.checked_bytes("payload", memoryview(b"x")) == b"x"
    with pytest.raises(InvalidArgument, match="payload is a str"):
        publisher_messages.checked_bytes("payload", "text")


def test_sizes() -> None:
    publisher_messages.checked_size("It", 5, 5)
    with pytest.raises(MessageTooLarge, match="It has 6 bytes, the limit is 5"):
        publisher_messages.checked_size("It", 6, 5)
    with pytest.raises(InvalidArgument, match="routing_key"):
        publisher_messages.checked_short_string("routing_key", "ä" * 128)


def take(publisher: AsyncPublisher, properties: object = None, exchange: str = "", routing_key: str = "q") -> AsyncConfirm:
    return publisher._take(publisher._draft_publish(exchange, routing_key, b"body", properties, True))


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"expiration": 60000}, r"expiration is 60000.*str of at most 255 bytes"),
        ({"message_id": 7}, r"message_id is 7.*str"),
        ({"content_type": "é" * 128}, r"content_type is 'é.*255 bytes"),
        ({"type": "\ud800"}, r"type is '\\ud800'.*surrogates"),
        ({"priority": 300}, r"priority is 300.*0 to 255"),
        ({"timestamp": 1.5}, r"timestamp is 1\.5.*seconds since 1970"),
        ({"delivery_mode": "2"}, r"delivery_mode is '2'.*1 \(transient\) or 2 \(persistent\)"),
        ({"headers": [1]}, r"headers is \[1\].*dict"),
        ({"headers": {"good": 1, "h": 2**70}}, r"header 'h' is 1180591620717411303424.*64 bits"),
        ({"headers": {"h": {1, 2}}}, r"header 'h' is \{1, 2\}.*lists and dicts"),
        ({"headers": {"h": [{"inner": 1.5}]}}, r"header 'h' is \[\{'inner': 1\.5\}\].*float goes as a str"),
        ({"headers": {"h": "\ud800"}}, r"header 'h' is '\\ud800'"),
        ({"headers": {1: 2}}, r"header 1 is 2.*Names"),
        ({"headers": {"k" * 256: 1}}, r"header 'k+\.\.\.k+' is 1.*255 bytes"),
        ({"headers": {"h": nested(5_000)}}, r"header 'h' is \[\[\[.*lists and dicts"),
        ({"headers": {"\ud800": 1}}, r"header '\\ud800' is 1.*UTF-8"),
    ],
)  # fmt: skip
def test_wrong_properties(properties: dict[str, object], said: str) -> None:
    """What pika says of them is of a dozen kinds, and names no property."""
    publisher = AsyncPublisher(["amqp://127.0.0.1:1"], "p")
    with pytest.raises(InvalidArgument, match=said):
        take(publisher, pika.BasicProperties(app_id="good", **properties))
    assert (len(publisher._own.window), publisher._own.window.bytes, publisher._own.window.added) == (0, 0, 0)
    assert take(publisher).replication_id == "p/1"


def test_properties_of_other_kinds() -> None:
    class Strange(pika.BasicProperties):
        def encode(self) -> list[bytes]:
            raise RuntimeError("not today")

    publisher = AsyncPublisher(["amqp://127.0.0.1:1"], "p")
    with pytest.raises(InvalidArgument, match=r"properties is a dict.*pika\.BasicProperties"):
        take(publisher, {"priority": 1})
    with pytest.raises(InvalidArgument, match="not today"):
        take(publisher, Strange(priority=1, headers={"h": 1}))


@pytest.mark.parametrize(
    ("exchange", "routing_key", "said"), [("\ud800", "q", "exchange is"), ("", "\ud800", "routing_key is"), ("", 7, "routing_key is 7")]
)
def test_names_that_are_no_short_strings(exchange: str, routing_key: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        take(AsyncPublisher(["amqp://127.0.0.1:1"], "p"), None, exchange, routing_key)


def test_a_transaction_stores_equal_payloads_once() -> None:
    entries = LogEntries.checked([(b"one", ["west", "south"]), (b"two", ["west"]), (b"one", ["north"])])
    found = pb.Transaction.FromString(entries.to_bytes("orders", "p.lrq/7", 123))
    assert list(found.payloads) == [b"one", b"two"]
    assert [(list(e.destinations), e.payload) for e in found.entries] == [(["west", "south"], 0), (["west"], 1), (["north"], 0)]
    assert (found.client_name, found.replication_id, found.timestamp_us) == ("orders", "p.lrq/7", 123)
    assert (found.type, found.request_id, found.source) == (pb.LOG_ENTRY_SYNC, "", "")


def test_a_payload_that_is_stored_once_is_limited_as_often_as_a_destination_gets_it() -> None:
    payload = bytes(1 << 20)
    publisher_messages.checked_shares(LogEntries.checked([(payload, ["west", "south"])] * 15))
    publisher_messages.checked_shares(LogEntries.checked([(payload, ["west"]), (payload, ["south"])] * 15))
    with pytest.raises(MessageTooLarge, match=r"share for one destination has 16777312 bytes.*Split it"):
        publisher_messages.checked_shares(LogEntries.checked([(payload, ["west"])] * 16))
    with pytest.raises(MessageTooLarge, match="of 20000 at most"):
        publisher_messages.checked_shares(LogEntries.checked([(b"", ["west", "south"])] * 10_001))


def test_a_transaction_without_entries_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no entries"):
        LogEntries.checked([])


def test_collecting_a_transaction() -> None:
    transaction: Transaction[str] = Transaction()
    transaction.transmit_log_entry_message(b"a", ["west"])
    with pytest.raises(InvalidArgument):
        transaction.transmit_log_entry_message(b"a", [])
    assert len(transaction) == 1
    with pytest.raises(IllegalEvent):
        _ = transaction.confirm
    with transaction.collecting():
        transaction.transmit_log_entry_message(b"b", ["south"])
    assert transaction.entries == LogEntries(((b"a", ("west",)), (b"b", ("south",))))
    transaction.sent("confirm")
    assert transaction.confirm == "confirm"
    with pytest.raises(IllegalEvent):
        transaction.transmit_log_entry_message(b"b", ["west"])
    assert Transaction[str]().entries is None
    discarded: Transaction[str] = Transaction()
    discarded.transmit_log_entry_message(b"a", ["west"])
    with pytest.raises(KeyError), discarded.collecting():
        raise KeyError
    assert discarded.entries is None


def test_statuses() -> None:
    client = pb.Status.FromString(publisher_messages.client_status("orders", True))
    assert (client.key, client.client.client_name, client.client.full_sync_provider) == ("client/orders", "orders", True)
    ended = pb.Status.FromString(publisher_messages.full_sync_status("orders", "west", "r1", "new", pb.FullSyncRequest.CANCELLED))
    assert (ended.key, ended.full_sync.request_id, ended.full_sync.state) == ("fullsync/orders/west", "r1", pb.FullSyncRequest.CANCELLED)


def test_rotation_is_quick_in_a_round_and_doubles_between_rounds() -> None:
    rotation = Rotation(2)
    waits, order = [], []
    for _ in range(20):
        waits.append(rotation.next(1.0))
        order.append(rotation.current)
    assert order == [1, 0] * 10
    assert waits[0::2] == [STEP_S] * 10
    assert waits[1:8:2] == [0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == DELAY_MAX_S
    assert rotation.next(0.0) == STEP_S
    assert rotation.next(0.0) == DELAY_MAX_S / 2
    rotation.succeeded()
    assert rotation.next(1.0) == STEP_S


def test_rotation_of_one_address() -> None:
    rotation = Rotation(1)
    assert [rotation.next(1.0) for _ in range(3)] == [0.1, 0.2, 0.4]
    assert rotation.current == 0


def test_addresses_remember_what_each_answered() -> None:
    addresses = Addresses("/", ["a:1", "b:2"])
    addresses.trying()
    assert addresses.answers == {"a:1": "no answer yet", "b:2": "not tried yet"}
    assert addresses.left("refused", 1.0) == STEP_S
    assert addresses.here == "b:2 vhost '/'"
    addresses.trying()
    addresses.took_us()
    assert addresses.answers == {"a:1": "refused", "b:2": "takes publishes"}
    addresses.holds()
    assert addresses.left("lost", 1.0) == STEP_S
    addresses.trying()
    with pytest.raises(NoPrimary, match="a:1: refused; b:2: lost"):  # while it is asked again, its last answer stands
        raise addresses.no_primary()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://u:p@host:5", "host:5"), ("amqp://host", "host:5672"), ("amqps://u:p@host/", "host:5671"), ("amqp://", "localhost:5672"),
        ("amqp://u:p@[::1]:7", "::1:7"),
    ],
)  # fmt: skip
def test_addresses_are_shown_without_credentials(url: str, expected: str) -> None:
    assert address(url) == expected


@pytest.mark.parametrize(
    "url",
    ["http://host", "host:5672", "amqp://u:secret@host:port", "amqp://u:secret@[::1", "amqp://u:12/secret@host", "amqp://u:12?secret@host:5",
     "amqp://u:12#secret@host", None, 7],
)  # fmt: skip
def test_bad_addresses_do_not_tell_the_password(url: object) -> None:
    with pytest.raises(InvalidArgument, match=r"amqp://user:password@host:port") as caught:
        address(url)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("amqp://u:p@h/shop", "has another virtual host"), ("amqp://u:p@h/%2F", "has another virtual host"),
        ("amqp://u:p@h?heartbeat=5", "has options behind"), ("amqp://u:p@h/a%2Fb#5", "has options behind"),
        ("amqp://u@h", "has a user and no password"), ("amqp://u:@h", "has a user and no password"),
    ],
)  # fmt: skip
def test_a_part_of_an_address_that_would_not_be_used_is_refused(url: str, fault: str) -> None:
    """What was published to the virtual host of an address was confirmed, and in another one."""
    with pytest.raises(InvalidArgument, match=fault) as caught:
        address(url, "a/b")
    assert "(vhost is 'a/b')" in str(caught.value)
    assert "shop" not in str(caught.value)


def test_an_address_may_have_the_virtual_host_that_is_asked_for() -> None:
    assert {address("amqp://u:p@h/a%2Fb", "a/b"), address("amqp://u:p@h/%2f"), address("amqp://u:p@h/", "a/b")} == {"h:5672"}


def test_writes_are_the_frames_in_pieces() -> None:
    bodies = [b"", b"one", b"y" * 10_000, b"z" * (2 * WRITE_BYTES_MAX)]
    messages = [Outgoing(b"<%d>" % number, body, None) for number, body in enumerate(bodies)]
    pieces = list(writes(messages, 4096))
    assert max(map(len, pieces)) < WRITE_BYTES_MAX + 8192
    assert len(pieces) == 3
    written, found = b"".join(pieces), []
    for number, body in enumerate(bodies):
        head = b"<%d>" % number
        assert written.startswith(head)
        written, left = written[len(head) :], len(body)
        while left:
            kind, channel, size = struct.unpack(">BHI", written[:7])
            assert (kind, channel, written[7 + size]) == (3, 1, 0xCE)
            assert size <= 4096 - 8
            found.append(written[7 : 7 + size])
            written, left = written[8 + size :], left - size
    assert (written, b"".join(found)) == (b"", b"".join(bodies))


def test_a_confirm_says_what_it_is() -> None:
    for kind in (Confirm, AsyncConfirm):
        confirm = kind("p/1", lambda: None)
        assert repr(confirm) == f"<{kind.__name__} p/1: waiting>"
        confirm.settle(None)
        assert repr(confirm) == f"<{kind.__name__} p/1: confirmed>"
        failed = kind("p/2", lambda: None)
        failed.settle(NackedError("p/2", 312, "NO_ROUTE"))
        assert "failed" in repr(failed)
        assert "312 NO_ROUTE" in repr(failed)


def test_who_stops_waiting_is_forgotten() -> None:
    confirm = Confirm("p/1", lambda: None)
    called: list[Confirm] = []
    confirm.add_done_callback(called.append)
    for _ in range(3):
        with pytest.raises(ConfirmTimeout):
            confirm.result(0)
    assert len(confirm._callbacks or ()) == 1
    confirm.settle(None)
    confirm.call_back()
    assert called == [confirm]


def test_a_confirm_that_comes_just_as_the_time_is_over_is_one() -> None:
    class Late(Confirm):
        def _forget(self, callback: Callable[[], object]) -> None:
            super()._forget(callback)
            self.settle(None)

    assert Late("p/1", lambda: None).result(0) == "p/1"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_confirm_after_a_fork() -> None:
    """Nobody settles it there; and whoever held the lock of all who wait is not there."""
    waiting, failed = Confirm("p/1", lambda: None), Confirm("p/2", lambda: None)
    failed.settle(NackedError("p/2", 0, ""))

    def child(said: multiprocessing.SimpleQueue[list[str]]) -> None:
        found = []
        asked: tuple[Callable[[], object], ...] = (
            waiting.result,
            lambda: asyncio.run(AsyncConfirm.result(waiting)),  # type: ignore[arg-type]
            failed.result,
        )
        for ask in asked:
            try:
                ask()
            except LrqError as error:
                found.append(type(error).__name__)
        mine = Confirm("p/3", lambda: None)
        try:
            mine.result(0)
        except ConfirmTimeout as error:
            found.append(type(error).__name__)
        said.put(found)

    context = multiprocessing.get_context("fork")
    said: multiprocessing.SimpleQueue[list[str]] = context.SimpleQueue()
    process = context.Process(target=child, args=(said,), daemon=True)
    with confirm_module._WAITERS:
        process.start()
    try:
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert said.get() == ["PublisherClosed", "PublisherClosed", "NackedError", "ConfirmTimeout"]


def test_an_awaited_confirm() -> None:
    async def main() -> None:
        confirm = AsyncConfirm("p/1", lambda: None)
        with pytest.raises(ConfirmTimeout, match="p/1"):
            await confirm.result(0)
        waiting = [asyncio.ensure_future(confirm.result()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        confirm.settle(NackedError("p/1", 0, ""))
        confirm.call_back()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in results] == [asyncio.CancelledError, NackedError, NackedError]
        with pytest.raises(NackedError):
            await confirm

    asyncio.run(main())


def test_without_aio_pika_only_the_async_publisher_is_missing() -> None:
    """As after `pip install lrq-ha`: a process in which aiormq cannot be imported."""
    code = """
import sys
sys.modules["aiormq"] = None
import lrq_ha.publisher
lrq_ha.publisher.Publisher
try:
    lrq_ha.publisher.AsyncPublisher
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'CHECKOUT[async]'" in done.stdout


def test_confirm() -> None:
    called: list[Confirm] = []
    confirm = Confirm("p/1", lambda: None)
    confirm.add_done_callback(called.append)
    confirm.add_done_callback(lambda _: 1 / 0)  # logged, and the next one is called all the same
    confirm.add_done_callback(called.append)
    with pytest.raises(ConfirmTimeout, match="p/1"):
        confirm.result(0.001)
    assert (confirm.done, confirm.error, confirm.observed) == (False, None, False)
    assert confirm.settle(None), "somebody waits"
    confirm.call_back()
    confirm.call_back()
    assert called == [confirm, confirm]
    confirm.add_done_callback(called.append)
    assert len(called) == 3
    assert confirm.result(0) == "p/1"
    assert confirm.observed


def test_confirm_that_fails_wakes_who_waits() -> None:
    confirm = Confirm("p/1", lambda: None)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            confirm.result()
        except NackedError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    if confirm.settle(NackedError("p/1", 312, "NO_ROUTE")):
        confirm.call_back()
    for thread in threads:
        thread.join(120)
    assert len(raised) == 3
    assert confirm.error is raised[0]


def test_a_timeout_says_that_there_is_no_primary() -> None:
    confirm = Confirm("p/1", lambda: NoPrimary("/", {"a:1": "refused", "b:2": "320 node e2 is a backup"}))
    with pytest.raises(NoPrimary, match="a:1: refused; b:2: 320 node e2 is a backup") as caught:
        confirm.result(0)
    assert caught.value.retriable
    assert isinstance(caught.value, TimeoutError)


def test_destinations_that_entries_share_stand_in_a_transaction_once() -> None:
    """They took more bytes than small payloads did."""
    given = [(b"a", ["x", "y"]), (b"b", ["x", "y"]), (b"b", ["x", "y"]), (b"c", ["x", "y"]), (b"d", ["y"]), (b"a", ["y"]), (b"b", ["y"])]
    found = pb.Transaction.FromString(LogEntries.checked(given).to_bytes("orders", "app/1", 5))
    assert list(found.payloads) == [b"a", b"b", b"c", b"d"]
    assert [(entry.payload, entry.more, list(entry.destinations)) for entry in found.entries] == [
        (0, 1, ["x", "y"]), (1, 1, ["x", "y"]), (3, 0, ["y"]), (0, 1, ["y"])
    ]  # fmt: skip
    named = [(found.payloads[number], list(entry.destinations)) for entry in found.entries for number in payloads_of(entry)]
    assert named == given
    names, rows = [f"site-{number}" for number in range(10)], [number.to_bytes(100, "big") for number in range(100)]
    body = LogEntries.checked([(row, names) for row in rows]).to_bytes("orders", "app/1", 5)
    assert len(body) <= 1.1 * 100 * 100
