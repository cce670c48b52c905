"""The address of a broker: host, port, user, vhost, TLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from lrq_ha import urls
from lrq_ha.errors import MalformedInput

from .tls import TlsFiles

PORT, TLS_PORT = 5672, 5671
_FORM = f"Write amqp://USER:PASSWORD@HOST:PORT/VHOST; {urls.PASSWORD_RULE}"


@dataclass(frozen=True)
class Address:
    """Where a broker or door listens, how it is reached, and the user to log in. Shown without the password.

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
            vhost: Replaces the URL's.
            tls: The context for amqps://.
            server_name, proxied: See the class.

        Raises:
            MalformedInput: The URL has another form or an unused part, or is amqps:// without `tls`.
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
