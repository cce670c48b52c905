"""What a sidecar tells over HTTP of queues that it does not know all of yet."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from node_config import MINIMAL
from test_completion import Alone

from lrq_ha.errors import LrqError
from lrq_ha.lab.ports import free_ports
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import RemoveRequest
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.config import load
from lrq_ha.sidecar.incarnation import Kept
from lrq_ha.sidecar.node.recovery import _LogReading
from lrq_ha.sidecar.process import Process
from lrq_ha.sidecar.status import Status

TIMEOUT_S = 60.0
QUEUE = "LRQ_Recv_orders_west"


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read()


@pytest.mark.parametrize("path", ["/queues", "/levels"])
def test_a_sidecar_that_starts_does_not_say_that_there_are_no_queues(tmp_path: Path, path: str) -> None:
    """A Spark job read nothing, without an error."""

    async def go() -> None:
        port = next(free_ports())
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL.replace("8080", str(port)))
        process = Process(load(file))
        await process._http.start()

        async def asked() -> tuple[int, bytes]:
            return await asyncio.to_thread(_get, f"http://127.0.0.1:{port}{path}")

        try:
            assert (await asked())[0] == 503
            rebuilt: Any = SimpleNamespace(ready=False, status=SimpleNamespace(queues=lambda: [QUEUE], levels=lambda: [QUEUE]))
            process.incarnation = rebuilt
            assert (await asked())[0] == 503
            rebuilt.ready = True
            assert await asked() == (200, b'["LRQ_Recv_orders_west"]')
        finally:
            await process._http.close()

    asyncio.run(go())


def test_a_node_that_does_not_run_says_that_it_is_paused(tmp_path: Path) -> None:
    """Its next incarnation is, and `list` did not show it."""

    class Paused:
        ready, kept = False, Kept(paused=True)

        def __init__(self, _config: object, _door: object, before: Kept, _coordination: object) -> None:
            began.append(before.paused)

        async def run(self) -> str:
            raise LrqError("the broker cannot be reached")

    began: list[bool] = []

    async def go() -> None:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL)
        process = Process(load(file))
        assert process.status()["paused"] is False
        lives = asyncio.create_task(process._lives())
        async with asyncio.timeout(TIMEOUT_S):
            while len(began) < 2:
                await asyncio.sleep(0.01)
        status = process.status()
        lives.cancel()
        assert (began[:2], status["role"], status["paused"]) == ([False, True], "standalone", True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrq_ha.sidecar.process.Incarnation", Paused)
        asyncio.run(go())


def test_a_node_that_does_not_run_says_since_when(tmp_path: Path) -> None:
    """Who promotes another node compares with it; each try to start again is no new beginning."""

    class Ends:
        ready, kept = False, Kept()

        def __init__(self, *_: object) -> None:
            began.append(time.time())

        async def run(self) -> str:
            if len(began) == 1:
                await asyncio.sleep(0.01)
                return "the connection to the broker is lost"
            raise LrqError("the broker cannot be reached")

    began: list[float] = []

    async def go() -> None:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL)
        made = time.time()
        process = Process(load(file))
        assert made <= process.status()["since"] <= time.time()
        lives = asyncio.create_task(process._lives())
        async with asyncio.timeout(TIMEOUT_S):
            while len(began) < 3:
                await asyncio.sleep(0.01)
        lives.cancel()
        assert began[0] + 0.01 <= process.status()["since"] <= began[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrq_ha.sidecar.process.Incarnation", Ends)
        asyncio.run(go())


def test_a_node_that_cannot_be_rebuilt_says_what_to_do(tmp_path: Path) -> None:
    """`lrq-ha reinit` too, which cannot help: it said to delete what nobody can name."""
    replica: Any = SimpleNamespace(node=None, progress=SimpleNamespace(tracker=SimpleNamespace(applied=4)))
    nothing: Any = None
    reading = _LogReading(replica, nothing, nothing, nothing, None)
    reading._skipped_upto = 9
    with pytest.raises(LrqError, match="no longer reaches back to entry 5, ") as caught:
        reading.ended()

    async def go() -> str:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL)
        process = Process(load(file))
        process.problem = str(caught.value)
        with pytest.raises(LrqError) as refused:
            await process.reinit(False, True)
        return str(refused.value)

    pages = Path(__file__).parents[2] / "docs" / "operations"
    for said in (str(caught.value), asyncio.run(go())):
        section = re.search(r"operations(?:/(\w+))?\.md, '(.+)'\)", said)
        assert section, said
        assert f"\n## {section[2]}\n" in (pages / f"{section[1] or 'members'}.md").read_text("utf-8")


@pytest.mark.parametrize(("node", "number"), [("e1", 1), ("7", 1), ("node 3", 3), ("3", 3), ("node e3", 0), ("node 3000", 0), ("0", 0)])
def test_a_node_that_is_not_configured_any_more_is_removed_by_its_id(tmp_path: Path, node: str, number: int) -> None:
    """It had no name that an order could have, and was waited for for ever in mode strict."""
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL)
    process = Process(load(file))
    process._ids["7"] = 1  # a name, too
    asked: list[RemoveRequest] = []

    async def ask(request: RemoveRequest) -> tuple[bool, str]:
        asked.append(request)
        return True, ""

    process.incarnation = cast(Any, SimpleNamespace(ready=True, orders=SimpleNamespace(ask=ask)))
    if number:
        asyncio.run(process.remove(node, True))
        assert asked == [RemoveRequest(number, True)]
    else:
        with pytest.raises(LrqError, match=f"{node}: no such node in group east; known: 7, e1"):
            asyncio.run(process.remove(node, True))


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("role", Role)
def test_a_node_whose_log_lacks_something_names_no_part_of_the_receive_queues(role: Role, hears: bool) -> None:
    """Nor does a backup that hears no primary: it stays ready to be promoted, and may have been taken out of the set since."""

    async def go() -> None:
        alone = Alone()
        entry = pb.ReceivedTransaction(position=pb.Position(epoch=257, sequence=1))
        batch = pb.ReceivedBatch(client_name="orders", source="west", transactions=[entry])
        alone.replica.index.sink.noted(1, QUEUE, batch)
        told: Any = SimpleNamespace(_node=SimpleNamespace(role=role, primary=lambda: int(hears)), _replica=alone.replica)
        if role in (Role.RECOVERING, Role.ACTIVE) or (role is Role.READY and hears):
            assert Status.queues(told) == [QUEUE]
        else:
            with pytest.raises(LrqError, match=f"its role is {role.value}"):
                Status.queues(told)

    asyncio.run(go())


def test_a_node_whose_broker_is_down_tries_again(tmp_path: Path) -> None:
    """What an incarnation leaves to the next one is asked for also where it has not come to its streams."""

    async def go() -> None:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL.replace("127.0.0.1:5672", "127.0.0.1:1"))
        process = Process(load(file))
        lives = asyncio.create_task(process._lives())
        async with asyncio.timeout(TIMEOUT_S):
            while "cannot be reached" not in process.problem:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not lives.done(), lives.exception()
        lives.cancel()

    asyncio.run(go())
