"""The sidecar's AMQP port: listens, keeps the clock, and ends all connections (`gate` has the state for logins).

Rules:
- One door stays open from one incarnation to the next.
- An orderly stop takes no new connection, waits for pending confirms, and tells each client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from lrq_ha.errors import LrqError, place

from ..amqp.reply_codes import CONNECTION_FORCED
from ..amqp.tls import TlsError
from ..session.settings import DoorLimits, DoorSettings
from . import drain
from .admission import Admission
from .client_login import ClientLogin
from .gate import Gate
from .listener import Listener

log = logging.getLogger("lrq_ha.door")

TICK_MAX_S = 2.0


def _unstopped(part: Callable[..., object], *arguments: object) -> None:
    """Runs one part of the work of each second: an error must neither keep the other parts from running, nor end the clock."""
    try:
        part(*arguments)
    except Exception as error:
        log.error("what is done each second could not be done: %s", place(error))


class Door(Gate):
    """Listens for one sidecar.

    Args:
        settings: The configuration of the door.
        connections_max: Limit on connections; None: the configuration's.
    """

    def __init__(self, settings: DoorSettings, connections_max: int | None = None) -> None:
        super().__init__(settings, connections_max)
        self._client_tls = settings.client_tls
        self._listener = Listener(
            self.admit,
            self.admissions,
            partial(ClientLogin, self),
            tls=self.tls,
            handshake_timeout_s=self.config.handshake_timeout_s,
            proxies=self.config.proxy_protocol,
        )
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises LrqError if the address is in use."""
        loop = asyncio.get_running_loop()

        def on_room() -> None:  # on an interceptor's thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._interceptors_have_room)

        self.interceptors.start(on_room)
        host, _, port = self.config.listen.rpartition(":")
        try:
            await self._listener.listen(host.strip("[]"), int(port))
        except OSError as error:
            raise LrqError(f"the door cannot listen on {self.config.listen}: {error.strerror}", todo="change door.listen") from error
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            # A pause of this process itself must not look like a silence of all other hosts.
            self._now += min(time.monotonic() - began, TICK_MAX_S)
            for tick in (*(session.flow.tick for session in self.sessions), *(end.tick for end in self.peer_ends)):
                _unstopped(tick, self._now)
            _unstopped(self.interceptors.check)
            _unstopped(self.reload)

    def take_limits(self, limits: DoorLimits) -> None:
        """Goes on with a changed table `[door]`, but for the address, the limit on connections and TLS."""
        super().take_limits(limits)
        self._listener.limit(limits.handshake_timeout_s, limits.proxy_protocol)

    def reload(self, force: bool = False) -> None:
        """Reads certificates and keys again if their files have changed; with `force` in any case, and interceptors reopen their files."""
        if force:
            self.interceptors.reload()
        for what, files in (("the door's", self.tls), ("its own connections'", self._client_tls)):
            try:
                if files is not None and files.refresh(force):
                    log.info("TLS: %s certificates were read again", what)
            except TlsError as error:
                log.error("TLS: %s certificates stay as they were: %s", what, error)

    def _interceptors_have_room(self) -> None:
        if not self.interceptors.full:
            for session in list(self.sessions):
                session.flow.hold_up(False)

    def admit(self, address: str, end: Callable[[], None]) -> Admission | None:
        """Admits one more connection, which `end` ends; None if there is no room."""
        arrival = None if self._stopping else self.admissions.come(address.rpartition(":")[0], end)
        if arrival is None:
            self.rejected(address)
        return arrival

    # ---- the end -----------------------------------------------------------------------------------------------------

    @property
    def _clients(self) -> int:
        return len(self.sessions) + len(self.relays)

    def close_clients(self, reason: str) -> None:
        """Ends every connection: this node no longer serves clients."""
        for session in list(self.sessions):
            try:
                session.close_client(CONNECTION_FORCED, reason)
                session.close()
            except Exception as error:  # the other connections must still be closed
                log.error("a client's connection could not be closed in order: %s", place(error))
                session.cut_off()
                session.broker.abort()
                self.session_closed(session)
        for end in list(self.peer_ends):
            end.close()

    async def stop(self) -> None:
        """Takes no new connection, lets pending confirms finish, and tells each client. Returns when all are gone, or their time is over."""
        self._stopping = True
        self._listener.close()
        if not self._clients:
            return
        log.info("%d clients are told that this sidecar stops; up to %g s for what is under way", self._clients, self.config.stop_timeout_s)
        began = time.monotonic()
        for relay in list(self.relays):
            relay.stop("this sidecar stops", self.config.stop_timeout_s / 2)
        await drain.close(self, "this sidecar stops", self.config.stop_timeout_s)
        while self.relays and time.monotonic() < began + self.config.stop_timeout_s:
            await asyncio.sleep(drain.POLL_S)
        if self._clients:
            log.warning("%d clients have not gone in time", self._clients)
        else:
            log.info("all clients are gone after %.1f s", time.monotonic() - began)

    async def close(self) -> None:
        """Stops listening and ends everything."""
        self._stopping = True
        if self._ticker:
            self._ticker.cancel()
        self._listener.close()
        self.close_clients("this sidecar stops")
        for relay in list(self.relays):
            relay.end("this sidecar stops")
        self.vhosts.abort()
        self.interceptors.end_asking()
        await asyncio.to_thread(self.interceptors.close)
