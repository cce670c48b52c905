"""How far a receiver has come in a queue: the value that is kept with the application's data.

Rule: positions are the source's. Stream offsets differ between brokers, and are never kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from lrq_ha.errors import MalformedInput
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START


class Phase(Enum):
    """The phases of a queue that has had the beginning of a snapshot."""

    BOOTSTRAP = "bootstrap"
    LOCAL_REPLAY = "local-replay"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class Progress:
    """The committed progress in one receive queue.

    Attributes:
        phase: Of the queue.
        position: Everything up to here was given, as far as the phase gives it.
        request_id: BOOTSTRAP and LOCAL_REPLAY: the full sync.
        base: BOOTSTRAP and LOCAL_REPLAY: where the full sync begins.
        end: LOCAL_REPLAY: where the full sync ended.
        missed: BOOTSTRAP: whether deltas that came during the full sync, up to `position`, may not have been given. A text of an older release
            does not say; so they may.
        log: Identity of the source's log, in hexadecimal digits; empty: not known.
    """

    phase: Phase
    position: Position
    request_id: str = ""
    base: Position = START
    end: Position = START
    missed: bool = True
    log: str = ""

    def to_text(self) -> str:
        """A text for a database. The text of a value that was read equals the text that was read: stores compare it."""
        rest = [*([] if self.missed else [False]), *([self.log] if self.log else [])]
        return json.dumps([self.phase.value, *self.position, self.request_id, *self.base, *self.end, *rest])

    @classmethod
    def from_text(cls, text: str) -> Progress:
        """The progress of a text. Raises MalformedInput if `to_text` has not made it."""
        try:
            phase, epoch, sequence, request_id, base_epoch, base_sequence, end_epoch, end_sequence, *rest = json.loads(text)
            positions = (Position(epoch, sequence), str(request_id), Position(base_epoch, base_sequence), Position(end_epoch, end_sequence))
            log = str(rest.pop()) if rest and rest[-1] else ""
            if rest not in ([], [False]) or bytes.fromhex(log).hex() != log:
                raise ValueError(f"{rest} and {log!r} behind the positions")
            return cls(Phase(phase), *positions, missed=not rest, log=log)
        except (ValueError, TypeError) as error:
            raise MalformedInput(f"{text!r} is no position of a receiver", todo="Restore the table of positions from a backup.") from error
