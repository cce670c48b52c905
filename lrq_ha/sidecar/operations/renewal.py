"""Renewals of the log by this primary (R17): ordered by an operator, or left unfinished by an earlier primary.

Rules:

- The door stays open, and there is one renewal at a time.
- A failure before the CHECKPOINT has changed nothing. A renewal that fails behind it is given up in the log, or continued by the next primary,
  which blocks clients from half-moved queues before its door opens.
- While it is under way this node does not hand over: the next primary would have to continue it.
- broker_plugin/renewal/renewal.py moves the queues.
"""

from __future__ import annotations

import asyncio
import logging
import time

from broker_plugin.log.holds import PublishHold, QueueHold
from broker_plugin.log.streams import LARGER_LOG
from broker_plugin.renewal.queue_move import GivenUp
from broker_plugin.renewal.renewal import Renewal
from lrq_ha.routing.names import ROUTING_VHOST

from ..config import Config
from ..node.client_drain import ClientDrain
from ..node.core import Core
from ..node.retention import Watch
from ..node.task_scope import TaskScope

log = logging.getLogger("lrq_ha.node")

FINISH_S = 30.0  # for consumers of a queue, by default
APPLIED_TIMEOUT_S = 30.0


class Renewals:
    """Runs this primary's renewals.

    Args:
        config: The node's configuration.
        core: The core whose log is renewed.
        life: A renewal ends with it at the latest, also if no client waits for it any more.
        watch: Of the log's head.
        turning_away: Has the door, and may be about to close it.
    """

    def __init__(self, config: Config, core: Core, life: TaskScope, watch: Watch, turning_away: ClientDrain) -> None:
        self._config = config
        self._name = config.node.name
        self._node = core.node
        self._replica = core.replica
        self._life = life
        self._watch = watch
        self._turning_away = turning_away

    async def renew(self, timeout_s: float, *, force: bool, dead_letters_arrived: bool, dry_run: bool) -> tuple[bool, str]:
        """R17: publishes everything live again behind a CHECKPOINT, one queue after the other.

        Arguments as of `OperatorCommands.switchover` and `Renewal`.
        """
        if not self._node.serving:
            return False, f"{self._name} is not primary"
        if self._turning_away.busy:
            return False, f"not now: {self._turning_away.busy}"
        if dry_run:
            if refusals := await self._renewal(0, timeout_s, force=force, dead_letters_arrived=dead_letters_arrived).refusals():
                return False, "it would be given up: " + "; ".join(refusals)
            queues, held = len(self._replica.declared.definitions.queues()), self._turning_away.held()
            return True, f"would publish again what is live in {queues} queues, one after the other; consumers hold {held} messages"
        self._turning_away.renewing = f"node {self._name} renews its log"
        task = self._life.spawn(self._renew(timeout_s, force=force, dead_letters_arrived=dead_letters_arrived))
        await self._life.wait(task)
        if not task.done() or task.cancelled() or task.exception():
            return False, f"{self._name} could not go on: {self._life.reason or 'see its log'}; whoever leads next goes on with it"
        return task.result()

    async def _renew(self, timeout_s: float, *, force: bool, dead_letters_arrived: bool) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(APPLIED_TIMEOUT_S):
                await self._replica.progress.wait_applied(self._replica.end)
        except TimeoutError:
            self._turning_away.renewing = ""
            return False, "a queue refuses messages (a length limit?), so not everything is in its queue: make room and try again"
        if not self._replica.checkpoint(renewal=True):
            self._turning_away.renewing = ""
            return False, "the state of the log has become too large for a checkpoint, so no node can begin at one"
        return await self._finish(self._node.log.end, timeout_s, force=force, dead_letters_arrived=dead_letters_arrived)

    def go_on(self) -> None:
        """Continues a renewal that another primary has begun; nothing if there is none. Called before the door opens."""
        if self._node.log.unfinished:
            self._turning_away.renewing = f"node {self._name} goes on with renewing the log"
            for key in self._replica.index.passes.unfinished():
                self._replica.moving[key] = QueueHold(key)
            self._life.spawn(self._finish(self._node.log.unfinished, FINISH_S, force=False, dead_letters_arrived=False))

    def _renewal(self, checkpoint: int, timeout_s: float, *, force: bool, dead_letters_arrived: bool) -> Renewal:
        broker, door = self._config.broker_address(ROUTING_VHOST), self._turning_away.door
        return Renewal(self._replica, door, broker, checkpoint, timeout_s=timeout_s, force=force, dead_letters_arrived=dead_letters_arrived)

    async def _finish(self, checkpoint: int, timeout_s: float, *, force: bool, dead_letters_arrived: bool) -> tuple[bool, str]:
        """Moves everything live. Raises LrqError if the next leader must continue."""
        began, replica = time.monotonic(), self._replica
        renewal = self._renewal(checkpoint, timeout_s, force=force, dead_letters_arrived=dead_letters_arrived)
        problem = ""
        await replica.progress.wait_safe(checkpoint)
        self._turning_away.progress = lambda: renewal.doing
        try:
            await renewal.run()
        except GivenUp as error:
            problem = str(error)
        self._turning_away.progress = str
        await self._watch.look(now=True)
        if not problem and self._node.head > checkpoint:
            size = self._config.replication.log_bytes_max
            problem = f"what is live takes more than log_bytes_max = {size}, and no node can join before there is room for it: {LARGER_LOG}"
        await replica.progress.wait_safe(replica.renewed(checkpoint, given_up=bool(problem)))
        for key in replica.moving.keys() - {PublishHold.KEY}:  # that were left unfinished
            replica.moving.pop(key).over.set()
        self._turning_away.renewing = ""
        pause = f"; the longest time for which a queue stood still was {renewal.longest_s:.2f} s ('{renewal.longest}')" if renewal.longest else ""
        if problem:
            log.error("the renewal was given up: %s", problem)
            return False, f"{problem} ({renewal.moved} messages were published again{pause})"
        took_s = time.monotonic() - began
        said = f"{self._name} has published {renewal.moved} messages again in {took_s:.1f} s: a node may join from entry {checkpoint} on"
        log.info("%s%s", said, pause)
        return True, said + pause
