"""What the AMQP client is told (an address) and what it raises. Rule: an error carries the broker's code and text and says what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from lrq_ha import urls
from lrq_ha.replication.errors import LrqError, MalformedInput

from .tls import TlsFiles

PORT, TLS_PORT = 5672, 5671
_FORM = f"Write amqp://USER:PASSWORD@HOST:PORT/VHOST; {urls.PASSWORD_RULE}"

TODO = {
    0: "Look at the broker's log and at the network between",
    311: "Send smaller messages or raise max_message_size on the broker",
    320: "The other side ended it on purpose; its text says why",
    403: "Give the user the permission on this resource: rabbitmqctl set_permissions",
    404: "Create it, or correct its name",
    405: "Another connection holds it exclusively: end that one",
    406: "It exists with other settings, or was used against them: compare the text with rabbitmqctl list_queues",
    501: "One side sent malformed frames: report it with the broker's log",
    504: "Report it with the broker's log",
    506: "The broker is out of resources: free memory or disk, or close channels",
    530: "Its text says what is not allowed; of a virtual host, rabbitmqctl list_vhosts and list_vhost_limits tell more",
    540: "This kind of queue cannot do that",
    541: "The broker failed: see its log",
}


@dataclass(frozen=True)
class Address:
    """Where a broker or door listens, how it is reached, and as whom to log in. Shown without the password.

    Attributes:
        tls: With TLS; None: without.
        server_name: The name in the other side's certificate, if it is not `host`.
        proxied: The other side expects the PROXY protocol's header first.
    """

    host: str
    port: int = PORT
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: TlsFiles | None = field(default=None, repr=False)
    server_name: str = ""
    proxied: bool = False

    @classmethod
    def parse(cls, url: str, vhost: str | None = None, *, tls: TlsFiles | None = None, server_name: str = "", proxied: bool = False) -> Address:
        """Reads amqp://USER:PASSWORD@HOST:PORT/VHOST, all but the host optional, each part percent-encoded.

        Args:
            url: The URL; amqps:// for TLS. Without a path the virtual host is `/`.
            vhost: Instead of the URL's.
            tls: What amqps:// stands for.
            server_name, proxied: See the class.

        Raises:
            MalformedInput: It has another form, or a part that would not be used, or is amqps:// and there is no `tls`.
        """
        try:
            parts = urls.split(url)
            host, port = parts.hostname, parts.port or (TLS_PORT if parts.scheme == "amqps" else PORT)
        except ValueError:  # its text may hold a part of the password
            raise MalformedInput("a broker's URL is malformed", todo=_FORM) from None
        secure = parts.scheme == "amqps"
        if parts.scheme not in ("amqp", "amqps") or not host or (secure and tls is None):
            raise MalformedInput("a broker's URL has another form", todo=_FORM)
        path = unquote(parts.path[1:]) or "/"
        if unused := urls.unused(parts, path):
            raise MalformedInput(f"a broker's URL {unused}", todo=_FORM)
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        return cls(host, port, user, password, path if vhost is None else vhost, tls if secure else None, server_name, proxied)

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port} vhost {self.vhost}"


class ConnectionRefused(LrqError):
    """Nobody listens there, does not answer in time, or does not speak AMQP."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="Check that it runs and that host and port are right", retriable=True)


class ReplyTimeout(LrqError):
    """The broker is alive and has not answered a call in time."""

    def __init__(self, what: str) -> None:
        super().__init__(what, todo="Look at the broker's load and, for quorum queues, at their leaders", retriable=True)


class AmqpError(LrqError):
    """What the broker said when it refused.

    Attributes:
        code: The AMQP reply code; 0 where the connection broke without one.
        text: The reply text.
    """

    said = "the broker refused"
    advice = ""
    again = False

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{self.said}: {code} {text}", todo=self.advice or TODO.get(code, ""), retriable=self.again)
        self.code = code
        self.text = text


class AuthenticationFailed(AmqpError):
    said = "user or password was refused"
    advice = "Check both; the broker's log says more"


class VhostNotFound(AmqpError):
    said = "the virtual host does not exist"
    advice = "Create it: rabbitmqctl add_vhost"


class AccessRefused(AmqpError):
    said = "the user may not use the virtual host"
    advice = "Give it permissions there: rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'"


class ConnectionClosed(AmqpError):
    said = "the connection ended"
    again = True


class ChannelClosed(AmqpError):
    said = "the channel ended"

    @property
    def no_such_queue(self) -> bool:
        """Whether there is no such queue; RabbitMQ says 404 also of one that is there and does not answer, or does not come up."""
        return self.code == 404 and "no queue '" in self.text

    @property
    def no_such_exchange(self) -> bool:
        return self.code == 404 and "no exchange '" in self.text

    @property
    def is_exclusive(self) -> bool:
        """Whether the queue is another connection's own."""
        return self.code == 405

    @property
    def of_queue(self) -> bool:
        """Whether that one queue is the reason, and not a right or a channel that is missing."""
        return self.code not in (0, 200, 403)


class NoChannelLeft(ChannelClosed):
    said = "no channel could be opened"
    advice = "Raise channel_max of the broker"
    again = True
