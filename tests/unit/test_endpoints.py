"""What the door makes of publishes that end there: entries of the log, or a refusal, and what the client hears."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from test_publishing import Connection

from broker_plugin import building, frames, headers
from lrq_ha.publisher.messages import LogEntries, client_status
from lrq_ha.routing import statuses
from lrq_ha.routing.names import SEND_LOG_ENTRIES, STATUS

CONNECTION_FORCED, PRECONDITION_FAILED = 320, 406


class Client(Connection):
    """A producer in vhost lrq. What it is told is taken note of."""

    def __init__(self) -> None:
        super().__init__("app.lrq", "lrq")
        self._number = 0

    def publish(self, queue: str, body: bytes) -> Any:
        """The method that ends its channel; None if none does."""
        self._number += 1
        header = headers.header_payload(len(body), headers.properties(headers.field(b"x-lrq-id", b"app.lrq/%d" % self._number), True))
        self.relay.client_data(building.publish_method(1, "", queue) + b"".join(building.content(1, header, body, 1 << 20)))
        self.replica.flush()
        refusal = self.relay.channels[1].refusal
        return frames.decode_method(refusal[7:-1]) if refusal else None

    def announce(self, client_name: str) -> Any:
        return self.publish(STATUS, client_status(client_name, True))

    def transmit(self, client_name: str) -> Any:
        return self.publish(SEND_LOG_ENTRIES, LogEntries.checked([(b"x", ["west"])]).to_bytes(client_name, "", 0))


def test_a_node_that_has_just_stepped_down_refuses_no_message_for_good() -> None:
    """Its publisher took it for a fault of the message, and gave that up."""

    async def scenario() -> None:
        client = Client()
        assert client.transmit("orders") is None
        assert [run.WhichOneof("kind") for run in client.runs] == ["transmission"]
        node, relay, ended = cast(Any, client.replica.node), cast(Any, client.relay), []
        node.serving, node.me, node.name = False, 1, lambda _: "e1"
        relay.close_client = lambda code, *_: ended.append(code)
        assert client.transmit("orders") is None
        assert ended == [CONNECTION_FORCED]

    asyncio.run(scenario())


def test_of_more_clients_than_can_be_served_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they transmitted was confirmed, and sent nowhere; after a failover it was that of others."""

    async def scenario() -> None:
        monkeypatch.setattr(statuses, "CLIENTS_MAX", 2)
        client = Client()
        for name in ("orders", "bills", "orders"):
            assert client.announce(name) is None
            assert client.transmit(name) is None
        before = len(client.runs)
        refused = client.announce("mails")
        assert refused.reply_code == PRECONDITION_FAILED
        assert "the log knows 2 clients, and 'mails' is none of them" in refused.reply_text
        again = Client()
        for name in ("orders", "bills"):
            assert again.announce(name) is None
        assert again.transmit("mails").reply_code == PRECONDITION_FAILED
        assert (len(client.runs), len(again.runs)) == (before, 2)

    asyncio.run(scenario())
