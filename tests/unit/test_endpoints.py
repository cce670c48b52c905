"""What the door makes of publishes that end there: entries of the log, or a refusal, and what the client hears."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from pamqp import commands
from test_publishing import Connection

from broker_plugin.amqp import content_header, encode, frames, reply_codes
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import LogEntries, client_status, full_sync_status
from lrq_ha.routing import statuses
from lrq_ha.routing.names import COMMIT, SEND_LOG_ENTRIES, STATUS, position_question, recv_queue

CONNECTION_FORCED, PRECONDITION_FAILED = 320, 406
REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


class Client(Connection):
    """A producer in vhost lrq. What it is told is taken note of."""

    def __init__(self) -> None:
        super().__init__("app.lrq", "lrq")
        self._number = 0

    def publish(self, queue: str, body: bytes) -> Any:
        """The method that ends its channel; None if none does."""
        self._number += 1
        fields = content_header.field(b"x-lrq-id", b"app.lrq/%d" % self._number)
        header = content_header.header_payload(len(body), content_header.properties(fields, True))
        self.relay.client_data(encode.publish_method(1, "", queue) + b"".join(encode.content(1, header, body, 1 << 20)))
        self.replica.flush()
        refusal = self.relay.channels[1].refusal
        return frames.decode_method(refusal[7:-1]) if refusal else None

    def announce(self, client_name: str) -> Any:
        return self.publish(STATUS, client_status(client_name, True))

    def say(self, request_id: str, state: pb.FullSyncRequest.State, destination: str = "west") -> Any:
        return self.publish(STATUS, full_sync_status("orders", destination, request_id, "test", state))

    def logged(self) -> list[tuple[str, pb.FullSyncRequest.State]]:
        found = [pb.Status.FromString(run.status.body).full_sync for run in self.runs]
        return [(each.request_id, each.state) for each in found]

    def heard(self) -> list[Any]:
        """The methods that it has got since it was last asked."""
        data, self.client.data = self.client.data, b""
        return [frames.decode_method(data[item[2] : item[3]]) for item in frames.scan(data)[0] if data[item[2] - 7] == frames.METHOD]

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


def test_a_transaction_goes_to_the_sites_that_it_has_not_passed() -> None:
    """One site in its path kept it from all others."""

    async def scenario() -> None:
        client = Client()
        client.relay.door.sites = frozenset({"west", "south"})

        def forward(*to: str) -> None:
            entries = LogEntries.checked([(b"both", to), (b"west only", ["west"])], ["west", "north"])
            assert client.publish(SEND_LOG_ENTRIES, entries.to_bytes("orders", "", 0)) is None

        forward("west", "south")
        assert client.heard() == [], "it is not returned"
        [logged] = [pb.Transaction.FromString(run.transmission.body) for run in client.runs]
        assert [(logged.payloads[entry.payload], list(entry.destinations)) for entry in logged.entries] == [(b"both", ["south"])]
        assert list(logged.path) == ["west", "north"]
        assert b"west only" not in client.runs[0].transmission.body
        forward("north", "south")  # the way goes on from here to the south only
        assert client.heard() == []
        assert len(client.runs) == 2
        forward("west")
        (returned,) = client.heard()
        assert (returned.name, returned.reply_code) == ("Basic.Return", reply_codes.NO_ROUTE)
        assert returned.reply_text == "destination 'west' has had this transaction already, which has come by west > north > east"
        assert len(client.runs) == 2
        assert client.publish(SEND_LOG_ENTRIES, LogEntries.checked([(b"x", ["west", "wets"])], ["west"]).to_bytes("orders", "", 0)) is None
        assert client.heard()[0].reply_text == "destination 'wets' is not known to group 'east'; known: south, west"

    asyncio.run(scenario())


def test_a_position_is_told_to_its_user_only() -> None:
    """Any user of the vhost could read how far a receiver had come, and its token."""

    async def scenario() -> None:
        client = Client()
        queue = recv_queue("orders", "north")
        for entry, user in enumerate(("app", "other"), 1):
            client.replica.index.commits.noted(entry, pb.Commit(receiver=f"of-{user}", queue=queue, value="v", token="t", user=user))
        client.replica.index.commits.safe(2)

        def get(receiver: str) -> list[Any]:
            method = commands.Basic.Get(0, position_question(receiver, queue), True)
            client.relay.client_data(encode.method_frame(1, method))
            return client.heard()

        assert [method.name for method in get("of-app")] == ["Basic.GetOk"]
        assert [method.name for method in get("of-none")] == ["Basic.GetOk"], "there is none"
        get("of-other")
        close: Any = frames.decode_method(client.relay.channels[1].refusal[7:-1])
        assert (close.reply_code, close.reply_text) == (
            reply_codes.ACCESS_REFUSED,
            "ACCESS_REFUSED - the positions of receiver 'of-other' belong to another user",
        )

    asyncio.run(scenario())


def test_a_commit_of_a_queue_that_is_not_known_is_refused() -> None:
    async def scenario() -> None:
        for body, said in (
            (pb.Commit(receiver="db", queue=recv_queue("orders", "north"), token="t"), "no batch has come for 'LRQ_Recv_orders_north'"),
            (pb.Commit(receiver="db", queue="x", token="t"), "no batch has come for 'x'"),
            (pb.Commit(receiver="db", queue="x", token="t", value="v" * 3_000), "of 2048 at most"),
        ):
            client = Client()
            refused = client.publish(COMMIT, body.SerializeToString())
            assert (refused.reply_code, said in refused.reply_text) == (PRECONDITION_FAILED, True), refused.reply_text
            assert client.runs == []

    asyncio.run(scenario())


def test_a_full_sync_of_a_site_that_is_not_known_is_returned() -> None:
    """A misspelt one was confirmed, and went nowhere; ten thousand invented ones took the place of everybody's."""

    async def scenario() -> None:
        client = Client()
        for state in (REQUESTED, COMPLETED, CANCELLED):
            assert client.say("r1", state, "wets") is None
            (returned,) = client.heard()
            assert (returned.name, returned.reply_code, returned.routing_key) == ("Basic.Return", reply_codes.NO_ROUTE, STATUS)
            assert returned.reply_text == "destination 'wets' is not known to group 'east'; known: west"
        assert client.runs == []
        client.say("r1", REQUESTED)
        assert client.logged() == [("r1", REQUESTED)]

    asyncio.run(scenario())


def test_what_was_asked_for_before_its_site_went_is_ended() -> None:
    """It came back, and the next flush of the publisher failed; the request stayed open."""

    async def scenario() -> None:
        client = Client()
        client.say("r1", REQUESTED)
        client.relay.door.sites = frozenset()
        for request_id, state in (("r2", CANCELLED), ("r1", CANCELLED), ("r1", REQUESTED)):
            client.say(request_id, state)
        assert [told.name for told in client.heard()] == ["Basic.Return", "Basic.Return"]
        assert client.logged() == [("r1", REQUESTED), ("r1", CANCELLED)]

    asyncio.run(scenario())


def test_the_door_takes_no_end_behind_a_cancellation() -> None:
    """Of a provider that had not heard of it. Who reads LRQ_Status, or begins from what is known of it, would take the full sync for a whole one."""

    async def scenario() -> None:
        client = Client()
        said = [("r1", REQUESTED), ("r1", CANCELLED), ("r1", COMPLETED), ("r2", REQUESTED), ("r1", CANCELLED), ("r2", COMPLETED)]
        for request_id, state in said:
            assert client.say(request_id, state) is None
        assert client.logged() == [said[0], said[1], said[3], said[5]]

    asyncio.run(scenario())
