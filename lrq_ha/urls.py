"""URLs that may hold a password.

Rules: nothing of one that is malformed is shown, as nobody can tell where its password ends; a part that would not be used is refused.
"""

from __future__ import annotations

from urllib.parse import SplitResult, unquote, urlsplit

#: For what an error says is allowed.
PASSWORD_RULE = "of a password, what is not a letter or digit is written as % and two hexadecimal digits"


def split(url: str) -> SplitResult:
    """The parts of a URL, of which host and port can be had.

    Raises:
        ValueError: It is malformed, or has an @ behind the first /, ? or #. That is a password with one of these in it: what stands before would be
            taken for the host and its port.
    """
    parts = urlsplit(url)
    if "@" in parts.path + parts.query + parts.fragment or parts.port == 0:
        raise ValueError("malformed")
    return parts


def unused(parts: SplitResult, *vhosts: str) -> str:
    """What of an AMQP address would not be used, as "has …", without any of it; empty if nothing.

    Args:
        vhosts: Virtual hosts that it may name; it may name none in any case.
    """
    if parts.query or parts.fragment:
        return "has options behind ? or #"
    if parts.username is not None and not parts.password:
        return "has a user and no password"
    if unquote(parts.path[1:]) not in ("", *vhosts):
        return "has another virtual host"
    return ""
