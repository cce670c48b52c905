"""The errors of the AMQP client.

Rules:
- An error carries the broker's code and text and says what to do. A command in it can be pasted, so its names are
  those of the connection.
- No name is taken from a reply's text, as clients choose the names in it.
"""

from __future__ import annotations

import re
from shlex import quote

from lrq_ha.errors import LrqError

from .address import Address

# The remedy by the reply code and a pattern of the reply text; the first match counts. In braces: commands and names,
# see `advise`.
_BY_TEXT: tuple[tuple[int, str, str], ...] = (
    (403, r"^ACCESS_REFUSED - (\w+ )?access to topic '", "Let the user use all routing keys: rabbitmqctl clear_topic_permissions -p {vhost} {user}"),
    (403, r"' in vhost '.*' refused for user '", "Give the user this permission: {grant} (patterns of names to configure, write to and read from)"),
    (403, r"' in exclusive use$", "Another consumer has this queue alone: end that one"),
    (406, r"^PRECONDITION_FAILED - user_id property ", "Let it publish for other users: {impersonate}"),
    (406, r"^PRECONDITION_FAILED - message size ", "Send smaller messages or raise max_message_size on the broker"),
    (530, r"user connection limit \(", "Close some of its connections, or raise the limit, see: rabbitmqctl list_user_limits --user {user}"),
    (530, r"node connection limit \(", "Close connections to this broker, or raise connection_max in its rabbitmq.conf"),
    (530, r"connection limit \(", "Close connections there, or raise the limit, see: rabbitmqctl list_vhost_limits --vhost {vhost}"),
    (530, r"allowed user limit", "Close some of its channels, or raise the limit, see: rabbitmqctl list_user_limits --user {user}"),
    (530, r"^other nodes and sites log in as", "Let this door's address have the user and password that the sidecar there has in [broker] url"),
    (541, r"vhost '.*' is down$", "See why in the broker's log, then start it: rabbitmqctl restart_vhost -p {vhost}"),
)
_BY_CODE = {
    0: "Look at the broker's log and at the network between",
    311: "Send smaller messages or raise max_message_size on the broker",
    320: "The other side ended it on purpose; its text says why",
    403: "Its text says what is not allowed",
    404: "Create it, or correct its name",
    405: "Another connection holds it exclusively: end that one",
    406: "It exists with other settings, or was used against them: compare the text with rabbitmqctl list_queues",
    501: "One side sent malformed frames: report it with the broker's log",
    504: "Report it with the broker's log",
    506: "The broker is out of resources: free memory or disk, or close channels",
    530: "Its text says what is not allowed",
    540: "This kind of queue cannot do that",
    541: "The broker failed: see its log",
}


class ConnectionRefused(LrqError):
    """The address is not listened on, does not answer in time, or does not speak AMQP."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="Check that it runs and that host and port are right", retriable=True)


class ReplyTimeout(LrqError):
    """The broker is alive and has not answered a call in time."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="Look at the broker's load and, for quorum queues, at their leaders", retriable=True)


def grant(vhost: str, user: str) -> str:
    """The command that gives a user all permissions in a virtual host."""
    return f"rabbitmqctl set_permissions -p {quote(vhost)} {quote(user)} '.*' '.*' '.*'"


def impersonate(user: str) -> str:
    """The command that lets a user publish in other users' names."""
    return f"rabbitmqctl set_user_tags {quote(user)} administrator impersonator"


def advise(code: int, text: str, advice: str = "", where: Address | None = None) -> str:
    """The remedy for a reply.

    Args:
        code, text: The reply's own.
        advice: The remedy unless the text is known to mean something else; empty: by the code.
        where: The connection's address: its {user} and {vhost}, quoted for a shell, the {grant} of all permissions
            there, and how to {impersonate}.
    """
    by_text = (todo for of_code, pattern, todo in _BY_TEXT if of_code == code and re.search(pattern, text, re.DOTALL))
    vhost, user = (where.vhost, where.user) if where else ("VHOST", "USER")
    found = next(by_text, advice or _BY_CODE.get(code, ""))
    return found.format(vhost=quote(vhost), user=quote(user), grant=grant(vhost, user), impersonate=impersonate(user))


class AmqpError(LrqError):
    """A refusal by the broker.

    Args:
        code, text: The reply's own; the code is 0 where the connection broke without one.
        where: The connection's address, if it is known.
        at_login: The text is shown with the address.
    """

    said = "the broker refused"
    advice = ""
    again = False

    def __init__(self, code: int, text: str, where: Address | None = None, *, at_login: bool = False) -> None:
        shown = f"{where}: {code} {text}" if at_login else text
        super().__init__(f"{self.said}: {code} {shown}", todo=advise(code, text, self.advice, where), retriable=self.again)
        self.code = code
        self.text = shown


class AuthenticationFailed(AmqpError):
    said = "user or password was refused"
    advice = "Check both: rabbitmqctl authenticate_user {user} asks for the password and tries it; the broker's log says more"


class VhostNotFound(AmqpError):
    said = "the virtual host does not exist"
    advice = "Create it: rabbitmqctl add_vhost {vhost} && {grant}"


class AccessRefused(AmqpError):
    said = "the user may not use the virtual host"
    advice = "Give it permissions there: {grant}"


class ConnectionLimit(AccessRefused):
    """The broker, the virtual host or the user is at its limit of connections."""

    said = "no further connection is allowed"
    again = True


class ConnectionClosed(AmqpError):
    said = "the connection ended"
    again = True


class ChannelClosed(AmqpError):
    said = "the channel ended"

    @property
    def no_such_queue(self) -> bool:
        """Whether the queue does not exist; RabbitMQ also says 404 for an existing queue that does not answer or come up."""
        return self.code == 404 and "no queue '" in self.text

    @property
    def no_such_exchange(self) -> bool:
        return self.code == 404 and "no exchange '" in self.text

    @property
    def is_exclusive(self) -> bool:
        """Whether the queue is exclusive to another connection."""
        return self.code == 405

    @property
    def of_queue(self) -> bool:
        """Whether one queue is the reason, and not a missing right or channel."""
        return self.code not in (0, 200, 403)


class BrokerRefuses(LrqError):
    """The broker refuses the log's entries for its queues, for a reason of its own, until an operator mends that."""


class NoChannelLeft(ChannelClosed):
    said = "no channel could be opened"
    advice = "Raise channel_max of the broker"
    again = True
