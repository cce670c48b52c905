"""HTTP to brokers and sidecars. Rule: requests go directly, whatever proxies the environment names."""

from __future__ import annotations

import ssl
import urllib.request
from typing import Any


class HttpAccess:
    """How sidecars are asked.

    Args:
        token: Sent with commands, and not where a request is redirected to; empty: none.
        tls: For https://; None: the system's.
    """

    def __init__(self, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._token = token
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))

    def open(self, request: str | urllib.request.Request, timeout: float, *, authorized: bool = False) -> Any:
        """Sends a request and returns the answer. `timeout`: seconds; `authorized`: with the token. Raises OSError, or http.client.HTTPException."""
        if isinstance(request, str):
            request = urllib.request.Request(request)
        if authorized and self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return self._opener.open(request, timeout=timeout)


#: Without a token.
PLAIN = HttpAccess()
http_open = PLAIN.open
#: The error text for an answer that http.client cannot read.
NOT_HTTP = "the answer is not HTTP, or not whole"
