"""Publishing with replication IDs, to the node that is primary. See docs/publisher.md."""

from typing import TYPE_CHECKING, Any

from lrq_ha.publisher.async_provider import AsyncFullSyncContext
from lrq_ha.publisher.confirm import AsyncConfirm, Confirm
from lrq_ha.publisher.errors import (
    ConfirmTimeout,
    FencedError,
    FullSyncCancelled,
    InvalidArgument,
    MessageTooLarge,
    NackedError,
    NoPrimary,
    PublisherClosed,
    Unconfirmed,
    WaitTimeout,
    WindowFull,
)
from lrq_ha.publisher.fullsync import FullSyncRequest
from lrq_ha.publisher.provider import FullSyncContext
from lrq_ha.publisher.sql_provider import SourceTable, SqlProvider
from lrq_ha.publisher.sync import Publisher
from lrq_ha.publisher.transaction import Transaction

if TYPE_CHECKING:
    from lrq_ha.publisher.async_publisher import AsyncPublisher

__all__ = [
    "AsyncConfirm",
    "AsyncFullSyncContext",
    "AsyncPublisher",
    "Confirm",
    "ConfirmTimeout",
    "FencedError",
    "FullSyncCancelled",
    "FullSyncContext",
    "FullSyncRequest",
    "InvalidArgument",
    "MessageTooLarge",
    "NackedError",
    "NoPrimary",
    "Publisher",
    "PublisherClosed",
    "SourceTable",
    "SqlProvider",
    "Transaction",
    "Unconfirmed",
    "WaitTimeout",
    "WindowFull",
]


def __getattr__(name: str) -> Any:
    """AsyncPublisher, and with it aiormq, only on first use: it is an extra."""
    if name != "AsyncPublisher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lrq_ha.publisher.async_publisher import AsyncPublisher
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiormq":
            raise
        raise ImportError("AsyncPublisher needs aio-pika and its aiormq: pip install 'CHECKOUT[async]' (the path of lrq-ha's checkout)") from error
    return AsyncPublisher
