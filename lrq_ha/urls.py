"""URLs that may hold a password.

Rules: no part of a malformed URL is shown, as the end of its password is unknown; a part that would not be used is refused.
"""

from __future__ import annotations

from urllib.parse import SplitResult, quote, unquote, urlsplit

NOT_AMQP = "is not an amqp:// URL"
#: The rule for passwords in error texts.
PASSWORD_RULE = "of a password, what is not a letter or digit is written as % and two hexadecimal digits"


def split(url: str) -> SplitResult:
    """The parts of a URL that has a host and a valid port.

    Raises:
        ValueError: The URL is malformed, or has an @ behind the first /, ? or #. The password then contains one of these, and the text before it
            would be taken for the host and its port.
    """
    parts = urlsplit(url)
    if "@" in parts.path + parts.query + parts.fragment or parts.port == 0:
        raise ValueError("malformed")
    return parts


def endpoint(url: str) -> tuple[str, int]:
    """Host and port of a valid AMQP URL; `localhost` and AMQP's own port if it names none."""
    parts = split(url)
    return parts.hostname or "localhost", parts.port or (5671 if parts.scheme == "amqps" else 5672)


def with_user(url: str, user: str, password: str) -> str:
    """A valid URL without a user, with this one."""
    parts = split(url)
    return parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc}").geturl()


def amqp_fault(url: str, *vhosts: str) -> str:
    """The fault of a node's AMQP address, as "is …" or "has …", without any part of it; empty if there is none.

    Args:
        vhosts: Virtual hosts that it may name.
    """
    try:
        parts = split(url)
        good = parts.scheme in ("amqp", "amqps")
    except (ValueError, AttributeError, TypeError):
        good = False
    return unused(parts, *vhosts) if good else NOT_AMQP


def unused(parts: SplitResult, *vhosts: str) -> str:
    """The unused parts of an AMQP address, as "has …", without their values; empty if there are none.

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
