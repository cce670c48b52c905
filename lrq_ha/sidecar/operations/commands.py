"""The operators' commands to an incarnation, except renewals (renewal.py): promotion, step-down, pause, the set, reinit.

Rules:

- A refused command has changed nothing, and says why.
- The core answers one request at a time.
- This node steps down for one command at a time, and continues if no client waits for the answer any more.
- With `dry_run`, the answer only describes the action.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from broker_plugin.amqp.address import Address
from broker_plugin.reconcile.unreplicated import delivered_again, in_no_export, left_behind, may_be_left_behind
from lrq_ha.errors import LrqError
from lrq_ha.replication.events import Answer, PauseRequest, PromoteRequest, RemoveRequest, StepDown, SwitchoverRequest
from lrq_ha.replication.log import LogState
from lrq_ha.replication.roles import Role

from ..node.client_drain import POLL_S, ClientDrain
from ..node.core import Core
from ..node.log_writer import LogWriter
from ..node.task_scope import TaskScope
from ..peers.log_shipping import LogShipping
from .reinit import tail

log = logging.getLogger("lrq_ha.node")

ANSWER_TIMEOUT_S = 30.0

Request: TypeAlias = PromoteRequest | RemoveRequest | SwitchoverRequest | PauseRequest


class OperatorCommands:
    """Carries out the operators' commands.

    Args:
        name: Of this node.
        broker: The own broker, which is asked for the lengths of queues.
        core: Decides.
        life: Ended by a reinit.
        own_log: The log whose tail may be requested.
        turning_away: Drains clients when this node steps down.
        sending: Informs the node that takes over.
    """

    def __init__(
        self, name: str, broker: Address, core: Core, life: TaskScope, own_log: LogWriter, turning_away: ClientDrain, sending: LogShipping
    ) -> None:
        self._name = name
        self._broker = broker
        self._core = core
        self._node = core.node
        self._life = life
        self._log = own_log
        self._turning_away = turning_away
        self._sending = sending
        self._answer: asyncio.Future[Answer] | None = None

    async def _ask_core(self, request: Request) -> Answer:
        if self._answer is not None:
            return Answer(False, "another request is under way")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            self._core.feed(request)
            if not answer.done():  # most are answered at once, before the caller goes on
                await self._life.wait(answer, ANSWER_TIMEOUT_S)
            if answer.done():
                return answer.result()
            if self._life.over:
                return Answer(False, self._over())
            return Answer(False, f"no answer within {ANSWER_TIMEOUT_S:g} s; {self._node.role.value}: {self._node.reason}")
        finally:
            self._answer = None

    def _over(self) -> str:
        """The answer to an operator whose command this incarnation can no longer carry out."""
        return f"{self._name} has stopped or started again meanwhile ({self._life.reason}): see `lrq-ha list` before trying again"

    def answered(self, effect: Answer) -> None:
        """The core's answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(effect)

    async def ask(self, request: Request) -> tuple[bool, str]:
        """Hands an operator's request to the core and waits for its answer; a promotion also until the door is open."""
        answer = await self._ask_core(request)
        ok, text = answer.ok, answer.text
        if isinstance(request, PromoteRequest) and not (ok or request.dry_run):
            log.warning("not promoted, as an operator wants: %s", text)
        if ok and isinstance(request, PromoteRequest) and request.dry_run:
            text += f"; what is live comes as redelivered: {await delivered_again(self._core.replica, self._broker)}"
            if behind := may_be_left_behind(self._core.replica):
                text += f"; messages in these queues are not replicated, and stay where they are: {behind}"
        elif ok and isinstance(request, PromoteRequest) and not request.dry_run:
            while self._node.role is Role.RECOVERING and not self._node.serving and not self._life.over:
                await asyncio.sleep(POLL_S)
            ok = self._node.serving and not self._life.over
            if self._life.over:
                text = self._over()
            elif not ok:
                text += f", but is {self._node.role.value} now: {self._node.reason}"
            elif self._node.role is Role.ACTIVE:
                text += " and its door is open"
            else:
                text += f"; {self._node.role.value}: {self._node.reason}"
            text += f"; {answer.at_stake}"
            log.warning("promoted, as an operator wants: %s", text)
        return ok, text

    async def switchover(self, node: int, timeout_s: float, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Hands the next epoch to `node` (0: to an in-sync backup): no message is lost, none is delivered twice.

        Args:
            timeout_s: Seconds that consumers have to settle their deliveries.
            force: Go on after that time.
        """
        answer = await self._ask_core(SwitchoverRequest(node))
        if not answer.ok:
            return False, answer.text
        behind = await self._left_behind()
        if dry_run:
            return self._would(answer.text, behind, timeout_s, force)
        name = self._node.name(answer.node)
        ok, text = await self._step_down(answer.node, f"node {self._name} hands over to {name}", timeout_s, force)
        return ok, f"{self._name} has handed over to {name}{text}{behind}" if ok else text

    async def _left_behind(self) -> str:
        behind = await left_behind(self._core.replica, self._broker)
        return f"; this stays behind: {behind}" if behind else ""

    async def demote(self, timeout_s: float, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Ends this epoch; no node takes the next one until an operator says so, or this sidecar is restarted. Arguments as of `switchover`."""
        if not self._node.serving:
            return False, f"{self._name} is not primary"
        if why := self._node.nothing_is_safe():
            return False, why
        behind = await self._left_behind()
        if dry_run:
            return self._would("would step down; the group would be paused", behind, timeout_s, force)
        ok, text = await self._step_down(0, f"node {self._name} steps down", timeout_s, force)
        return ok, f"{self._name} has stepped down{text}; the group is paused{behind}" if ok else text

    def _would(self, text: str, behind: str, timeout_s: float, force: bool) -> tuple[bool, str]:
        """The answer to a dry run."""
        if busy := self._turning_away.busy:
            return False, f"not now: {busy}"
        held = self._turning_away.held()
        if not held:
            then = ""
        elif force:
            then = f": what they do not settle within {timeout_s:g} s is delivered again, marked redelivered"
        else:
            then = f": they must settle them within {timeout_s:g} s, or it is refused"
        return True, f"{text}; consumers hold {held} messages{then}{behind}"

    async def _step_down(self, node: int, reason: str, timeout_s: float, force: bool) -> tuple[bool, str]:
        task = self._life.spawn(self._turn_away(node, reason, timeout_s, force))
        await self._life.wait(task)
        if not task.done() or task.cancelled() or task.exception():
            return False, self._over()
        return task.result()

    async def _turn_away(self, node: int, reason: str, timeout_s: float, force: bool) -> tuple[bool, str]:
        """Steps down, unless a step-down or a renewal is under way. Of two commands one is refused: no await stands between check and `begin`."""
        if busy := self._turning_away.busy:
            return False, f"not now: {busy}"
        ok, text, left = await self._turning_away.begin(node, reason, timeout_s, force=force)
        if self._life.over:
            return False, self._over()
        if ok and node:  # meanwhile the conditions for the new leader may have changed
            answer = await self._ask_core(SwitchoverRequest(node))
            if not answer.ok:
                self._turning_away.end()
                return False, f"{answer.text}; this node goes on as primary"
        if ok and not node:  # no node is to take over by itself; only now, as operators may pause and resume while consumers finish
            await self._ask_core(PauseRequest(True))
            ok, unsafe = await self._turning_away.become_safe(node)  # etcd takes a moment, in which this node may append entries of its own
            text = text if ok else f"{unsafe}; the group is paused"
            if self._life.over:
                return False, self._over()
        if ok:
            self._core.feed(StepDown(node, None if left else self._core.replica.given_out.given()))
            if node:
                ok, text = await self._hand_over(node, text)
        return ok, text

    async def _hand_over(self, node: int, text: str) -> tuple[bool, str]:
        """Ends this incarnation when `node` has received the handover, or does not answer. Returns the text of the answer."""
        name, mine = self._node.name(node), self._name
        told = await self._sending.part(node)
        self._life.end(f"handed over to {name}")
        if told:
            return True, text
        after = f"{mine} does after {self._node.settings.handover_timeout_s:g} s"
        return False, f"{mine} has stepped down, and {name} has not answered that it was told: if it does not take the next epoch, {after}"

    def tail(self) -> AsyncIterator[dict[str, Any]]:
        """The entries that a diverged node refuses to drop. Raises LrqError if it is not diverged."""
        if self._node.role is not Role.DIVERGED:
            told = self._node.leading or self._node.following
            why = "it has no entries of its own" if told else "no primary has said yet whether it has entries of its own"
            raise LrqError(f"{self._name} is {self._node.role.value}, not diverged: {why}", retriable=not told)
        nearest = self._log.checkpoints.start(self._node.tail_from - 1)
        return tail(self._log.streams.reader, self._node.log, self._node.tail_from, nearest.offset if nearest else "first")

    async def reinit(self, *, force: bool, dry_run: bool) -> tuple[bool, str]:
        """Deletes every queue and exchange that this node's log brought to its broker, and its log; then the node follows its primary.

        Args:
            force: Go on though no primary answers, which would have the deleted messages.
        """
        name, node = self._name, self._node
        gone = await in_no_export(self._core.replica, self._broker)  # before all else: the conditions below must still hold when it is done
        if node.leading or node.role is Role.RECOVERING:
            return False, f"{name} is primary: only a backup can be rebuilt"
        primary = node.primary()
        found = node.peers[primary].hello if primary else None
        if found is None and not force:
            lost = f"no primary answers {name}, so what it holds may be the last copy of what the group has: all of it would be lost"
            return False, f"{lost}. Bring the primary back first, or promote {name}, or repeat with --force"
        dropped = f"entries {node.tail_from} to {node.log.end}, which it alone may hold" if node.role is Role.DIVERGED else "its log"
        too = f"; {gone} are deleted, and are in no export" if gone else ""
        if dry_run:
            then = "no primary answers, so this may be the last copy of them" if found is None else self._joins(primary, found.log)
            held = found and node.settings.strict and found.log.sets and node.me in found.log.sets[-1][1]
            waits = "; nothing is confirmed until it has caught up" if held else ""
            return True, f"would drop {dropped}, and the queues and exchanges that its log declared{too}; {then}{waits}"
        await self._log.streams.mark_anew()
        self._life.end("rebuilt by the operator")
        return True, f"{name} drops {dropped}, and begins again{too}"

    def _joins(self, primary: int, log: LogState) -> str:
        """The next step of this node with an empty log. `log`: the primary's."""
        if not log.lacks(0):
            return "it then follows from the first entry"
        if log.base:
            return f"it then follows from entry {log.base}, where {self._node.name(primary)} has renewed the log"
        return self._node.how_to_join(self._node.me, primary, LogState(), log)
