"""Silences the log of pika and aiormq for publishers' connections.

These libraries log half a dozen errors for every refused connection; a link handles all of them and reports them in one line of its own. Other
users of these libraries in this process are not affected: a link marks the context that its connection runs in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_LOGGERS: Final = (
    *(
        f"pika.{module}"
        for module in ("connection", "channel", "heartbeat", "adapters.base_connection", "adapters.select_connection",
                       "adapters.utils.connection_workflow", "adapters.utils.io_services_utils")
    ),
    "aiormq.connection",
)  # fmt: skip

_ours: ContextVar[bool] = ContextVar("lrq_publisher_connection", default=False)


class _Quiet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _ours.get() or record.levelno >= logging.CRITICAL


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_Quiet())


@contextmanager
def quiet() -> Iterator[None]:
    """Silences them for this context, and the tasks that it makes meanwhile."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
