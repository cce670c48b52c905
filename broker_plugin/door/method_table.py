"""Every method of AMQP 0-9-1 and of RabbitMQ's extensions, from either side: the door's treatment of it, and the test that shows it.

The session dispatches from these tables, and the tables of docs/protocol.md are made from them.

Rules:
- A method without a handler is passed on as it came, or is handled elsewhere: those of the login in `client_login`, and in the session's two loops
  the hot ones, basic.publish, basic.ack, basic.deliver, basic.nack and the pieces of a content.
- `tests` are functions in tests/integration: `door_protocol.recover` is `recover` in test_door_protocol.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pamqp import commands

from ..amqp import frames
from ..amqp.frames import Item
from ..methods import acknowledge, consume, declare, declare_rules, deliver, lifecycle, publisher_confirms, transactions
from ..session.channel import ClientChannel
from ..session.session import ClientSession

FromClient = Callable[["ClientSession", ClientChannel, int, bytes], None]
"""Handles a method of the client: its id and payload."""
FromBroker = Callable[["ClientSession", int, bytes, Item], bytes | None]
"""Handles a method of the broker. Returns the client's frames instead; None: the item as it came."""

PASSED = "Passed on."
BLOCKED = "Passed on. Clients that publish also get it while the broker accepts nothing for the log."
LOGIN = "Passed on; the broker judges the login."
DECLARED = "Enters the log between two barriers, then answered. Passed on if it is local to this node or already in the log."
BOUND = f"{DECLARED} Refused if more than {declare_rules.REPEATED_EXCHANGES_MAX} auto-delete exchanges lead to the binding."
ANSWER = "Passed on; for a replicated declaration when its entry is safe."


@dataclass(frozen=True)
class ClientRow:
    """A method that a client may send."""

    method: int
    does: str
    tests: str
    handler: FromClient | None = None


@dataclass(frozen=True)
class BrokerRow:
    """A method that a broker may send."""

    method: int
    does: str
    tests: str
    handler: FromBroker | None = None


CLIENT = (
    ClientRow(
        frames.CONNECTION_START_OK,
        f"{LOGIN} Mechanisms: PLAIN and AMQPLAIN, because the door must know the user; EXTERNAL if the door maps the certificate to a user.",
        "door_logins.test_a_wrong_password_in_pikas_words",
    ),
    ClientRow(frames.CONNECTION_SECURE_OK, "Refused: the door sends no challenge.", "door_logins.test_what_was_not_asked_has_no_place_in_a_login"),
    ClientRow(
        frames.CONNECTION_TUNE_OK,
        "Passed on; its frame_max and heartbeat also apply to the door.",
        "door.test_silence_with_heartbeats_is_death",
    ),
    ClientRow(
        frames.CONNECTION_OPEN,
        "Passed on if this node serves clients. A backup refuses it and names the primary.",
        "door_logins.test_a_backups_door_names_the_primary",
    ),
    ClientRow(
        frames.CONNECTION_CLOSE,
        "Passed on when the broker has answered all publishes.",
        "door.test_publishes_without_confirms_then_an_orderly_close",
        lifecycle.connection_close,
    ),
    ClientRow(
        frames.CONNECTION_CLOSE_OK,
        "Ends a connection that the broker or the door closed.",
        "stop.test_sigterm_in_the_middle_of_a_stream",
        lifecycle.connection_close_ok,
    ),
    ClientRow(
        frames.CONNECTION_UPDATE_SECRET,
        "Passed on; the door forgets what the client may publish and asks the broker again.",
        "door_protocol.secret_updated",
        lifecycle.update_secret,
    ),
    ClientRow(frames.CHANNEL_OPEN, PASSED, "door_protocol.publish_on_a_channel_that_is_not_open", lifecycle.channel_open),
    ClientRow(frames.CHANNEL_FLOW, PASSED, "door_protocol.channel_flow"),
    ClientRow(frames.CHANNEL_FLOW_OK, "Passed on; RabbitMQ never asks.", "door_protocol.flow_ok_that_nobody_has_asked_for"),
    ClientRow(
        frames.CHANNEL_CLOSE,
        "Passed on when the broker has answered all publishes of the channel.",
        "door_protocol.channel_reuse",
        lifecycle.channel_close,
    ),
    ClientRow(
        frames.CHANNEL_CLOSE_OK,
        "Passed on if the broker closed the channel; handled by the door if the door closed it.",
        "door.test_after_a_404_in_a_pipeline_the_number_is_as_new",
        lifecycle.channel_close_ok,
    ),
    ClientRow(frames.ACCESS_REQUEST, PASSED, "door_protocol.access_requested"),
    ClientRow(
        frames.EXCHANGE_DECLARE,
        f"{DECLARED} An auto-delete exchange with bindings to it in the log may be gone, so each declaration takes this way. "
        "Types that route at random or delay messages are refused.",
        "door_topology.test_exchanges_and_bindings_are_on_both_nodes",
        declare.declare,
    ),
    ClientRow(frames.EXCHANGE_DELETE, DECLARED, "door_protocol.exchange_bound_to_an_exchange", declare.declare),
    ClientRow(frames.EXCHANGE_BIND, BOUND, "door_protocol.exchange_bound_to_an_exchange", declare.declare),
    ClientRow(frames.EXCHANGE_UNBIND, DECLARED, "door_protocol.exchange_bound_to_an_exchange", declare.declare),
    ClientRow(
        frames.QUEUE_DECLARE,
        f"{DECLARED} Exclusive, server-named and auto-delete queues are local to this node, except auto-delete with `x-lrq-replicate`. "
        "`reject-publish-dlx` and unknown levels are refused.",
        "door_protocol.queue_redeclared",
        declare.declare,
    ),
    ClientRow(frames.QUEUE_BIND, BOUND, "door_protocol.alternate_exchange", declare.declare),
    ClientRow(
        frames.QUEUE_PURGE,
        f"{DECLARED} The entry names the messages that clients hold; a purge does not take them.",
        "door_protocol.queues_deleted_and_purged",
        declare.declare,
    ),
    ClientRow(frames.QUEUE_DELETE, DECLARED, "door_protocol.queues_deleted_and_purged", declare.declare),
    ClientRow(frames.QUEUE_UNBIND, DECLARED, "door_protocol.exchange_deleted_with_its_last_binding", declare.declare),
    ClientRow(frames.BASIC_QOS, PASSED, "door_protocol.qos_per_consumer", consume.qos),
    ClientRow(
        frames.BASIC_CONSUME,
        "Passed on. A consumer without acks on a replicated queue becomes one with acks; the door acks.",
        "door_protocol.consumer_without_acks",
        consume.consume,
    ),
    ClientRow(
        frames.BASIC_CANCEL,
        "Passed on; with `no-wait` the door asks for an answer that the client does not get.",
        "door_protocol.consumer_without_a_wait",
        consume.cancel,
    ),
    ClientRow(
        frames.BASIC_PUBLISH,
        "Enters the log; goes to the broker, with its position, when safe. Not replicated: passed on. In vhost lrq: handled by the door.",
        "door.test_a_confirmed_publish_is_on_both_nodes",
    ),
    ClientRow(frames.BASIC_GET, "Like basic.consume.", "door_protocol.getting_one_by_one", consume.get),
    ClientRow(
        frames.BASIC_ACK,
        "Enters the log, one entry per queue; goes to the broker when safe. 406 for a tag that the client does not hold.",
        "door_protocol.acks_of_several",
    ),
    ClientRow(
        frames.BASIC_NACK,
        "With requeue: passed on. Otherwise it enters the log and goes to the broker when safe. 406 for a tag that the client does not hold.",
        "door_protocol.nack_and_reject_give_back",
        acknowledge.reject,
    ),
    ClientRow(frames.BASIC_REJECT, "Like basic.nack.", "door_protocol.rejected_to_a_dead_letter_queue", acknowledge.reject),
    ClientRow(
        frames.BASIC_RECOVER,
        "Passed on; deliveries before its answer return to their queue, too.",
        "door_crossing.test_a_delivery_that_crosses_a_recover_goes_back_too",
        acknowledge.recover,
    ),
    ClientRow(
        frames.BASIC_RECOVER_ASYNC,
        "Like basic.recover; the client gets no answer.",
        "door_protocol.recover_without_an_answer",
        acknowledge.recover,
    ),
    ClientRow(
        frames.CONFIRM_SELECT,
        "Passed on; the door needs the broker's confirms in any case.",
        "door_protocol.confirms_selected_without_a_wait",
        publisher_confirms.select_confirms,
    ),
    ClientRow(
        frames.TX_SELECT,
        "Passed on. A channel that has published before is closed with 540.",
        "transactions.test_tx_after_a_publish_is_refused",
        transactions.select,
    ),
    ClientRow(
        frames.TX_COMMIT,
        "After a rehearsal at the broker it enters the log as one batch; goes to the broker, as a transaction, when safe.",
        "transactions.test_moved_exactly_once",
        transactions.commit,
    ),
    ClientRow(frames.TX_ROLLBACK, "Passed on; the transaction was not in the log.", "door_protocol.tx_rolled_back", transactions.rollback),
)
"""The client's methods."""

BROKER = (
    BrokerRow(frames.CONNECTION_START, LOGIN, "door_logins.test_publishes_that_follow_the_login_at_once_are_logged"),
    BrokerRow(frames.CONNECTION_SECURE, f"{LOGIN} PLAIN and AMQPLAIN never ask.", "door_logins.test_what_was_not_asked_has_no_place_in_a_login"),
    BrokerRow(
        frames.CONNECTION_TUNE,
        "Passed on with a frame_max that leaves room for the position in a header frame.",
        "door_protocol.headers_as_large_as_a_frame",
    ),
    BrokerRow(frames.CONNECTION_OPEN_OK, LOGIN, "door_logins.test_publishes_that_follow_the_login_at_once_are_logged"),
    BrokerRow(
        frames.CONNECTION_CLOSE,
        "Passed on, and answered by the door. Unanswered publishes are refused in the log, unless a copy was seen.",
        "door_order.test_publishes_that_the_brokers_close_leaves_without_an_answer",
        lifecycle.broker_closed_connection,
    ),
    BrokerRow(frames.CONNECTION_CLOSE_OK, PASSED, "door.test_publishes_without_confirms_then_an_orderly_close"),
    BrokerRow(frames.CONNECTION_BLOCKED, BLOCKED, "door_protocol.test_blocked_and_unblocked", lifecycle.alarm_told),
    BrokerRow(frames.CONNECTION_UNBLOCKED, BLOCKED, "door_protocol.test_blocked_and_unblocked", lifecycle.alarm_told),
    BrokerRow(frames.CONNECTION_UPDATE_SECRET_OK, PASSED, "door_protocol.secret_updated", lifecycle.secret_updated),
    BrokerRow(frames.CHANNEL_OPEN_OK, PASSED, "door_protocol.channel_reuse"),
    BrokerRow(frames.CHANNEL_FLOW, "Passed on; RabbitMQ sends none.", "door_protocol.channel_flow"),
    BrokerRow(frames.CHANNEL_FLOW_OK, PASSED, "door_protocol.channel_flow"),
    BrokerRow(
        frames.CHANNEL_CLOSE,
        "Passed on. Unanswered publishes are refused in the log, unless a copy was seen.",
        "door_protocol.publish_to_no_exchange",
        lifecycle.broker_closed_channel,
    ),
    BrokerRow(
        frames.CHANNEL_CLOSE_OK,
        "Passed on; if the door closed the channel, the client gets the reason.",
        "door.test_a_channel_refused_by_the_door_resolves_what_came_before",
        lifecycle.broker_close_ok,
    ),
    BrokerRow(frames.ACCESS_REQUEST_OK, PASSED, "door_protocol.access_requested"),
    BrokerRow(frames.EXCHANGE_DECLARE_OK, ANSWER, "door_protocol.exchange_bound_to_an_exchange", declare.reply),
    BrokerRow(frames.EXCHANGE_DELETE_OK, ANSWER, "door_protocol.exchange_bound_to_an_exchange", declare.reply),
    BrokerRow(frames.EXCHANGE_BIND_OK, ANSWER, "door_protocol.exchange_bound_to_an_exchange", declare.reply),
    BrokerRow(frames.EXCHANGE_UNBIND_OK, ANSWER, "door_protocol.exchange_bound_to_an_exchange", declare.reply),
    BrokerRow(frames.QUEUE_DECLARE_OK, ANSWER, "door_topology.test_pipelined_declarations_are_answered_in_order", declare.declare_ok),
    BrokerRow(frames.QUEUE_BIND_OK, ANSWER, "door_protocol.alternate_exchange", declare.reply),
    BrokerRow(frames.QUEUE_PURGE_OK, ANSWER, "door_protocol.queues_deleted_and_purged", declare.reply),
    BrokerRow(frames.QUEUE_DELETE_OK, ANSWER, "door_protocol.queues_deleted_and_purged", declare.reply),
    BrokerRow(frames.QUEUE_UNBIND_OK, ANSWER, "door_protocol.exchange_deleted_with_its_last_binding", declare.reply),
    BrokerRow(frames.BASIC_QOS_OK, "Passed on, unless the door asked.", "door_protocol.qos_per_consumer", consume.qos_ok),
    BrokerRow(
        frames.BASIC_CONSUME_OK,
        "Passed on, unless the door asked.",
        "door_protocol.consumer_with_a_tag_of_the_servers",
        consume.consume_ok,
    ),
    BrokerRow(
        frames.BASIC_CANCEL,
        "Passed on, after the answer to a deletion of its queue on the channel.",
        "door_protocol.consumer_that_deletes_its_queue",
        consume.cancelled,
    ),
    BrokerRow(
        frames.BASIC_CANCEL_OK,
        "Passed on, unless the door asked.",
        "door_protocol.consumer_without_a_wait",
        consume.cancelled,
    ),
    BrokerRow(
        frames.BASIC_RETURN,
        "Passed on. If the message has a replication ID, its entry is refused in the log and the ID is free again; "
        "the `basic.ack` comes when that is safe.",
        "door.test_what_came_back_may_be_sent_again_under_its_id",
        deliver.returned,
    ),
    BrokerRow(
        frames.BASIC_DELIVER,
        "Passed on. If the log says that the copy was consumed or is older, the door settles it and the client does not see it.",
        "door_order.test_a_consumer_does_not_see_a_copy_of_what_was_consumed",
    ),
    BrokerRow(
        frames.BASIC_GET_OK,
        "Like basic.deliver; instead of a copy that the client must not see, the door gets the next one.",
        "door_order.test_what_is_asked_behind_a_get_is_not_answered_before_it",
        deliver.get_ok,
    ),
    BrokerRow(frames.BASIC_GET_EMPTY, PASSED, "door_protocol.getting_one_by_one", deliver.get_empty),
    BrokerRow(
        frames.BASIC_ACK,
        "Passed on with the client's own number; the entry is applied.",
        "door.test_pipelined_confirms_answer_each_publish_once",
    ),
    BrokerRow(
        frames.BASIC_NACK,
        "Passed on with the client's own number; the entry is refused in the log and its ID is free again. "
        "With a replication ID it comes when that is safe.",
        "door_logins.test_a_repeat_of_what_was_refused_is_refused_or_stored",
    ),
    BrokerRow(frames.BASIC_RECOVER_OK, "Passed on, unless the door asked.", "door_protocol.recover", acknowledge.recovered),
    BrokerRow(frames.CONFIRM_SELECT_OK, PASSED, "door_order.test_a_confirm_does_not_overtake_the_select_ok", publisher_confirms.selected),
    BrokerRow(frames.TX_SELECT_OK, PASSED, "door_protocol.tx_publishes"),
    BrokerRow(frames.TX_COMMIT_OK, "Passed on; the entries are applied.", "door_protocol.tx_publishes", transactions.commit_ok),
    BrokerRow(frames.TX_ROLLBACK_OK, "Passed on, unless it ends a rehearsal.", "door_protocol.tx_rolled_back", transactions.rollback_ok),
)
"""The broker's methods."""

FROM_CLIENT = {row.method: row.handler for row in CLIENT if row.handler is not None}
FROM_BROKER = {row.method: row.handler for row in BROKER if row.handler is not None}


#: Methods of AMQP 0-8, which RabbitMQ answers and pamqp does not know.
_OLD = {frames.ACCESS_REQUEST: "access.request", frames.ACCESS_REQUEST_OK: "access.request-ok"}


def name_of(method: int) -> str:
    """A method's name as the specification writes it: 0x003C0028 is `basic.publish`."""
    if method in _OLD:
        return _OLD[method]
    parts = str(commands.INDEX_MAPPING[method].name).split(".")  # type: ignore[attr-defined]
    return ".".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "-", part).lower() for part in parts)
