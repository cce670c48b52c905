"""URLs that may hold a password.

Rule: nothing of one that is malformed is shown, as nobody can tell where its password ends.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

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
