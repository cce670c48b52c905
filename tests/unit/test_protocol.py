"""The table of methods: complete, shown to be true by tests that exist, and what docs/protocol.md says.

`python tests/unit/test_protocol.py` writes the tables in docs/protocol.md anew.
"""

from __future__ import annotations

from typing import cast

import pytest
from named_tests import TESTS, defined
from pamqp import base, commands

from broker_plugin.door.method_table import BROKER, CLIENT, BrokerRow, ClientRow, name_of

DOC = TESTS.parent / "docs" / "protocol.md"
MARK = "<!-- made by tests/unit/test_protocol.py -->\n"
# Which side sends a method stands in the specification, not in pamqp: these either may send.
BOTH = {"connection.close", "connection.close-ok", "channel.close", "channel.close-ok", "channel.flow", "channel.flow-ok", "basic.ack", "basic.nack",
        "basic.cancel"}  # fmt: skip


#: Features that are no methods: (feature, what the door does, file and test).
FEATURES = (
    ("acks of several, `multiple`", "Passed on for the messages that the client was given.", "door_protocol.acks_of_several"),
    ("alternate exchanges", "Passed on; messages that they route to a queue are in the log.", "door_protocol.alternate_exchange"),
    ("auto-delete queues", "Local to this node, except with `x-lrq-replicate`.", "door_protocol.queue_deleted_with_its_last_consumer"),
    ("bodies: empty, of one frame, of many", "Passed on unchanged.", "door_protocol.bodies_of_every_size"),
    ("bodies up to the broker's limit", "Passed on, up to `door.message_bytes_max`.", "door_protocol.test_messages_up_to_the_brokers_limit"),
    ("`CC` and `BCC` headers", "Passed on; a backup routes by them as the primary did.", "door_protocol.carbon_copies"),
    ("thousands of channels", "One fewer than the broker accepts.", "door_protocol.test_two_thousand_channels"),
    ("confirms, single and `multiple`", "Sent when all in-sync nodes have the message.", "door.test_pipelined_confirms_answer_each_publish_once"),
    ("consumer cancel notification", "Passed on.", "door_protocol.consumer_whose_queue_is_deleted"),
    ("consumer priorities, `x-priority`", "Passed on.", "door_protocol.consumers_with_priorities"),
    ("consumers, exclusive", "Passed on.", "door_protocol.consumer_that_is_exclusive"),
    ("consumers without acks", "With acks at the broker; the door acks.", "door_protocol.consumer_without_acks"),
    ("consumers without a tag", "The door makes a tag like the broker's.", "door_protocol.consumer_with_a_tag_of_the_servers"),
    ("dead letters", "Made by the broker, on a backup as on the primary.", "door_protocol.rejected_to_a_dead_letter_queue"),
    ("direct reply-to", "Passed on unchanged, not replicated.", "door_protocol.direct_reply_to"),
    ("exchange-to-exchange bindings", "Replicated.", "door_protocol.exchange_bound_to_an_exchange"),
    ("exclusive and server-named queues", "Passed on; local to this node, deleted with their connection.", "door_protocol.queue_of_one_connection"),
    ("negotiated frame sizes", "Each side has its own; larger frames are split.", "door.test_a_client_with_small_frames_gets_small_frames"),
    ("headers as large as a frame", "Passed on, up to `door.header_bytes_max`.", "door_protocol.headers_as_large_as_a_frame"),
    ("heartbeats", "One between client and door, another between door and broker.", "door.test_idle_connections_with_heartbeats_stay_open"),
    ("`immediate`", "Refused by the broker.", "door_protocol.immediate_publishes_are_refused"),
    ("`mandatory`", "The return comes before the confirm.", "door_protocol.mandatory_publishes_come_back"),
    ("nacks of the broker (`reject-publish`)", "Passed on; the refused message is no longer live in the log.", "door_protocol.a_full_queue_refuses"),
    ("`no-wait`: declarations", "The broker answers the door; the client gets no answer.", "door_protocol.declarations_without_a_wait"),
    ("`no-wait`: consumers", "The broker answers the door; the client gets no answer.", "door_protocol.consumer_without_a_wait"),
    ("`no-wait`: confirms", "The broker answers the door; the client gets no answer.", "door_protocol.confirms_selected_without_a_wait"),
    ("prefetch of a channel", "Passed on.", "door_protocol.qos_of_a_channel"),
    ("prefetch of a consumer", "Passed on.", "door_protocol.qos_per_consumer"),
    ("properties, all of them", "Passed on; `x-lrq-pos` is added.", "door_protocol.every_property"),
    ("single active consumer", "Passed on.", "door_protocol.single_active_consumer"),
    ("streams: `nack`, `reject`", "Passed on.", "door_protocol.stream_whose_messages_are_given_back"),
    ("streams: consumers without acks", "Refused by the broker, as without a door.", "door_protocol.stream_without_acks"),
    ("streams: where a consumer begins", "Passed on.", "door_protocol.stream_from_each_offset"),
    ("`user-id`", "The broker checks it before the publish enters the log.", "door_protocol.user_id_of_another"),
)


def tables() -> str:
    """The generated part of docs/protocol.md."""
    lines = []
    for title, rows in (("From clients", CLIENT), ("From the broker", BROKER)):
        lines += [f"\n## {title}\n", "| method | the door | shown by |", "|---|---|---|"]
        for row in rows:
            file, test = row.tests.split(".")
            lines.append(f"| `{name_of(row.method)}` | {row.does} | `{test}` in [test_{file}.py](../tests/integration/test_{file}.py) |")
    lines += ["\n## Other features\n", "| feature | the door | shown by |", "|---|---|---|"]
    for what, does, test in FEATURES:
        file, name = test.split(".")
        lines.append(f"| {what} | {does} | `{name}` in [test_{file}.py](../tests/integration/test_{file}.py) |")
    return "\n".join(lines) + "\n"


#: Of class 30, which is in RabbitMQ's own specification of AMQP 0-9-1, and not in pamqp's.
ACCESS = {30 << 16 | 10, 30 << 16 | 11}


def test_every_method_of_rabbitmqs_specification_has_a_row() -> None:
    named = [row.method for row in CLIENT], [row.method for row in BROKER]
    assert {*named[0], *named[1]} == set(commands.INDEX_MAPPING) | ACCESS
    for side in named:
        assert len(side) == len(set(side))
    assert {name_of(method) for method in named[0] if method in named[1]} == BOTH


def test_what_is_answered_is_sent_by_one_side_and_answered_by_the_other() -> None:
    sides = {row.method for row in CLIENT}, {row.method for row in BROKER}
    for method, kind in cast("dict[int, type[base.Frame]]", commands.INDEX_MAPPING).items():
        if method == commands.Basic.Cancel.index:
            continue  # a broker's is not answered
        for answer in kind.valid_responses:
            index = getattr(getattr(commands, answer.split(".")[0]), answer.split(".")[1]).index
            for here, there in (sides, sides[::-1]):
                assert method not in here or index in there, name_of(method)


@pytest.mark.parametrize("row", [*CLIENT, *BROKER], ids=lambda row: f"{type(row).__name__}-{name_of(row.method)}")
def test_every_row_names_a_test_that_exists(row: ClientRow | BrokerRow) -> None:
    file, test = row.tests.split(".")
    assert test in defined(TESTS / "integration" / f"test_{file}.py")


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: str(feature[0]))
def test_every_feature_names_a_test_that_exists(feature: tuple[str, str, str]) -> None:
    file, test = feature[2].split(".")
    assert test in defined(TESTS / "integration" / f"test_{file}.py")


def test_documented_tables_are_up_to_date() -> None:
    assert DOC.read_text("utf-8").partition(MARK)[2] == tables(), "run: python tests/unit/test_protocol.py"


if __name__ == "__main__":
    DOC.write_text(DOC.read_text("utf-8").partition(MARK)[0] + MARK + tables(), "utf-8")
