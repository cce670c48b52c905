"""Makes a broker's objects as the log has them.

Rules:
- An object that the broker has and the log lacks (an extra) is kept: it is counted and named, and deleted only by the
  log or by an operator's word.
- What acts by itself is on the primary's broker only. A follower deletes what the log has of it.
- A refused object is named, and tried again; everything else goes on.
- Two versions may say one object in two ways. A value that the broker has taken, and says otherwise, counts as equal
  while both stay as they are.
- The sidecar's user gets all rights in each vhost of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from itertools import groupby
from typing import Any

from .changes import Changes, find_changes
from .management import Management, ObjectRefused
from .objects import KINDS, Key, Listing, Objects, acts_by_itself, in_order, of_kinds, tell_some, told

log = logging.getLogger("lrq_ha.definitions")

AT_ONCE_MAX = 8  # requests


class Mirror:
    """Makes one broker's objects as the log has them.

    Args:
        management: Of the broker.
        kinds: The kinds that this node replicates, as in the configuration.

    Attributes:
        refused: The objects that the broker refuses, and why.
        extras: The objects that the broker has and the log lacks, as of the last look.
    """

    def __init__(self, management: Management, kinds: Collection[str]) -> None:
        self.refused: dict[Key, str] = {}
        self.extras: frozenset[Key] = frozenset()
        self._management = management
        self._kinds = frozenset(kinds)
        self._close: dict[Key, tuple[str, str]] = {}  # what the log has, and what the broker says after it has taken that
        self._owed: set[Key] = set()  # deletions of the log that could not be carried out

    def owe(self, changes: Changes) -> None:
        """An entry of the log is to be carried out by the next `align`."""
        self._owed |= {key for key in changes.deleted if KINDS[key[0]].replicate in self._kinds}

    async def apply(self, changes: Changes) -> None:
        """Carries out an entry of the log, on a node that does not lead yet. What fails is owed. Raises ManagementUnavailable."""
        self.owe(changes)
        await self._delete(self._owed & changes.deleted)
        await self._set({key: value for key, value in of_kinds(changes.set, self._kinds).items() if not acts_by_itself(key, value)})

    async def provide_vhost(self, vhost: str, wanted: Objects) -> bool:
        """Makes a vhost that the log has queues in and the broker lacks: as `wanted` has it, or without any settings.
        Returns whether that is done.

        Raises:
            ManagementUnavailable: The API does not answer.
        """
        key = ("vhosts", vhost)
        if await self._management.has_vhost(vhost) or not await self._set({key: wanted.get(key, "{}")}):
            return False
        log.warning("%s is made here, as the log has queues in it", told(key))
        return True

    async def align(self, wanted: Objects, kinds: Collection[str], *, leads: bool, clear: Collection[Key] = ()) -> Listing:
        """Brings the broker to the log's state; returns what it has then.

        Args:
            wanted: The log's objects.
            kinds: The kinds that the log has.
            leads: This node leads, and has what acts by itself.
            clear: Extras that are deleted, too.

        Raises:
            ManagementUnavailable: The API does not answer.
            MalformedInput: Its answer is not whole.
        """
        kinds = self._kinds & frozenset(kinds)
        wanted = of_kinds(wanted, kinds)
        held_back: set[Key] = set() if leads else {key for key, value in wanted.items() if acts_by_itself(key, value)}
        here = await self._management.read()
        changes = find_changes(
            of_kinds(here.objects, kinds), {key: value for key, value in wanted.items() if key not in held_back}, self._is_close
        )
        gone = changes.deleted & held_back.union(self._owed, clear)
        for key in self.refused.keys() - changes.set.keys():
            del self.refused[key]
        await self._delete(gone)
        done = await self._set(changes.set)
        self._owed.clear()
        for vhost in {key[1] for key in wanted if key[0] == "vhosts" and key in here.objects} - here.entered:
            await self._management.enter(vhost)
        if done or gone:
            log.warning("set or deleted here, as the log has it: %s", tell_some([*done, *gone]))
        if changes.set or gone:
            here = await self._management.read()
            for key in done:
                if here.objects.get(key, wanted[key]) != wanted[key]:
                    self._close[key] = wanted[key], here.objects[key]
        self.extras = frozenset(key for key in of_kinds(here.objects, kinds) if key not in wanted)
        return here

    def _is_close(self, key: Key, here: str, wanted: str) -> bool:
        return here == wanted or self._close.get(key) == (wanted, here)

    def find_news(self, known: Objects, here: Objects) -> Changes:
        """What operators have changed at this broker, which the log does not have."""
        changes = find_changes(known, here, lambda key, wanted, now: self._is_close(key, now, wanted))
        return Changes(changes.set, changes.deleted - self.refused.keys())

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _set(self, objects: Objects) -> list[Key]:
        """Sets objects in order; returns those that the broker has taken."""
        taken: list[Key] = []

        async def put(key: Key) -> None:
            try:
                await self._management.put(key, objects[key])
            except ObjectRefused as error:
                self._note_refused(key, str(error))
            else:
                self.refused.pop(key, None)
                taken.append(key)
                if key[0] == "vhosts":
                    await self._management.enter(key[1])

        await _for_all(put, in_order(objects))
        return taken

    async def _delete(self, keys: Collection[Key]) -> None:
        async def delete(key: Key) -> None:
            try:
                await self._management.delete(key)
            except ObjectRefused as error:
                log.error("%s is not deleted here: %s", told(key), error)
            self.refused.pop(key, None)
            self._owed.discard(key)

        await _for_all(delete, [*reversed(in_order(keys))])

    def _note_refused(self, key: Key, why: str) -> None:
        if self.refused.get(key) != why:
            log.error("%s is refused here: %s", told(key), why)
        self.refused[key] = why


async def _for_all(do: Callable[[Key], Coroutine[Any, Any, None]], keys: Sequence[Key]) -> None:
    """Does it for all keys, kind by kind and several at once."""
    for _, of_kind in groupby(keys, lambda key: key[0]):
        left = list(of_kind)
        while left:
            await asyncio.gather(*map(do, left[:AT_ONCE_MAX]))
            del left[:AT_ONCE_MAX]
