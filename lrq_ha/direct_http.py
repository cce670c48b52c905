"""HTTP to brokers and sidecars. Rule: they are asked directly, whatever proxies the environment may name."""

from __future__ import annotations

import urllib.request

http_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
#: What is said where http.client cannot read an answer.
NOT_HTTP = "the answer is not HTTP, or not whole"
