"""A node's view of another node of its group, and of the connection to it. Rule: this class decides nothing, it only remembers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from .events import Hello
from .guard import QueueGuard
from .log import LogState

LOSSES_MAX = 4  # this many losses in a while, and the node is out of the set
ARRIVES_MIN_BYTES = 64 << 10  # this much of a batch must come in backup_timeout_s


@dataclass
class RemoteBackup:
    """The view of one other node (Qpid HA: RemoteBackup). Its guard tells how far it has this node's log. 0 <= acknowledged <= log.end."""

    connected: bool = False
    hello: Hello | None = None
    lacked: str = ""  # features that its broker lacked when it was last heard
    called: bool = False  # Lead was sent on this connection and not answered yet
    subscribed: bool = False
    diverged: bool = False
    fallen: bool = False  # the log no longer has the entries that it needs next
    left: str = ""  # why this primary took it out of the set, or (mode strict) says that it is out and waits for it; empty when it is back
    guard: QueueGuard = field(default_factory=QueueGuard)  # a new one when the node subscribes
    reached: int = 0  # its greatest `acknowledged` since `progress_at` began to be counted
    arrived: int = 0  # the most bytes that it has had of the batch behind `reached`, as far as they count
    applied: int = 0
    epoch: int = 0  # the epoch that it leads, follows or hears, by its last heartbeat on this connection
    heard_at: float = -math.inf  # its messages come on a connection of their own: it may be heard, and not be sent to
    leads_at: float = -math.inf  # its last heartbeat as a leader whose own stream makes progress (E6), if it did not say otherwise since
    progress_at: float = 0.0
    acked_at: float = 0.0  # as `progress_at`, without bytes that have only arrived
    admit_after: float = 0.0
    unsteady: bool = False  # it is flapping
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_MAX))  # times of its last losses while the log was sent to it

    @property
    def acknowledged(self) -> int:
        """End of what the node has acknowledged of this node's log."""
        return self.guard.safe_upto

    @property
    def answers(self) -> bool:
        """Whether this node can send to it, and has its Hello."""
        return self.connected and self.hello is not None

    def connect(self) -> None:
        """This node can send to it."""
        self.connected = True

    def disconnect(self) -> None:
        """This node can no longer send to it."""
        self.connected = self.called = False
        self.hello = None
        self.epoch = 0

    def fall_silent(self) -> None:
        """Its own connection to this node is lost."""
        self.heard_at = self.leads_at = -math.inf

    def learn_log(self, log: LogState) -> None:
        """The node's log has changed since its Hello: comparisons use the new state."""
        if self.hello:
            self.hello = replace(self.hello, log=log)

    def learn_top(self, top: int) -> None:
        """It has seen epoch `top`."""
        if self.hello and top > self.hello.log.top:
            self.learn_log(replace(self.hello.log, top=top))

    def flaps(self, since: float) -> bool:
        """Whether it has been lost, and come back, over and over since then."""
        return len(self.losses) == LOSSES_MAX and self.losses[0] >= since

    def begin(self, now: float) -> None:
        """From `now` on it is to make progress."""
        self.reached = self.acknowledged
        self.arrived = 0
        self.progress_at = self.acked_at = now

    def progress(self, now: float) -> None:
        """The node has acknowledged something. Only new entries count: a flapping node acknowledges its old ones again."""
        if self.acknowledged > self.reached:
            self.reached = self.acknowledged
            self.arrived = 0
            self.progress_at = self.acked_at = now

    def receive(self, end: int, arriving: int, now: float) -> None:
        """The node has this many bytes of the batch behind entry `end`: progress, as a slow link may take longer for a batch than the timeout.

        It does not count if a flapping link brings the batch no further each time, if the entry is not in the node's stream yet, or if the batch
        trickles: confirms would wait for it for hours.
        """
        if end == self.reached and arriving >= self.arrived + ARRIVES_MIN_BYTES:
            self.arrived = arriving
            self.progress_at = now
