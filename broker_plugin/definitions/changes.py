"""The difference of two sets of objects. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from lrq_ha.proto import lrq_pb2 as pb

from .objects import KINDS, Key, Objects, in_order

ENTRY_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Changes:
    """What leads from one set of objects to another."""

    set: Objects
    deleted: frozenset[Key]

    def __bool__(self) -> bool:
        return bool(self.set or self.deleted)


def find_changes(before: Objects, after: Objects, same: Callable[[Key, str, str], bool] = lambda _key, one, other: one == other) -> Changes:
    """The changes that lead from `before` to `after`. `same`: whether two values of an object are equal."""
    changed = {key: value for key, value in after.items() if key not in before or not same(key, before[key], value)}
    return Changes(changed, frozenset(before.keys() - after.keys()))


def entries_of(changes: Changes, kinds: Collection[str]) -> Iterator[pb.DefinitionsChange]:
    """The changes as entries of the log, each ENTRY_BYTES_MAX long or a little longer. `kinds`: the kinds that the log has from now on."""
    entry, size = pb.DefinitionsChange(kinds=sorted(kinds)), 0
    for key in reversed(in_order(changes.deleted)):
        entry.deleted.add(key=key)
    for key in in_order(changes.set):
        if size > ENTRY_BYTES_MAX:
            yield entry
            entry, size = pb.DefinitionsChange(kinds=sorted(kinds)), 0
        entry.set.add(key=key, value=changes.set[key])
        size += len(changes.set[key])
    yield entry


def changes_in(entry: pb.DefinitionsChange) -> Changes:
    """The changes of an entry. An object of a kind that this version does not know is passed over."""
    known = {tuple(each.key): each.value for each in entry.set if each.key[0] in KINDS}
    return Changes(known, frozenset(tuple(each.key) for each in entry.deleted if each.key[0] in KINDS))
