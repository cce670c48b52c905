"""Batches in several records: whole again for a reader, whatever a killed writer left in between."""

from __future__ import annotations

from typing import Any

import pytest

from broker_plugin.log import codec
from broker_plugin.log.codec import PART_BYTES_MAX, Joiner, parts_of

Record = tuple[dict[str, Any], bytes]


def read(records: list[Record]) -> list[Record]:
    joiner: Joiner[dict[str, Any]] = Joiner()
    return [whole for headers, body in records if (whole := joiner.take(headers, headers, body)) is not None]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES_MAX])
def test_a_small_batch_is_one_record(size: int) -> None:
    assert parts_of({"a": 1}, bytes(size)) == [({"a": 1}, bytes(size))]


@pytest.mark.parametrize("size", [PART_BYTES_MAX + 1, 2 * PART_BYTES_MAX, 3 * PART_BYTES_MAX + 7])
def test_a_large_one_is_joined_again(size: int) -> None:
    body = bytes(i & 255 for i in range(251)) * (size // 251 + 1)
    records = parts_of({"a": 1}, body[:size])
    assert all(len(part) <= PART_BYTES_MAX for _, part in records)
    assert read(records) == [({"a": 1, codec.PARTS: len(records)}, body[:size])]


def test_what_is_unfinished_is_dropped() -> None:
    large = parts_of({"a": 1}, bytes(3 * PART_BYTES_MAX))
    small = [({"b": 2}, b"b")]
    assert read(large[:2] + small) == small
    assert read(large[1:] + small) == small  # reading began in the middle
    assert [len(body) for _, body in read(large[:2] + large)] == [3 * PART_BYTES_MAX]
    assert read(large[:1] + large[2:] + small) == small
