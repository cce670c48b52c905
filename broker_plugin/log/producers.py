"""The keys under which the log numbers the publishes of each producer. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from urllib.parse import quote


def producer_key(vhost: str, user: str, producer: str) -> str:
    """The key of a producer's replication IDs: in another vhost, that name is another producer's. `split_key` is the reverse."""
    return f"{quote(vhost, safe='')}/{user}/{producer}"


def split_key(key: str) -> tuple[str, str]:
    """User and producer. A user's name may have slashes; a producer's has none, nor has the vhost as encoded in the key."""
    user, _, producer = key.partition("/")[2].rpartition("/")
    return user, producer


class ProducerKeys:
    """The keys of one user and producer, in any vhost, from a growing collection that is not searched as a whole each time."""

    __slots__ = ("_by_name", "_of", "_seen")

    def __init__(self) -> None:
        self._of: Collection[str] | None = None
        self._seen = 0
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def of(self, user: str, producer: str, keys: Collection[str]) -> list[str]:
        """The matching keys. `keys`: the collection of the previous call, perhaps with more at its end, or another collection."""
        if keys is not self._of:
            self._of, self._seen = keys, 0
            self._by_name.clear()
        if self._seen < len(keys):
            for key in islice(keys, self._seen, None):
                self._by_name.setdefault(split_key(key), []).append(key)
            self._seen = len(keys)
        return self._by_name.get((user, producer), [])
