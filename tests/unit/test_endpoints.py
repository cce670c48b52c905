"""What the door makes of publishes that end there: entries of the log, or a refusal, and what the client hears."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pamqp import commands
from test_publishing import Connection

from broker_plugin import building, frames, headers
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import LogEntries, client_status
from lrq_ha.routing.names import SEND_LOG_ENTRIES, STATUS

CONNECTION_FORCED, PRECONDITION_FAILED = 320, 406


class Client(Connection):
    """A producer in vhost lrq. What it is told is taken note of."""

    def __init__(self) -> None:
        super().__init__("app.lrq", "lrq")
        self._number = 0
        self.client.data = b""

    def publish(self, queue: str, body: bytes) -> Any:
        """The method that ends its channel; None if none does."""
        self._number += 1
        header = headers.header_payload(len(body), headers.properties(headers.field(b"x-lrq-id", b"app.lrq/%d" % self._number), True))
        self.relay.client_data(building.publish_method(1, "", queue) + b"".join(building.content(1, header, body, 1 << 20)))
        self.replica.flush()
        methods = [frames.decode_method(self.client.data[item[2] : item[3]]) for item in frames.scan(self.client.data, 0, 1 << 20, 0)[0]]
        return next((each for each in methods if isinstance(each, commands.Channel.Close)), None)

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
