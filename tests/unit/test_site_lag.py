"""The lag of sites as a primary tells it: entries, bytes, seconds, and whether entries that a site needs may be dropped."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_completion import Alone
from test_routing_session import LOG, SNAP, Bench, at, in_log_sync, in_snapshot, transaction
from test_sites_driver import TWO_DOORS, sites_of

from lrq_ha.replication.retention import RECORD_BYTES, Retention
from lrq_ha.routing import messages as m
from lrq_ha.sidecar.node.log_growth import GREW_MAX, LogGrowth
from lrq_ha.sidecar.sites.site_lag import SiteLag
from lrq_ha.sidecar.sites.snapshot_keeper import SnapshotKeeper
from lrq_ha.sidecar.sites.view_reader import View

LOG_BYTES = 1 << 20  # marks every KiB, segments of 128 KiB
ENTRY_BYTES = 10_000


class Views:
    """The views of a log in which every entry has ENTRY_BYTES."""

    def __init__(self, before: int = 0) -> None:
        log_size = Retention(LOG_BYTES)
        for sequence in range(1, before + 1):
            log_size.appended(sequence, ENTRY_BYTES - RECORD_BYTES)
        self.views = {stream: View(stream.value) for stream in m.Stream}
        self.views[LOG].tail = before
        self.lag = SiteLag(self.views, LOG_BYTES)
        self.lag.begin(log_size.export())

    def write(self, stream: m.Stream, first: int, last: int) -> None:
        for sequence in range(first, last + 1):
            self.views[stream].tail = sequence
            self.lag.add_entry(stream, sequence, ENTRY_BYTES - RECORD_BYTES)

    def tell(self, bench: Bench, now: float = 0.0) -> tuple[Any, ...]:
        told = self.lag.tell(bench.session, now)
        assert list(told) == ["lag_entries", "lag_bytes", "lag_seconds", "bytes_left"]
        return tuple(told.values())


KEPT = LOG_BYTES - LOG_BYTES // 8


def test_a_site_in_step_has_no_lag() -> None:
    assert Views(10).tell(in_log_sync()) == (0, 0, 0.0, KEPT)


def test_the_lag_grows_while_a_site_is_away_and_is_over_when_it_has_everything() -> None:
    views, bench = Views(), in_log_sync()
    bench.tell(m.Disconnected())
    views.write(LOG, 11, 15)
    views.lag.tick(100.0)
    views.write(LOG, 16, 20)
    views.lag.tick(101.0)
    assert views.tell(bench, 103.5) == (10, 10 * ENTRY_BYTES, 3.5, KEPT - 10 * ENTRY_BYTES)
    bench.meet(10, "r", True)
    bench.read(LOG, *((sequence, transaction()) for sequence in range(11, 21)))
    bench.tell(m.Acked(at(17)))
    assert views.tell(bench, 103.5) == (3, 3 * ENTRY_BYTES, 2.5, KEPT - 3 * ENTRY_BYTES)
    bench.tell(m.Acked(at(20)))
    assert views.tell(bench, 103.5) == (0, 0, 0.0, KEPT)


def test_nothing_is_told_of_a_site_that_was_not_heard() -> None:
    views = Views(10)
    assert views.tell(Bench()) == (None, None, None, None)
    assert views.lag.trouble(Bench().session) == ""


def test_the_rows_of_a_snapshot_under_way_count() -> None:
    views, bench = Views(), in_snapshot()
    bench.tell(m.Acked(at(5)))
    views.write(LOG, 6, 7)
    views.write(SNAP, 8, 12)
    assert views.tell(bench) == (7, 7 * ENTRY_BYTES, 0.0, KEPT - 5 * ENTRY_BYTES)


def test_a_chain_that_is_to_restart_needs_nothing_that_is_left() -> None:
    views, bench = Views(), in_log_sync()
    views.write(LOG, 11, 200)
    bench.trim(LOG, 150)
    assert views.tell(bench) == (190, 190 * ENTRY_BYTES, 0.0, None)
    assert views.lag.trouble(bench.session) == ""


def test_the_log_stands_in_for_what_an_earlier_incarnation_wrote() -> None:
    views, bench = Views(30), in_log_sync()
    assert views.tell(bench) == (20, 20 * ENTRY_BYTES, 0.0, KEPT - 20 * ENTRY_BYTES)
    views.write(LOG, 31, 35)
    told = views.lag.tell(bench.session, 0.0)
    assert told["lag_entries"] == 25
    assert 25 * ENTRY_BYTES <= told["lag_bytes"] <= 26 * ENTRY_BYTES, "it errs upwards"


def test_a_site_is_in_danger_before_its_next_entries_are_dropped() -> None:
    views, bench = Views(), in_log_sync()
    views.write(LOG, 11, 62)
    assert views.lag.trouble(bench.session) == ""
    views.write(LOG, 63, 70)
    assert views.lag.trouble(bench.session) == (
        "orders to west is in danger of falling off LRQ_Send_LogEntries: the site lacks 600000 bytes, and after 317504 more the broker drops what it "
        "needs next (log_bytes_max 1048576): unless it catches up, it needs a full sync"
    )
    views.write(LOG, 71, 110)
    gone = "LRQ_Send_LogEntries may no longer hold what west lacks of orders: if so, a full sync has to bring it"
    assert views.lag.trouble(bench.session) == gone
    bench.read(LOG, *((sequence, transaction()) for sequence in range(11, 111)))
    bench.tell(m.Acked(at(110)))
    assert views.lag.trouble(bench.session) == ""


def test_a_danger_is_warned_of_once_and_told_all_the_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        sites = sites_of(Alone(), tmp_path, TWO_DOORS)
        for client in ("a", "b", "c", "d", "e"):
            sites._add(client)
        drivers = list(sites._sites[0].drivers.values())
        texts = {driver.session.route.client_name: f"{driver.client_name} is in danger: 5 bytes" for driver in drivers}
        sites.lag = lag = SimpleNamespace(trouble=lambda session: texts[session.route.client_name], tell=lambda *_: {})  # type: ignore[assignment]
        for _ in range(2):
            for driver in drivers:
                driver.look_for_danger()
            texts.update({name: text.replace("5", "6") for name, text in texts.items()})
        assert sites.trouble() == "a is in danger: 6 bytes; b is in danger: 6 bytes; c is in danger: 6 bytes; and 2 more sessions"
        assert drivers[0].status()["problem"] == "a is in danger: 6 bytes"
        lag.trouble = lambda _session: ""
        for driver in drivers:
            driver.look_for_danger()
        assert sites.trouble() == drivers[0].status()["problem"] == ""

    with caplog.at_level(logging.WARNING, "lrq_ha.sites"):
        asyncio.run(go())
    assert [record.getMessage() for record in caplog.records] == [f"{name} is in danger: 5 bytes" for name in "abcde"]


def test_a_session_tells_its_lag_and_its_full_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        sites = sites_of(Alone(), tmp_path, TWO_DOORS)
        sites._add("orders")
        driver = sites._sites[0].drivers["orders"]
        told = driver.status()
        assert (told["lag_entries"], told["bytes_left"], told["snapshot"]) == (None, None, None)
        now = asyncio.get_running_loop().time()
        driver.session.snapshot.begin("r", now - 20.0, 3)
        driver.session.snapshot.add_rows(7, 700)
        monkeypatch.setattr("lrq_ha.sidecar.sites.session_driver.time.time", lambda: 1_000.0)
        told = driver.status()["snapshot"]
        assert 979.0 <= told.pop("since") <= 980.0
        assert told == {"request": "r", "rows": 7, "bytes": 700, "attempts": 3}

    asyncio.run(go())


def test_what_is_written_to_a_view_is_counted(tmp_path: Path) -> None:
    async def go() -> None:
        sites = sites_of(Alone(), tmp_path, TWO_DOORS)
        sites.view_written("LRQ_Send_LogEntries", 7, 1000)
        sites.view_written("LRQ_Recv_orders_east", 8, 1000)
        told = sites.lag.tell(in_log_sync().session, 0.0)
        assert told["lag_entries"] == 0
        sites.view_written("LRQ_Send_LogEntries", 12, 1000)
        told = sites.lag.tell(in_log_sync().session, 0.0)
        assert (told["lag_entries"], told["lag_bytes"]) == (2, 2 * (1000 + RECORD_BYTES)), "to the last mark before it"

    asyncio.run(go())


def test_a_log_that_grows_is_remembered_for_a_while() -> None:
    growth = LogGrowth()
    assert growth.behind_s(0, 1.0) == 0.0
    for second in range(1, 3 * GREW_MAX):
        growth.note_end(second, float(second))
        growth.note_end(second, second + 0.5)
    end = 3 * GREW_MAX - 1
    assert growth.behind_s(end, end + 9.0) == 0.0
    assert growth.behind_s(end - 1, end + 9.0) == 9.0
    assert growth.behind_s(end - GREW_MAX, float(end)) == GREW_MAX - 1
    assert growth.behind_s(0, float(end)) <= 2 * GREW_MAX, "no further back than is remembered"
    assert len(growth._ends) <= 2 * GREW_MAX


def test_a_sink_tells_the_age_of_the_last_batch_on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, streams = Alone(), SimpleNamespace()
    keeper = SnapshotKeeper(alone.replica, streams, keep_snapshot=True)  # type: ignore[arg-type]
    now = [100.0]
    monkeypatch.setattr("lrq_ha.sidecar.sites.snapshot_keeper.time.monotonic", lambda: now[0])
    assert keeper._age_s("LRQ_Recv_orders_east") is None
    keeper.batch_written("LRQ_Recv_orders_east")
    now[0] = 103.46
    assert (keeper._age_s("LRQ_Recv_orders_east"), keeper._age_s("LRQ_Recv_bills_east")) == (3.5, None)
