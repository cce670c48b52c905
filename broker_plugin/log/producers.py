"""The keys under which the log numbers the publishes of each producer. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from urllib.parse import quote


def producer_key(vhost: str, user: str, producer: str) -> str:
    """Whose replication IDs these are: in another vhost, the same name is another producer's. `split_key` has the way back."""
    return f"{quote(vhost, safe='')}/{user}/{producer}"


def split_key(key: str) -> tuple[str, str]:
    """User and producer. A user's name may have slashes; a producer's has none, nor has the vhost as it stands there."""
    user, _, producer = key.partition("/")[2].rpartition("/")
    return user, producer


class ProducerKeys:
    """Those of a growing collection that are one user's and producer's, whatever the vhost, without a look at all of it each time."""

    __slots__ = ("_by_name", "_of", "_seen")

    def __init__(self) -> None:
        self._of: Collection[str] | None = None
        self._seen = 0
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def of(self, user: str, producer: str, keys: Collection[str]) -> list[str]:
        """`keys` is the same collection each time, to which more may have come, at its end; or another one."""
        if keys is not self._of:
            self._of, self._seen = keys, 0
            self._by_name.clear()
        if self._seen < len(keys):
            for key in islice(keys, self._seen, None):
                self._by_name.setdefault(split_key(key), []).append(key)
            self._seen = len(keys)
        return self._by_name.get((user, producer), [])
