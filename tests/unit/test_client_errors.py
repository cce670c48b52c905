"""What the AMQP client's errors advise: by the text of a reply, with commands that can be pasted as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands, frame

from broker_plugin.amqp import encode
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Channel, Connection, _login_error
from broker_plugin.amqp.errors import AccessRefused, AmqpError, AuthenticationFailed, ChannelClosed, ConnectionClosed, ConnectionLimit, VhostNotFound

WHERE = Address("h", 1, user="the app", password="secret", vhost="/")
GRANT = "rabbitmqctl set_permissions -p / 'the app' '.*' '.*' '.*'"
LIMIT = "NOT_ALLOWED - access to vhost '/' refused for user 'the app': connection limit (5) is reached"
USER_LIMIT = "NOT_ALLOWED - connection refused for user 'the app': user connection limit (5) is reached"
NODE_LIMIT = "NOT_ALLOWED - connection refused: node connection limit (5) is reached"
OTHER_USER = "other nodes and sites log in as this sidecar's own user, to vhost lrq"


@pytest.mark.parametrize(
    ("code", "text", "kind", "todo"),
    [
        (403, "ACCESS_REFUSED - Login was refused using …", AuthenticationFailed, "Check both: rabbitmqctl authenticate_user 'the app' asks for"),
        (530, "NOT_ALLOWED - vhost / not found", VhostNotFound, f"Create it: rabbitmqctl add_vhost / && {GRANT}"),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'the app'", AccessRefused, f"Give it permissions there: {GRANT}"),
        (530, LIMIT, ConnectionLimit, "Close connections there, or raise the limit, see: rabbitmqctl list_vhost_limits --vhost /"),
        (530, USER_LIMIT, ConnectionLimit, "Close some of its connections, or raise the limit, see: rabbitmqctl list_user_limits"),
        (530, NODE_LIMIT, ConnectionLimit, "Close connections to this broker, or raise connection_max"),
        (530, OTHER_USER, ConnectionClosed, "Let this door's address have the user and password that the sidecar there has in [broker] url"),
        (530, "this is group east, not west", ConnectionClosed, "Its text says what is not allowed"),
        (541, "INTERNAL_ERROR - … refused for user 'a': vhost '/' is down", ConnectionClosed, "See why in the broker's log, then start it: "),
    ],
)
def test_a_login_that_is_refused(code: int, text: str, kind: type[AmqpError], todo: str) -> None:
    """A connection limit was told to give permissions, a peer with another password to look at the virtual host."""
    error = _login_error(WHERE, ConnectionClosed(code, text, WHERE))
    assert type(error) is kind
    assert error.todo.startswith(todo)
    assert text in str(error)
    assert error.retriable == (kind in (ConnectionClosed, ConnectionLimit))
    assert "secret" not in str(error)


def test_names_are_quoted_for_a_shell() -> None:
    where = Address("h", 1, user="o'neill {vhost}", vhost="a b")
    error = _login_error(where, ConnectionClosed(530, "NOT_ALLOWED - vhost a b not found"))
    granted = r"""rabbitmqctl set_permissions -p 'a b' 'o'"'"'neill {vhost}' '.*' '.*' '.*'"""
    assert isinstance(error, VhostNotFound)
    assert error.todo == f"Create it: rabbitmqctl add_vhost 'a b' && {granted}"


@pytest.mark.parametrize(
    ("code", "text", "todo"),
    [
        (403, "ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'the app'", f"Give the user this permission: {GRANT} ("),
        (403, "ACCESS_REFUSED - configure access to queue 'q' in vhost '/' refused for user 'u' by backend b", "Give the user this permission: "),
        (403, "ACCESS_REFUSED - access to topic 'k' in exchange 'e' in vhost '/' refused for user 'u'", "Let the user use all routing keys: "),
        (403, "ACCESS_REFUSED - queue 'q' in vhost '/' in exclusive use", "Another consumer has this queue alone"),
        (403, "ACCESS_REFUSED - exchange name 'amq.x' contains reserved prefix 'amq.*'", "Its text says what is not allowed"),
        (406, "PRECONDITION_FAILED - user_id property set to 'u' but …", "Let it publish for other users: rabbitmqctl set_user_tags 'the app' "),
        (406, "PRECONDITION_FAILED - message size 11 is larger than configured max size 10", "Send smaller messages"),
        (406, "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost '/'", "It exists with other settings"),
        (530, "NOT_ALLOWED - attempt to reuse consumer tag 't'", "Its text says what is not allowed"),
        (599, "UNKNOWN", ""),
    ],
)
def test_a_channel_that_is_closed(code: int, text: str, todo: str) -> None:
    """With the names of the connection: those in a text may be a client's own invention."""
    told: list[Any] = []

    async def main() -> None:
        connection = Connection(WHERE, None)
        connection._channels[1] = Channel(connection, 1, None, None, told.append)
        connection.data_received(frame.marshal(commands.Channel.Close(code, text, 0, 0), 1))
        connection.abort()

    asyncio.run(main())
    [error] = told
    assert isinstance(error, ChannelClosed)
    assert (error.code, error.text) == (code, text)
    assert error.todo.startswith(todo)
    assert bool(error.todo) == bool(todo)


def test_a_name_that_looks_like_the_end_of_a_text() -> None:
    """As of a queue that a client has declared: nobody is to be given permissions over it."""
    text = "ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'mallory"
    assert "mallory" not in ChannelClosed(403, text, WHERE).todo
    assert GRANT in ChannelClosed(403, text, WHERE).todo


def test_a_connection_that_is_closed_names_its_own_user() -> None:
    async def main() -> Any:
        connection = Connection(WHERE, None)
        connection.data_received(encode.connection_close(530, USER_LIMIT))
        return connection.error

    assert asyncio.run(main()).todo.endswith("rabbitmqctl list_user_limits --user 'the app'")


def test_errors_without_a_connection() -> None:
    assert AuthenticationFailed(403, "refused").todo.startswith("Check both: rabbitmqctl authenticate_user USER")
