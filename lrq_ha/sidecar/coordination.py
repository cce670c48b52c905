"""The sidecar's side of coordination by etcd: the lease, which outlives incarnations, and an incarnation's dealings with the register.

Rules:

- The lease is renewed only if the own broker has confirmed something that was written after the last renewal (E4). A broker in an alarm takes no
  writes, and is no reason to give the lease back.
- The lease is given back at once when this node stops, has handed over or stepped down; and when its broker has been lost for `broker_grace_s`.
- A change of the register is repeated until etcd has answered it.
- The register is read each third of the lease's time, and often while no primary is heard that makes progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from lrq_ha.coordination.etcd import Etcd, EtcdAway, EtcdError, LeaseGone
from lrq_ha.coordination.register import Found, Register
from lrq_ha.errors import LrqError
from lrq_ha.replication.base import HEARD_HEARTBEATS
from lrq_ha.replication.events import ChangeRegister, LeaseRenewed, Progressed, RegisterAnswered, RegisterRead

from .config import Config
from .node.core import Core
from .node.log_writer import LogWriter

log = logging.getLogger("lrq_ha.coordination")

LOOK_S = 0.05
OFTEN_S = 0.2
#: Requests to one endpoint, and renewals, in the lease's time.
REQUESTS_PER_TTL, RENEWALS_PER_TTL = 6, 3
GIVE_BACK_S = 2.0  # a stop waits for etcd at most so long


class Lease:
    """This node's lease in etcd, from one incarnation to the next.

    Args:
        etcd: The client.
        ttl_s: Its length in seconds.

    Attributes:
        until: End of the lease by the monotonic clock, counted from when its last renewal was sent.
        renewed_at: When its last renewal was sent.
    """

    def __init__(self, etcd: Etcd, ttl_s: float) -> None:
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._id = 0
        self.until = self.renewed_at = 0.0

    async def hold(self) -> int:
        """Renews the lease, or begins a new one; returns its id. Raises EtcdError."""
        if self._id:
            try:
                await self.renew()
                return self._id
            except LeaseGone:
                pass
        sent = time.monotonic()
        self._id = await self._etcd.grant(self._ttl_s)
        self._renewed(sent)
        return self._id

    async def renew(self) -> None:
        """Raises LeaseGone, also where there is none; EtcdError."""
        if not self._id:
            raise LeaseGone("this node has no lease")
        sent = time.monotonic()
        try:
            await self._etcd.keep_alive(self._id)
        except LeaseGone:
            self._id = 0
            raise
        self._renewed(sent)

    def _renewed(self, sent: float) -> None:
        self.renewed_at, self.until = sent, sent + self._ttl_s

    async def give_back(self, why: str) -> None:
        """Ends the lease, so that another node may lead at once. If etcd does not answer, it ends by itself."""
        if self._id:
            held, self._id, self.until = self._id, 0, 0.0
            try:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._etcd.revoke(held)
                log.info("the lease is given back: %s", why)
            except (TimeoutError, EtcdError) as error:
                log.warning("the lease cannot be given back, and ends by itself: %s", error)


def open_register(config: Config, timeout_s: float | None = None) -> tuple[Etcd, Register]:
    """A client of etcd, to be closed, and the group's register.

    Args:
        config: With a table [coordination].
        timeout_s: Of a request to one endpoint; None: a part of the lease's time.
    """
    table, files = config.coordination, config.client_tls
    assert table is not None
    password = config.etcd_password()
    etcd = Etcd(table.endpoints, timeout_s or table.lease_ttl_s / REQUESTS_PER_TTL, table.user, password, lambda: files.context if files else None)
    return etcd, Register(etcd, table.namespace, config.node.group, config.names)


class Coordination:
    """Coordination by etcd in one sidecar.

    Args:
        config: The node's configuration, with a table [coordination].
    """

    def __init__(self, config: Config) -> None:
        table = config.coordination
        assert table is not None
        self.ttl_s = table.lease_ttl_s
        self._grace_s = table.broker_grace_s
        self._etcd, self.register = open_register(config)
        self.lease = Lease(self._etcd, table.lease_ttl_s)
        self._names = config.names
        self._grace: asyncio.Task[None] | None = None
        self._found: Found | None = None
        self._since = time.time()
        self._away = "not asked yet"

    # ---- the sidecar's life ------------------------------------------------------------------------------------------

    async def incarnation_over(self, *, at_once: bool) -> None:
        """No incarnation leads any more. `at_once`: it has ended in order, for another node to lead; else the broker may be back soon."""
        if at_once:
            await self.lease.give_back("this node does not lead any more")
        elif self._grace is None:
            self._grace = asyncio.get_running_loop().create_task(self._give_back_later())

    async def _give_back_later(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self.lease.give_back(f"its broker has been lost for {self._grace_s:g} s")

    def incarnation_begins(self) -> None:
        """An incarnation has been rebuilt from its broker."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    async def close(self) -> None:
        """The sidecar stops."""
        self.incarnation_begins()
        await self.lease.give_back("this sidecar stops")
        await self._etcd.close()

    # ---- for people --------------------------------------------------------------------------------------------------

    def noted(self, found: Found) -> None:
        """etcd has answered."""
        if self._away:
            log.info("etcd answers")
            self._since, self._away = time.time(), ""
        self._found = found

    def missed(self, error: LrqError) -> None:
        """etcd has not answered."""
        if not self._away or self._away == "not asked yet":
            log.warning("%s", error)
            self._since = time.time()
        self._away = error.what

    def tell(self) -> dict[str, Any]:
        """Values for JSON: for GET /status."""
        found = self._found
        record = found.record if found else None
        return {
            "etcd": self._away or "answers",
            "since": self._since,
            "leader": self._names.get(found.holder, str(found.holder)) if found and found.holder else None,
            "set": [self._names.get(member, str(member)) for member in sorted(record.members)] if record else [],
            "version": record.version if record else 0,
            "lease_ttl_s": self.ttl_s,
            "lease_remaining_s": round(max(0.0, self.lease.until - time.monotonic()), 1),
        }


class RegisterDriver:
    """An incarnation's dealings with the register.

    Args:
        coordination: Of the sidecar.
        core: Gets the answers.
        own_log: Its broker's confirms are the proof of progress.
        alarm: Tells why the broker takes no writes; empty if it does.
    """

    def __init__(self, coordination: Coordination, core: Core, own_log: LogWriter, alarm: Callable[[], str]) -> None:
        self._coordination = coordination
        self._register, self._lease = coordination.register, coordination.lease
        self._core = core
        self._node = core.node
        self._log = own_log
        self._alarm = alarm
        self._asked: ChangeRegister | None = None
        self._recovered: tuple[int, dict[str, int]] | None = None  # not in the history yet
        self._read_at = 0.0
        self._proved_at = 0.0  # when the newest write was begun that the broker has confirmed

    def change(self, effect: ChangeRegister) -> None:
        """The core asks for a change."""
        self._asked = effect

    def recovered(self, epoch: int, steps: dict[str, int]) -> None:
        """The recovery of an epoch has taken so many milliseconds in each step: for the history."""
        self._recovered = epoch, steps

    async def run(self) -> None:
        """Reads and changes the register, and renews the lease, until cancelled."""
        self._coordination.incarnation_begins()
        if self._node.lost_host:
            await self._lease.give_back("its broker went down")
        while True:
            if self._asked is not None or self._renewal_due() or time.monotonic() >= self._read_at + self._interval_s():
                await self._round()
            await asyncio.sleep(LOOK_S)

    async def prove(self) -> None:
        """Lets the own broker confirm something in each third of the lease's time while this node leads, until cancelled."""
        while True:
            if self._node.leading:
                began = time.monotonic()
                await self._log.record()
                self._proved_at = began
                self._core.feed(Progressed())
                await asyncio.sleep(max(0.0, began + self._third_s - time.monotonic()))
            else:
                await asyncio.sleep(LOOK_S)

    @property
    def _third_s(self) -> float:
        return self._coordination.ttl_s / RENEWALS_PER_TTL

    def _renewal_due(self) -> bool:
        renewed_at = self._lease.renewed_at
        proved = self._proved_at > renewed_at or bool(self._alarm())
        return bool(self._node.leading) and proved and time.monotonic() >= renewed_at + self._third_s

    def _interval_s(self) -> float:
        node, now = self._node, time.monotonic()
        heard_s = HEARD_HEARTBEATS * node.settings.heartbeat_s
        quiet = node.leading or any(now - peer.leads_at <= heard_s for peer in node.peers.values())
        return self._third_s if quiet else OFTEN_S

    async def _round(self) -> None:
        try:
            if (asked := self._asked) is not None:
                await self._carry_out(asked)
                return
            if self._renewal_due():
                await self._renew()
            self._read_at = time.monotonic()
            found = await self._register.read()
            self._coordination.noted(found)
            self._core.feed(RegisterRead(found.view(self._log_id)))
            await self._complete_history()
        except LeaseGone:
            pass  # the core sees that the key is gone, or the change is repeated with a new lease
        except LrqError as error:
            self._coordination.missed(error)
            self._core.feed(RegisterRead(None))
            if not isinstance(error, EtcdAway):
                await asyncio.sleep(self._third_s)

    async def _complete_history(self) -> None:
        """Once for each recovery: the history is for people, and no reason to count etcd as away."""
        if self._recovered is not None:
            (epoch, steps), self._recovered = self._recovered, None
            try:
                await self._register.recovered(epoch, steps)
            except LrqError as error:
                log.warning("the history in etcd lacks the steps of this recovery: %s", error)

    async def _renew(self) -> None:
        try:
            await self._lease.renew()
            self._core.feed(LeaseRenewed(self._lease.until))
        except LeaseGone:
            log.warning("the lease in etcd has ended before its time")

    async def _carry_out(self, asked: ChangeRegister) -> None:
        lease = await self._lease.hold() if asked.take else 0
        log_id = self._log_id or self._log.new_log_id.hex()
        taken = {"why": asked.why.value, "end": self._node.log.end} if asked.why else None
        done, found = await self._register.write(asked.record, log_id, asked.seen, lease, taken)
        self._asked = None
        self._coordination.noted(found)
        if done and asked.take:
            self._core.feed(LeaseRenewed(self._lease.until))
        self._core.feed(RegisterAnswered(done, found.view(self._log_id)))

    @property
    def _log_id(self) -> str:
        return self._core.replica.index.log_id.hex()
