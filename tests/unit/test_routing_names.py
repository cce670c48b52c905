"""Names of routing queues parse in one way only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrq_ha.errors import MalformedInput
from lrq_ha.routing import names

valid = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.\-]{0,63}", fullmatch=True)


@given(valid, valid)
def test_a_receive_queue_parses_back(client: str, remote: str) -> None:
    queue = names.recv_queue(client, remote)
    assert names.parse_recv_queue(queue) == (client, remote)
    assert len(queue) <= 255


@pytest.mark.parametrize("queue", ["orders", "LRQ_Recv_", "LRQ_Recv_a", "LRQ_Recv_a_b_c", "LRQ_Recv__b", "LRQ_Recv_a_", "LRQ_Recv_-_b"])
def test_other_names_are_no_receive_queues(queue: str) -> None:
    assert names.parse_recv_queue(queue) is None


@pytest.mark.parametrize("text", ["", "a_b", "a b", ".a", "ü", "a" * 65, "a\n"])
def test_invalid_names_are_refused_with_the_rule(text: str) -> None:
    assert not names.is_name(text)
    for make in (names.check_client_name, names.check_remote_id, names.client_key):
        with pytest.raises(MalformedInput, match="64 letters"):
            make(text)


def test_keys() -> None:
    assert names.client_key("orders") == "client/orders"
    assert names.full_sync_key("orders", "west") == "fullsync/orders/west"


def test_a_producer_asks_where_it_stood() -> None:
    assert names.producer_queue("orders-app_1") == "LRQ_Producer_orders-app_1"
    assert names.parse_producer_queue("LRQ_Producer_orders-app_1") == "orders-app_1"


def test_a_producer_asks_for_its_numbers() -> None:
    assert names.numbers_queue("a-1", 5, 7) == "LRQ_Producer_a-1/5-7"
    assert names.parse_numbers_queue("LRQ_Producer_a-1/5-7") == ("a-1", 5, 7)
    assert names.parse_numbers_queue("LRQ_Producer_a/1-1000") == ("a", 1, 1000)
    for other in ("LRQ_Producer_a/1-1001", "LRQ_Producer_a/2-1", "LRQ_Producer_a/-1", "LRQ_Producer_a/1", "LRQ_Producer_a/b/1-2", "a/1-2"):
        assert names.parse_numbers_queue(other) is None


def test_a_producer_name_has_no_slash() -> None:
    with pytest.raises(MalformedInput, match="producer name"):
        names.producer_queue("a/b")
    assert names.parse_producer_queue("LRQ_Producer_a/b") is None
    assert names.parse_producer_queue("other") is None
