"""What a sidecar tells over HTTP of queues that it does not know all of yet."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from node_config import MINIMAL
from test_completion import Alone

from lrq_ha.lab.ports import free_ports
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.events import RemoveRequest
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.config import load
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


@pytest.mark.parametrize("role", Role)
def test_a_node_whose_log_lacks_something_names_no_part_of_the_receive_queues(role: Role) -> None:
    async def go() -> None:
        alone = Alone()
        entry = pb.ReceivedTransaction(position=pb.Position(epoch=257, sequence=1))
        batch = pb.ReceivedBatch(client_name="orders", source="west", transactions=[entry])
        alone.replica.index.sink.noted(1, QUEUE, batch)
        told: Any = SimpleNamespace(_node=SimpleNamespace(role=role), _replica=alone.replica)
        if role in (Role.READY, Role.RECOVERING, Role.ACTIVE):
            assert Status.queues(told) == [QUEUE]
        else:
            with pytest.raises(LrqError, match=f"its role is {role.value}"):
                Status.queues(told)

    asyncio.run(go())
