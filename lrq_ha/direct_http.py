"""HTTP to brokers and sidecars. Rule: requests go directly, whatever proxies the environment names."""

from __future__ import annotations

import urllib.request

http_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
#: The error text for an answer that http.client cannot read.
NOT_HTTP = "the answer is not HTTP, or not whole"
