"""What a node knows of another node of its group, and of the connection to it. Rule: nothing is decided here, only remembered."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from .events import Hello
from .log import LogState

LOSSES_MAX = 4  # so many in a while, and it is out of the set
ARRIVES_MIN_BYTES = 64 << 10  # so much of a batch must come in backup_timeout_s


@dataclass
class RemoteBackup:
    """The view of one other node (Qpid HA: RemoteBackup). 0 <= acknowledged <= log.end."""

    connected: bool = False
    hello: Hello | None = None
    lacked: str = ""  # what its broker lacked when it was last heard
    called: bool = False  # Lead was sent on this connection and not answered yet
    subscribed: bool = False
    diverged: bool = False
    fallen: bool = False  # the log no longer has what it needs next
    left: str = ""  # why this primary took it out of the set, or (mode strict) says that it is out and waits for it; empty again when it is back
    acknowledged: int = 0
    reached: int = 0  # the most of that since `progress_at` began to be counted
    arrived: int = 0  # the most bytes that it has had of the batch behind that, as far as they count
    applied: int = 0
    epoch: int = 0  # it leads, follows or hears this one, as its last heartbeat on this connection said
    heard_at: float = -math.inf  # what it says comes on a connection of its own: it may be heard, and not be sent to
    progress_at: float = 0.0
    acked_at: float = 0.0  # the same, without what has only arrived
    admit_after: float = 0.0
    unsteady: bool = False  # it comes and goes
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_MAX))  # when it was lost while the log was sent to it, the last ones

    @property
    def answers(self) -> bool:
        """Whether it can be sent to, and has said what it has."""
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
        self.heard_at = -math.inf

    def learn_log(self, log: LogState) -> None:
        """Its log has changed since its Hello: whoever compares logs must not compare with what it was."""
        if self.hello:
            self.hello = replace(self.hello, log=log)

    def learn_top(self, top: int) -> None:
        """It has seen epoch `top`."""
        if self.hello and top > self.hello.log.top:
            self.learn_log(replace(self.hello.log, top=top))

    def flaps(self, since: float) -> bool:
        """Whether it has been lost, and come back, over and over since then."""
        return len(self.losses) == LOSSES_MAX and self.losses[0] >= since

    def begin(self, upto: int, now: float) -> None:
        """From `now` on it is to make progress; it has everything up to `upto`."""
        self.acknowledged = self.reached = upto
        self.arrived = 0
        self.progress_at = self.acked_at = now

    def progress(self, upto: int, now: float) -> None:
        """It has everything up to `upto`, as of `now`. Only what it did not have before counts: one whose link comes and goes says the same again."""
        self.acknowledged = upto
        if upto > self.reached:
            self.reached = upto
            self.arrived = 0
            self.progress_at = self.acked_at = now

    def receive(self, end: int, arriving: int, now: float) -> None:
        """It has so many bytes of the batch behind entry `end`: progress, as over a slow link the whole may take longer than it has for any.

        Not where a link comes and goes, and the batch each time no further; nor where the entry is not in its stream yet; nor where it trickles, as
        confirms would wait for it for hours.
        """
        if end == self.reached and arriving >= self.arrived + ARRIVES_MIN_BYTES:
            self.arrived = arriving
            self.progress_at = now
