"""Ports of labs: no two labs draw the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from lrq_ha.lab import ports
from lrq_ha.lab.errors import LabError


def test_what_one_lab_holds_no_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(ports.free_ports())
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_LAST", first + 9)
    one, other = ports.free_ports(), ports.free_ports()
    held = set(itertools.islice(one, 3))
    assert len(held) == 3
    rest = all_of(other)
    assert rest, "some are left"
    assert not rest & held
    one.close()
    assert held <= all_of(ports.free_ports())


def all_of(drawn: Iterator[int]) -> set[int]:
    found: set[int] = set()
    with pytest.raises(LabError, match="No free port"):
        found.update(drawn)
    return found
