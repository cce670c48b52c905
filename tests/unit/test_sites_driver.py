"""What the sessions with other sites are told of their own log."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_config import MINIMAL
from test_completion import Alone, publishes

from broker_plugin.amqp.connection import Connection, ConnectionRefused
from broker_plugin.methods import routing_queues
from broker_plugin.session.decisions import Peer
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import client_status, full_sync_status
from lrq_ha.replication.events import OwnConfirmed
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.tables import Reason, State
from lrq_ha.sidecar.config import load
from lrq_ha.sidecar.operations.resync import FullSyncOrders
from lrq_ha.sidecar.sites.sessions import Sites


def sites_of(alone: Alone, folder: Path, more: str = "") -> Sites:
    file = folder / "node.toml"
    file.write_text(MINIMAL + more)
    streams: Any = None  # nothing is read here
    return Sites(load(file), alone.replica, streams)


def test_the_end_of_the_views_does_not_wait_for_full_queues(tmp_path: Path) -> None:
    """A message that a full queue refused held up every full sync."""

    async def go() -> None:
        alone = Alone()
        replica = alone.replica
        sites = sites_of(alone, tmp_path)
        refused = replica.append(publishes(1))
        logged = replica.append(pb.Run(transmission=pb.Transmission(queue="LRQ_Send_LogEntries")))
        replica.flush()
        assert sites.written_to().sequence == replica.progress.safe < refused, "nothing that may fall out of the log"
        alone.node.handle(OwnConfirmed(1), 0.0)
        replica.progress.safe_advanced(logged)
        assert sites.written_to().sequence == refused, "the entry behind it is not written yet"
        replica.to_apply.popleft()
        replica.applying = logged
        assert sites.written_to().sequence == refused
        replica.applying = 0
        assert sites.written_to().sequence == logged
        assert replica.progress.tracker.applied < refused

    asyncio.run(go())


def test_a_provider_may_take_as_long_for_a_row_as_is_configured(tmp_path: Path) -> None:
    async def go() -> None:
        site = '[[sites]]\nremote_id = "west"\ndoors = ["amqp://lrq:secret@127.0.0.1:1"]\n'
        sites = sites_of(Alone(), tmp_path, site + "snapshot_timeout_s = 600.0\n" + site.replace("west", "north"))
        for client in ("orders", "bills"):
            sites._add(client)
        waits = {of.remote_id: {driver.session.limits.snapshot_timeout_s for driver in of.drivers.values()} for of in sites._sites}
        assert waits == {"west": {600.0}, "north": {60.0}}

    asyncio.run(go())


def test_what_costs_a_site_data_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        sites = sites_of(Alone(), tmp_path, '[[sites]]\nremote_id = "west"\ndoors = ["amqp://lrq:secret@127.0.0.1:1"]\n')
        sites._add("orders")
        for reason in (Reason.SNAPSHOT_SENT, Reason.SNAPSHOT_UNSUPPLIED, Reason.SNAPSHOT_TRIMMED_AGAIN):
            sites._sites[0].drivers["orders"]._carry_out(m.Report(State.IN_SNAPSHOT_SYNC, reason))

    with caplog.at_level(logging.INFO, "lrq_ha.sites"):
        asyncio.run(go())
    assert [record.levelname for record in caplog.records if "in_snapshot_sync" in record.message] == ["INFO", "WARNING", "ERROR"]


def _logged(alone: Alone, *statuses: bytes) -> list[int]:
    """They stand in the log, and are safe."""
    sequences = [alone.replica.append(pb.Run(status=pb.StatusEntry(body=body)), 1, len(body)) for body in statuses]
    alone.replica.flush()
    alone.replica.index.safe(sequences[-1])
    return sequences


def test_a_session_that_begins_is_told_of_its_client_and_its_full_sync(tmp_path: Path) -> None:
    async def go() -> None:
        alone = Alone()
        logged = _logged(
            alone,
            client_status("orders", True),
            full_sync_status("orders", "west", "r1", "", pb.FullSyncRequest.REQUESTED),
            full_sync_status("orders", "north", "r2", "", pb.FullSyncRequest.REQUESTED),
            full_sync_status("bills", "west", "r3", "", pb.FullSyncRequest.REQUESTED),
            full_sync_status("orders", "west", "r1", "", pb.FullSyncRequest.COMPLETED),
        )
        sites = sites_of(alone, tmp_path, TWO_DOORS)
        sites._add("orders")
        session = sites._sites[0].drivers["orders"].session
        assert session.provider is True
        marks = [(mark.position, mark.request_id, mark.state) for mark in session._requests._marks]
        assert marks == [(sites.at(logged[1]), "r1", pb.FullSyncRequest.REQUESTED), (sites.at(logged[4]), "r1", pb.FullSyncRequest.COMPLETED)]

    asyncio.run(go())


def test_a_session_that_begins_does_not_go_through_all_that_is_known(tmp_path: Path) -> None:
    """A thousand clients and ten sites held everything else up for most of a minute, just after a promotion."""

    async def calls(clients: int) -> int:
        alone = Alone()
        names = [f"client-{number}" for number in range(clients)]
        _logged(alone, *(client_status(name, True) for name in names))
        sites = sites_of(alone, tmp_path, TWO_DOORS)
        for status in alone.replica.index.statuses.since(0):
            sites.status_entry(sites.log_end(), status.status)
        found = 0

        def count(_frame: object, event: str, _what: object) -> None:
            nonlocal found
            found += event == "call"

        sys.setprofile(count)
        try:
            sites._add(names[0])
        finally:
            sys.setprofile(None)
        return found

    assert asyncio.run(calls(300)) < asyncio.run(calls(1)) + 100


def test_an_operators_demand_at_a_source_is_written_or_refused(tmp_path: Path) -> None:
    async def go() -> None:
        alone = Alone()
        sites = sites_of(alone, tmp_path, TWO_DOORS)
        orders = FullSyncOrders("e1", alone.replica, sites)

        def demand(client: str = "orders", *to: str, reason: str = "", dry_run: bool = False) -> str:
            done, said = orders.resync(client, list(to or ["west"]), False, None, reason, dry_run)
            assert done
            return said

        def announce(client: str, provider: bool) -> None:
            body = client_status(client, provider)
            [sequence] = _logged(alone, body)
            sites.status_entry(sites.at(sequence), pb.Status.FromString(body))

        announce("orders", True)
        with pytest.raises(LrqError, match="have not begun yet") as refused:
            demand()
        assert refused.value.retriable
        sites._serving = True
        with pytest.raises(LrqError, match="have not begun yet"):
            demand()  # a new primary adds the sessions of its clients one by one
        sites._add("orders")
        with pytest.raises(LrqError, match="no client 'bills' has announced itself"):
            demand("bills")
        announce("bills", False)
        for dry_run in (True, False):
            with pytest.raises(LrqError, match="client 'bills' has no full sync provider") as refused:
                demand("bills", dry_run=dry_run)
            assert "Start it with on_full_sync" in str(refused.value)
        end = alone.replica.end
        assert "would ask" in demand(dry_run=True)
        assert alone.replica.end == end
        assert "a site that is away gets it later" in demand(reason="rows were lost")
        alone.replica.flush()
        alone.replica.index.safe(alone.replica.end)
        [(sequence, status)] = alone.replica.index.statuses.since(end)
        request = status.full_sync
        assert (request.client_name, request.destination, request.state) == ("orders", "west", pb.FullSyncRequest.REQUESTED)
        written = [pb.Status.FromString(run.status.body).full_sync.reason for run in alone.runs if run.HasField("status")]
        assert written[-1] == "an operator demands a full sync: rows were lost"
        sites.status_entry(sites.at(sequence), status)
        demand()
        assert alone.replica.end == sequence, "the site gets that one when it is there"

    asyncio.run(go())


def test_a_snapshot_that_never_comes_through_is_an_error_in_the_log_and_a_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> str:
        sites = sites_of(Alone(), tmp_path, TWO_DOORS)
        sites._add("orders")
        driver = sites._sites[0].drivers["orders"]
        driver._carry_out(m.Report(State.IN_SNAPSHOT_SYNC, Reason.SNAPSHOT_TRIMMED_AGAIN))
        assert driver.status()["problem"] == ""
        driver.session._snapshots_trimmed = 2
        return str(driver.status()["problem"])

    assert "log_bytes_max" in asyncio.run(go())
    assert [(record.levelname, "log_bytes_max" in record.getMessage()) for record in caplog.records] == [("ERROR", True)]


def test_what_a_sink_answers_is_what_its_source_reads(tmp_path: Path) -> None:
    async def go() -> None:
        alone = Alone()
        [site] = (sites := sites_of(alone, tmp_path, TWO_DOORS))._sites
        sites._add("orders")
        driver, sink, epoch = site.drivers["orders"], alone.replica.index.sink, alone.node.log.epoch_at(1)
        relay: Any = SimpleNamespace(peer=Peer(site="east"), replica=alone.replica)
        queue, previous = "LRQ_Recv_orders_east", pb.Position()
        assert driver._report(routing_queues.answer(relay, f"LRQ_Sink_{queue}")[0]) == m.SinkReport(Position(0, 0), "", False)  # type: ignore[index]
        rows, end = pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY
        steps = ((rows, "r/1", False, True), (end, "r/1", True, False), (rows, "s", False, False))
        for sequence, (kind, request, complete, bare) in enumerate(steps, 1):
            at = pb.Position(epoch=epoch, sequence=sequence)
            transaction = pb.ReceivedTransaction(position=at, type=kind, request_id=request)
            sink.noted(sequence, queue, pb.ReceivedBatch(source="east", client_name="orders", previous=previous, transactions=[transaction]))
            sink.safe(sequence)
            told = driver._report(routing_queues.answer(relay, f"LRQ_Sink_{queue}")[0])  # type: ignore[index]
            assert (told.last.sequence, told.snapshot_request, told.snapshot_complete, told.bare) == (sequence, request, complete, bare)
            previous = at

    asyncio.run(go())


TWO_DOORS = '[[sites]]\nremote_id = "west"\ndoors = ["amqp://lrq:secret@127.0.0.1:1", "amqp://lrq:secret@127.0.0.1:2"]\n'


async def _tries(site: Any, count: Callable[[], int], upto: int) -> None:
    task = asyncio.create_task(site.run("east"))
    async with asyncio.timeout(60):
        while count() < upto:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_doors_that_stay_shut_are_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With two of them each was told of again at each try."""
    tried: list[object] = []

    async def refuse(address: object, **_: object) -> None:
        tried.append(address)
        raise ConnectionRefused(f"{address} cannot be reached")

    async def go() -> None:
        [site] = sites_of(Alone(), tmp_path, TWO_DOORS)._sites
        await _tries(site, lambda: len(tried), 6)

    monkeypatch.setattr(Connection, "open", refuse)
    with caplog.at_level(logging.INFO, "lrq_ha.sites"):
        asyncio.run(go())
    assert [f"127.0.0.1:{number}" in record.getMessage() for number, record in enumerate(caplog.records, 1)] == [True, True]


def test_a_door_that_is_left_is_not_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Link:
        error: object = None

        def __init__(self, on_close: Callable[[object], None]) -> None:
            self._on_close = on_close

        async def channel(self) -> None:
            raise ConnectionRefused("the door takes no channel")

        def abort(self) -> None:
            if self.error is None:
                self.error = "aborted"
                self._on_close(None)

    async def go() -> None:
        sites = sites_of(Alone(), tmp_path, TWO_DOORS)
        [site] = sites._sites
        sites._add("orders")

        async def connect(address: Any, *, on_close: Callable[[object], None], **_: object) -> Link:
            tried.append(address.port)
            asyncio.get_running_loop().call_later(0.01, site.drivers["orders"]._carry_out, m.LeaveDoor())
            return Link(on_close)

        monkeypatch.setattr(Connection, "open", connect)
        await _tries(site, lambda: len(tried), 4)

    asyncio.run(go())
    assert tried == [1, 2, 1, 2]
