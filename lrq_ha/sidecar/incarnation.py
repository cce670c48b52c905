"""One incarnation of a sidecar: from connecting to its broker until its end.

Rules:

- Effects of the core are carried out in order, at once: `_effects` maps each to its part.
- A breach of the one-writer rule or a lost connection to the broker ends the incarnation, and the process starts the next one, which rebuilds
  everything from the broker's streams. No state outlives it.
- Each part has its own state, and its methods tell it of the others: `task_scope.py` ends the incarnation, `core.py` has the core's events,
  `log_writer.py` the own log, `log_shipping.py` and `peer_server.py` the other nodes, `client_drain.py` the door, `commands.py` and `renewal.py` the
  operators' commands, `status.py` the answers. This module starts and ends the parts, and carries out effects that concern several of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from broker_plugin.amqp.declarations import is_stream
from broker_plugin.apply.applier import Applier
from broker_plugin.apply.broker_rights import BrokerRights
from broker_plugin.apply.partial_queues import PartialQueues
from broker_plugin.apply.vhost_writer import SuspectEntries
from broker_plugin.door.server import Door
from broker_plugin.log.shortfall import Shortfall
from broker_plugin.reconcile.reconciler import LengthReconciler
from broker_plugin.reconcile.strays import Strays
from broker_plugin.sweep.sweeper import Sweeper
from lrq_ha.replication.events import (
    Ack,
    Answer,
    BrokerLacks,
    ChangeRegister,
    CutTail,
    Disconnect,
    Effect,
    Given,
    OpenDoor,
    Opened,
    Recover,
    Recovered,
    RefusePush,
    Restart,
    RoleChanged,
    SafeAdvanced,
    Send,
    Subscribe,
    Tick,
    Unsubscribe,
    WriteBatch,
    WriteFence,
)
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import Position
from lrq_ha.replication.roles import Role
from lrq_ha.routing.names import ROUTING_VHOST

from .config import Config
from .coordination import Coordination, RegisterDriver
from .counts import Counts
from .definitions import Definitions
from .node.client_drain import ClientDrain
from .node.core import Core
from .node.log_writer import LogWriter
from .node.task_scope import TaskScope
from .operations.commands import OperatorCommands
from .operations.reinit import wipe
from .operations.renewal import Renewals
from .operations.resync import FullSyncOrders
from .peers.log_shipping import LogShipping
from .peers.peer_server import PeerServer
from .sites.sessions import Sites
from .sites.snapshot_keeper import SnapshotKeeper
from .sites.view_writer import ViewWriter
from .status import Status

log = logging.getLogger("lrq_ha.node")

TICK_S = 0.05
WINDOW_MESSAGES_MAX = 4_000
WINDOW_BYTES_MAX = 32 << 20
SLOW_STEP_S = 5.0
DEFINITIONS_WAIT_S = 1.0  # they are set while queues are written, and go on after that


@dataclass(frozen=True)
class Kept:
    """The state that the process keeps of an incarnation for the next one.

    Attributes:
        shut_out: See Streams.
        paused, defers_to, heard_before: See Node.
        doubt, refused: See Applier.
        shortfall: See Replica.
        counts: Of the process.
    """

    shut_out: int = 0
    paused: bool = False
    defers_to: int = 0
    heard_before: tuple[int, float] | None = None
    doubt: SuspectEntries | None = None
    refused: str = ""
    shortfall: Shortfall | None = None
    counts: Counts = field(default_factory=Counts)


class Incarnation:
    """One incarnation. `run` returns why it ended.

    Args:
        config: The node's configuration.
        door: The door, which outlives incarnations.
        before: The state that the incarnation before has left.
        coordination: By etcd; None: static.

    Attributes:
        defers_to: For the next incarnation.
        orders, renewals, full_syncs, definitions, status: The operators' interface.
    """

    def __init__(self, config: Config, door: Door, before: Kept | None = None, coordination: Coordination | None = None) -> None:
        before = before or Kept()
        self.defers_to = 0
        self._counts = before.counts
        self._taking_since = 0.0  # when this node began to take its epoch
        self._config = config
        self._door = door
        self._broker = config.broker_address(ROUTING_VHOST)
        self._node = Node(
            config.settings(), paused=before.paused, defers_to=before.defers_to, heard_before=before.heard_before
        )
        self._life = life = TaskScope()
        self._core = core = Core(self._node, Levels(config.replication.replicate), life, self._carry_out, before.shortfall)
        self._replica = core.replica
        self._log = LogWriter(config, core, life, before.shut_out, door.block, before.counts)
        self._turning_away = ClientDrain(door, core)
        self._sending = LogShipping(config, core, life, self._log)
        self._receiving = PeerServer(config, core, self._turning_away, lambda: self._applier)
        self._sites = Sites(config, self._replica, self._log.streams)
        receive = config.receive
        self._keeper = SnapshotKeeper(
            self._replica, self._log.streams, keep_snapshot=receive.keep_snapshot, hold=receive.on_backlog == "hold"
        )
        self._statuses_seen = 0
        self._cut_off = ""
        self._register = RegisterDriver(coordination, core, self._log, lambda: door.log_blocked) if coordination else None
        self._start_views(config, before)
        self.orders = OperatorCommands(config.node.name, self._broker, core, life, self._log, self._turning_away, self._sending)
        self.full_syncs = FullSyncOrders(config.node.name, self._replica, self._sites)
        self.renewals = Renewals(config, core, life, self._log.watch, self._turning_away)
        self.status = Status(
            core,
            own_log=self._log,
            sending=self._sending,
            receiving=self._receiving,
            turning_away=self._turning_away,
            sites=self._sites,
            keeper=self._keeper,
            applier=self._applier,
            definitions=self.definitions,
        )
        self._effects: dict[type, Callable[[Any], None]] = {
            WriteBatch: self._write_batch,
            WriteFence: self._log.write_fence,
            Send: self._sending.send,
            Subscribe: self._sending.subscribe,
            Unsubscribe: self._sending.unsubscribe,
            Disconnect: self._sending.disconnect,
            Ack: self._receiving.ack,
            RefusePush: self._receiving.refuse_push,
            SafeAdvanced: self._safe,
            CutTail: self._log.cut,
            RoleChanged: self._role,
            Recover: self._recover,
            OpenDoor: self._open_door,
            Restart: self._restart,
            Answer: self.orders.answered,
        }
        if self._register:
            self._effects[ChangeRegister] = self._register.change

    def _start_views(self, config: Config, before: Kept) -> None:
        """Starts the parts that keep the broker's queues and streams as the log says."""
        settings = config.replication
        views = ViewWriter(self._replica, self._log.streams, self._sites, self._keeper)
        self._rights = BrokerRights(self._replica, self._broker, lambda: self._applier.wake())
        self.definitions = Definitions(config, self._core)
        self._rights.provide = self.definitions.provide_vhost
        self._sweeper = Sweeper(self._replica, self._broker)
        self._configured = PartialQueues(self._replica, self._broker)
        self._applier = Applier(
            self._replica,
            self._broker,
            views,
            self._sweeper,
            delay_s=settings.apply_delay_s,
            delay_entries_max=settings.apply_delay_entries_max,
            delay_bytes_max=settings.apply_delay_bytes_max,
            window_messages_max=WINDOW_MESSAGES_MAX,
            window_bytes_max=WINDOW_BYTES_MAX,
            on_follow=self._configured.unbind,
            may_write=self._rights.look,
            set_objects=self.definitions.apply,
            doubt=before.doubt,
            refused=before.refused,
        )
        views.on_applied = self._applier.wake
        self._replica.progress.on_wake = self._wake
        self._replica.barrier.write_record = self._log.record

    @property
    def ready(self) -> bool:
        """Whether it has been rebuilt and is not over."""
        return self._core.ready

    @property
    def kept(self) -> Kept:
        """The state for the next incarnation."""
        doubt = self._applier.doubt
        settled = doubt is None or self._replica.progress.tracker.applied >= doubt.upto
        node, begins_anew = self._node, self._log.streams.begins_anew
        return Kept(
            shut_out=self._log.streams.shut_out,
            paused=node.paused,
            defers_to=self.defers_to,
            heard_before=node.heard,
            doubt=None if settled else doubt,
            refused=self._applier.refused,
            shortfall=None if begins_anew else self._replica.shortfall,
            counts=self._counts,
        )

    # ---- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Runs until the incarnation ends; returns the reason. Raises LrqError if it cannot start."""
        rebuilt = False
        try:
            rebuilding = self._life.spawn(self._log.rebuild())
            await self._life.wait(rebuilding)
            if not rebuilding.done():  # it would wait without end
                return self._life.reason
            await rebuilding
            rebuilt = True
            if self._log.streams.begins_anew:
                return "it goes on with the rebuild that an operator wanted"
            self._sweeper.suspect(self._queues_published_again(), self._node.log.end)
            self._sweeper.suspect((target.key for target in self._replica.index.filter.queues() if target.spares), 0)
            self._sites.lag.begin(self._log.watch.retention.export())
            self._core.ready = True
            self._door.host = self._receiving
            self._core.feed(Opened(self._replica.progress.tracker.applied, self._log.streams.lost_host and self._node.log.end > 0))
            strays = Strays(self._replica, self._broker)
            parts = (self._log, self._log.watch, self._rights, strays, self._applier, self._sweeper, self._configured, self.definitions)
            register = (self._register.run(), self._register.prove()) if self._register else ()
            for body in (self._ticks(), *(part.run() for part in parts), *register):
                self._life.spawn(body)
            self._sending.start()
            return await self._life.ended()
        finally:
            self._life.end("this sidecar stops")  # unless it was over: clients that wait for a command are told
            self._core.ready = False
            self._door.host = None
            self._forget_alarm()
            try:
                self._door.close_clients(f"node {self._config.node.name} starts again")
            finally:
                await self._life.stop()
                self._configured.abort()
                await self.definitions.close()
                try:
                    if rebuilt and self._log.streams.begins_anew:
                        await wipe(self._log.streams, self._broker, self._node.log, self._replica.declared.definitions)
                finally:
                    await self._log.streams.close()
                    self._forget_alarm()  # the alarm may have been reported meanwhile, and its end would not be

    def _forget_alarm(self) -> None:
        self._door.block("")
        self._door.log_blocked = ""

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._core.feed(Tick(self._receiving.arriving_bytes()))
            if (lacks := self._replica.shortfall.tell()) != self._node.lacks:
                self._core.feed(BrokerLacks(lacks))
            self._receiving.applied()
            self._consider_cut_off()
            self._door.check_relays()
            self.status.ticked()

    def _consider_cut_off(self) -> None:
        """E5: a primary that may have been replaced serves no clients."""
        if self._node.cut_off and not self._cut_off:
            log.warning("clients are turned away: %s", self._node.cut_off)
            self._door.close_clients(self._node.cut_off)
        self._cut_off = self._node.cut_off

    def _queues_published_again(self) -> set[tuple[str, str]]:
        """Queues in which older copies may be left of entries that are published again, or were lost: any of them. Nothing leaves a stream."""
        if not self._replica.to_apply and not self._log.streams.lost_host:
            return set()
        declared = self._replica.declared
        known = {target.key for target in self._replica.index.filter.queues()}.union(declared.existing())
        return {key for key in known if declared.replicates(key) and not is_stream(declared.declarations.get(key, b""))}

    def _wake(self) -> None:
        self._applier.log_advanced()
        self._receiving.applied()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        self._effects[type(effect)](effect)

    def _write_batch(self, effect: WriteBatch) -> None:
        self._log.write(effect)
        self._sending.grown()

    def _safe(self, effect: SafeAdvanced) -> None:
        self._log.safe_advanced(effect.safe)
        self._replica.progress.safe_advanced(effect.safe)
        if self._node.leading:
            self._tell_sites()

    def _tell_sites(self) -> None:
        """Passes status entries that are safe now to the sessions with other sites."""
        for sequence, status in self._replica.index.statuses.since(self._statuses_seen):
            self._sites.status_entry(Position(self._node.log.epoch_at(sequence), sequence), status)
        self._statuses_seen = self._replica.progress.safe

    def _role(self, effect: RoleChanged) -> None:
        log.info("%s: %s", effect.role.value, effect.reason)
        self.status.since = time.time()
        self._applier.hurry = effect.role in (Role.RECOVERING, Role.ACTIVE)
        self._applier.wake()
        if effect.role is Role.RECOVERING:
            if not self._node.leading:
                self._taking_since = time.monotonic()
        elif effect.role is Role.ACTIVE:
            self._door.give_confirms()

    def _recover(self, effect: Recover) -> None:
        self._life.spawn(self._recover_epoch(effect.epoch, effect.given))

    async def _recover_epoch(self, epoch: int, given: Given) -> None:
        """R12, steps 6 and 7: bring everything live behind R to the broker, end the sweepers; then the door may open."""
        marks = [self._taking_since, time.monotonic()]
        self._replica.given_out.took_over(self._node.log.end, given)
        self._replica.begin_epoch(epoch)
        definitions = self._life.spawn(self.definitions.begin(epoch))
        steps = (
            ("queues are written", self._applier.drained),
            ("the sweeper ends", self._sweeper.take_over),
            ("configuration is set up", self._configured.take_over),
        )
        for what, step in steps:
            await self._watched(what, self._life.spawn(step()))
            marks.append(time.monotonic())
        await self._life.wait(definitions, DEFINITIONS_WAIT_S)
        marks[-1] = time.monotonic()
        took_ms = (*(1000 * (end - begin) for begin, end in pairwise(marks)), 1000 * (marks[-1] - marks[0]))
        text = "recovered: epoch taken in %.0f ms, queues written in %.0f, sweeper ended in %.0f, configuration set up in %.0f; %.0f ms in all"
        log.info(text, *took_ms)
        self._counts.promoted(marks)
        if self._register is not None:
            self._register.recovered(epoch, dict(zip(("epoch", "queues", "sweeper", "configuration", "all"), map(round, took_ms), strict=True)))
        self._core.feed(Recovered(epoch))

    async def _watched(self, what: str, step: asyncio.Task[None]) -> None:
        """Returns when a step of the recovery is done. Logs for the operator what the step waits for, as no client is served meanwhile."""
        began = time.monotonic()
        while not (await asyncio.wait({step}, timeout=SLOW_STEP_S))[0]:
            progress, seconds = self._replica.progress, time.monotonic() - began
            done = f"{progress.tracker.applied} of {progress.safe} entries applied"
            waits = "; ".join(filter(None, (self._node.lacks, self._applier.full())))
            log.warning("recovering: for %.0f s until %s: %s %s", seconds, what, done, waits)
        await step

    def _open_door(self, effect: OpenDoor) -> None:
        self._counts.promotions += 1
        self._replica.refuse_passed_over()
        self.renewals.go_on()
        self._life.spawn(self._sites.run())
        self._life.spawn(self._keeper.run())
        self._life.spawn(LengthReconciler(self._replica, self._door, self._broker).run())
        self._statuses_seen = 0
        self._tell_sites()

    def _restart(self, effect: Restart) -> None:
        self.defers_to = effect.defers_to
        self._core.ready = False
        if not effect.defers_to:  # else the handover command ends it, when the node that takes over has received it
            asyncio.get_running_loop().call_soon(self._life.end, effect.reason)
