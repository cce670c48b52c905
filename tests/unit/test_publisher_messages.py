"""What the publisher refuses, and what it puts on the wire."""

from __future__ import annotations

import threading

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import messages
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.errors import ConfirmTimeout, InvalidArgument, MessageTooLarge, NackedError, NoPrimary
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.nodes import DELAY_MAX_S, STEP_S, Rotation
from lrq_ha.publisher.transaction import Transaction
from lrq_ha.replication.errors import IllegalEvent


@pytest.mark.parametrize("name", ["a", "orders-app", "A.b_c-9", "x" * 64])
def test_good_names(name: str) -> None:
    assert messages.checked_producer(name) == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b", "a b", "ä", "a\n", "-a", None, b"a", "orders.lrq"])
def test_bad_names(name: object) -> None:
    with pytest.raises(InvalidArgument, match="producer is"):
        messages.checked_producer(name)


@pytest.mark.parametrize("name", ["", "or_ders", "x" * 65, None])
def test_bad_client_names(name: object) -> None:
    with pytest.raises(InvalidArgument, match="client_name is"):
        messages.checked_client_name(name)


@pytest.mark.parametrize("destinations", [[], "west", b"west", [""], ["west", ""], ["we_st"], [1], None, 7])
def test_bad_destinations(destinations: object) -> None:
    with pytest.raises(InvalidArgument, match="destinations"):
        messages.checked_destinations(destinations)


def test_destinations_lose_repeats_and_keep_their_order() -> None:
    assert messages.checked_destinations(["west", "south", "west"]) == ("west", "south")


def test_bytes() -> None:
    changing = bytearray(b"abc")
    kept = messages.checked_bytes("payload", changing)
    changing[0] = 0
    assert kept == b"abc"
    assert messages.checked_bytes("payload", memoryview(b"x")) == b"x"
    with pytest.raises(InvalidArgument, match="payload is a str"):
        messages.checked_bytes("payload", "text")


def test_sizes() -> None:
    messages.checked_size("It", 5, 5)
    with pytest.raises(MessageTooLarge, match="It has 6 bytes, the limit is 5"):
        messages.checked_size("It", 6, 5)
    with pytest.raises(InvalidArgument, match="routing_key"):
        messages.checked_short_string("routing_key", "ä" * 128)


def test_a_transaction_stores_equal_payloads_once() -> None:
    entries = LogEntries.checked([(b"one", ["west", "south"]), (b"two", ["west"]), (b"one", ["north"])])
    found = pb.Transaction.FromString(entries.to_bytes("orders", "p.lrq/7", 123))
    assert list(found.payloads) == [b"one", b"two"]
    assert [(list(e.destinations), e.payload) for e in found.entries] == [(["west", "south"], 0), (["west"], 1), (["north"], 0)]
    assert (found.client_name, found.replication_id, found.timestamp_us) == ("orders", "p.lrq/7", 123)
    assert (found.type, found.request_id, found.source) == (pb.LOG_ENTRY_SYNC, "", "")


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
    assert transaction.seal() == LogEntries(((b"a", ("west",)),))
    transaction.sent("confirm")
    assert transaction.confirm == "confirm"
    with pytest.raises(IllegalEvent):
        transaction.transmit_log_entry_message(b"b", ["west"])
    assert Transaction[str]().seal() is None


def test_statuses() -> None:
    client = pb.Status.FromString(messages.client_status("orders", True))
    assert (client.key, client.client.client_name, client.client.full_sync_provider) == ("client/orders", "orders", True)
    ended = pb.Status.FromString(messages.full_sync_status("orders", "west", "r1", "new", pb.FullSyncRequest.CANCELLED))
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
        thread.join(5)
    assert len(raised) == 3
    assert confirm.error is raised[0]


def test_a_timeout_says_that_there_is_no_primary() -> None:
    confirm = Confirm("p/1", lambda: NoPrimary("/", {"a:1": "refused", "b:2": "320 node e2 is a backup"}))
    with pytest.raises(NoPrimary, match="a:1: refused; b:2: 320 node e2 is a backup") as caught:
        confirm.result(0)
    assert caught.value.retriable
    assert isinstance(caught.value, TimeoutError)
