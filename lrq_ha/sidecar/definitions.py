"""The objects that operators set at a broker (users, permissions, policies and so on): from the primary's broker to the log, and on to a backup's.

Rules:

- The primary reads its broker again and again, and appends what has changed. What is missing counts as deleted only after a second look.
- Before an epoch the log counts: the new primary's broker gets what it lacks, and what acts by itself. From then on its broker counts.
- A backup carries out each entry in log order, and compares its whole broker now and then: what an operator changes there is set back.
- A management API that does not answer holds nothing up. What was missed is made up for when it answers again.
- A vhost in which the log has queues is made on a backup before them, even if the entry that sets it comes later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from broker_plugin.definitions.changes import changes_in, entries_of, find_changes
from broker_plugin.definitions.management import Management
from broker_plugin.definitions.mirror import Mirror
from broker_plugin.definitions.objects import Key, Objects, acts_by_itself, in_order, of_kinds, tell_some, told
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb

from .config import Config
from .node.core import Core

log = logging.getLogger("lrq_ha.definitions")

STEP_S = 0.2
REFUSED_SHOWN_MAX = 3


class Definitions:
    """The broker's objects in an incarnation.

    Args:
        config: The node's configuration.
        core: The core, and the log that the objects stand in.
    """

    def __init__(self, config: Config, core: Core) -> None:
        self._name = config.node.name
        self._settings = config.definitions
        self._kinds = frozenset(config.definitions.replicate)
        self._node = core.node
        self._replica = core.replica
        self._logged = core.replica.index.broker_objects
        self._credentials = config.credentials
        self._open: Management | None = None
        self._known_mirror: Mirror | None = None
        self._lock = asyncio.Lock()  # of this broker's objects
        self._problem = ""
        self._aligned = 0  # the epoch that this node began to lead or follow, and for which its broker was brought to the log's state
        self._upto = 0  # the last entry that was carried out here

    @property
    def _management(self) -> Management:
        if self._open is None:
            own = self._credentials
            self._open = Management(self._settings.management, own.name, own.password.decode("utf-8", "surrogateescape"))
        return self._open

    @property
    def _mirror(self) -> Mirror:
        if self._known_mirror is None:
            self._known_mirror = Mirror(self._management, self._kinds)
        return self._known_mirror

    async def close(self) -> None:
        """Closes the connections to the broker."""
        if self._open is not None:
            await self._open.close()

    # ---- keeping ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps log and broker equal, until cancelled."""
        while True:
            await self._pause()
            await self.look()

    async def _pause(self) -> None:
        until = time.monotonic() + self._settings.interval_s
        while time.monotonic() < until:
            epoch = self._node.leading if self._replica.active else self._followed()
            if epoch and epoch != self._aligned and not self._problem:
                return
            await asyncio.sleep(STEP_S)

    async def look(self) -> None:
        """Compares log and broker once. Never raises LrqError: the problem is told by `tell`."""
        try:
            async with self._lock:
                if self._replica.active:
                    await self._lead(self._node.leading)
                elif epoch := self._followed():
                    await self._follow(epoch)
        except LrqError as error:
            self._say(str(error))
        else:
            self._say("")

    async def begin(self, epoch: int) -> None:
        """Makes this node's broker as the log has it, before it leads `epoch`: from then on, what operators change at this broker counts."""
        if not self._kinds:
            return
        try:
            async with self._lock:
                await self._mirror.align(self._logged.rows, self._kinds & self._logged.kinds, leads=True)
                self._aligned = epoch
        except LrqError as error:
            self._say(str(error))

    def _followed(self) -> int:
        """The epoch that this node follows; 0: none."""
        return self._node.leader_epoch if self._node.following else 0

    def _say(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("%s", problem)
        elif self._problem and not problem:
            log.info("the management API of this node's broker answers again")
        self._problem = problem

    async def _lead(self, epoch: int) -> None:
        """Appends what operators have changed at this broker."""
        logged = self._logged
        if not self._kinds:
            if logged.kinds:
                self._append(epoch, pb.DefinitionsChange())
            self._aligned = epoch
            return
        both = self._kinds & logged.kinds
        if epoch == self._aligned:
            here = await self._management.read()
        else:
            here = await self._mirror.align(logged.rows, both, leads=True)
        objects = of_kinds(here.objects, self._kinds)
        if logged.rows.keys() - objects.keys():
            objects = of_kinds((await self._management.read()).objects, self._kinds) | objects
        for vhost in {key[1] for key in objects if key[0] == "vhosts"} - here.entered:
            await self._management.enter(vhost)
        news = self._mirror.find_news(of_kinds(logged.rows, both), objects)
        if news or self._kinds != logged.kinds:
            for entry in entries_of(news, self._kinds):
                self._append(epoch, entry)
            log.info("in the log now: %s", tell_some([*news.set, *news.deleted]) or "nothing yet")
        self._aligned = epoch

    def _append(self, epoch: int, entry: pb.DefinitionsChange) -> None:
        if self._replica.active and self._node.leading == epoch:
            self._replica.append(pb.Run(definitions=entry), size=entry.ByteSize())

    def _wanted(self) -> tuple[frozenset[str], Objects]:
        """The kinds that both the log and this node have, and the log's objects of these, as far as this node has applied it."""
        kinds, rows = self._logged.at(max(self._replica.reached(), self._upto))
        both = kinds & self._kinds
        return both, of_kinds(rows, both)

    async def _follow(self, epoch: int) -> None:
        kinds, wanted = self._wanted()
        if kinds:
            await self._mirror.align(wanted, kinds, leads=False)
        self._aligned = epoch

    # ---- the applier's ------------------------------------------------------------------------------------------------

    async def apply(self, entry: pb.DefinitionsChange, sequence: int) -> None:
        """Carries out entry `sequence` at this node's broker. A management API that does not answer holds nothing up."""
        if not self._kinds:
            return
        async with self._lock:
            self._upto = max(self._upto, sequence)
            changes = changes_in(entry)
            if self._problem:
                self._mirror.owe(changes)
                return
            try:
                await self._mirror.apply(changes)
            except LrqError as error:
                self._say(str(error))

    async def provide_vhost(self, vhost: str) -> bool:
        """Makes a vhost that the log has queues in and this broker never had. Returns whether that is done."""
        if "vhosts" not in self._kinds & self._logged.kinds:
            return False
        try:
            return await self._mirror.provide_vhost(vhost, self._logged.rows)
        except LrqError as error:
            self._say(str(error))
            return False

    # ---- for operators ------------------------------------------------------------------------------------------------

    def tell(self) -> dict[str, Any] | None:
        """Values for JSON, without any secret; None: nothing is replicated."""
        if not self._kinds:
            return None
        mirror, leads = self._mirror, self._replica.active
        kinds, wanted = self._wanted()
        return {
            "kinds": sorted(kinds),
            "objects": len(wanted),
            "differing": 0 if leads else len(mirror.extras | mirror.refused.keys()),
            "named": [told(key) for key in in_order(mirror.extras)[:5]] if not leads else [],
            "refused": {told(key): why for key, why in list(mirror.refused.items())[:5]},
            "held_back": 0 if leads else sum(1 for key, value in wanted.items() if acts_by_itself(key, value)),
            "problem": self._problem,
        }

    def trouble(self) -> str:
        """Text for `lrq-ha list`; empty if there is none."""
        if not self._kinds:
            return ""
        mirror = self._mirror
        refused = [f"{told(key)} is refused by its broker: {why}" for key, why in list(mirror.refused.items())[:REFUSED_SHOWN_MAX]]
        extras = ""
        if mirror.extras and not self._replica.active:
            extras = f"its broker has {len(mirror.extras)} objects that the primary's lacks ({tell_some(mirror.extras)}): lrq-ha definitions diff "
        return "; ".join(filter(None, (self._problem, *refused, extras and extras + self._name)))

    async def names(self) -> dict[str, Any]:
        """The vhosts, the users with their tags, and the plugins of this node's broker. Raises LrqError."""
        objects = (await self._management.read()).objects
        users = {key[1]: json.loads(value)["tags"] for key, value in objects.items() if key[0] == "users"}
        vhosts = sorted(key[1] for key in objects if key[0] == "vhosts")
        return {"node": self._name, "vhosts": vhosts, "users": users, "plugins": await self._management.plugins()}

    async def compare(self) -> list[dict[str, str]]:
        """The objects in which this node's broker differs from the log, in order: {"object", "how"}. Raises LrqError."""
        kinds, wanted = self._wanted()
        if not kinds:
            raise LrqError("nothing is replicated to compare with: definitions.replicate is empty here or on the primary")
        here = of_kinds((await self._management.read()).objects, kinds)
        news = self._mirror.find_news(wanted, here)
        leads = self._replica.active
        found: dict[tuple[str, ...], str] = {key: "differs" if key in wanted else "is here only" for key in news.set}
        found |= {key: "is missing" for key in news.deleted if leads or not acts_by_itself(key, wanted[key])}
        found |= {key: f"is refused: {why}" for key, why in self._mirror.refused.items()}
        return [{"object": told(key), "how": found[key]} for key in in_order(found)]

    async def take(self, dry_run: bool) -> tuple[bool, str]:
        """Makes this node's broker as the log has it: what the log lacks is deleted."""
        if self._replica.active:
            return False, f"{self._name} is primary: its own definitions count. Name the backup"
        kinds, wanted = self._wanted()
        if not kinds or not self._node.following:
            return False, f"{self._name} follows no primary whose definitions it could take"
        used: set[Key] = {("vhosts", vhost) for vhost, _ in self._replica.declared.definitions.queues()}
        here = of_kinds((await self._management.read()).objects, kinds)
        extras = find_changes(here, wanted).deleted - used - self._logged.rows.keys()
        what = f"{len(extras)} objects of its broker that the primary's lacks: {tell_some(extras)}" if extras else "nothing"
        if dry_run:
            return True, f"{self._name} would delete {what}"
        async with self._lock:
            await self._mirror.align(wanted, kinds, leads=False, clear=extras)
        return True, f"{self._name} has deleted {what}"
