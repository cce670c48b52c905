"""A log handler that clients cannot flood: it writes a limited number of warnings of each kind per period; then, the number left out.

A kind is a logger's text before its values are filled in. Errors and information are always written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

WARNINGS_MAX = 10
PERIOD_S = 10.0


@dataclass(slots=True)
class _Period:
    """A period of one kind of warning. `left_out`: number of warnings behind the first WARNINGS_MAX; `last`: the last of all."""

    began: float
    last: logging.LogRecord
    written: int = 0
    left_out: int = 0


class LimitedHandler(logging.StreamHandler[TextIO]):
    """The handler. `clock`: seconds that ascend."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._periods: dict[tuple[str, str], _Period] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or counts it; first reports the warnings left out in periods that are over."""
        now = self._clock()
        for key, period in list(self._periods.items()):
            if now - period.began >= PERIOD_S:
                del self._periods[key]
                if period.left_out:
                    text = f"{period.left_out} more warnings of this kind were left out; the last: {period.last.msg}"
                    super().emit(logging.LogRecord(key[0], logging.WARNING, __file__, 0, text, period.last.args, None))
        if record.levelno == logging.WARNING:
            kind = str(record.args if record.msg == "%s" else record.msg)
            period = self._periods.setdefault((record.name, kind), _Period(now, record))
            period.last = record
            if period.written >= WARNINGS_MAX:
                period.left_out += 1
                return
            period.written += 1
        super().emit(record)
