"""Publishing with replication IDs, to whichever node is primary. See docs/publisher.md."""

from lrq_ha.publisher.confirm import Confirm
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
from lrq_ha.publisher.sync import Publisher
from lrq_ha.publisher.transaction import Transaction

__all__ = [
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
    "Transaction",
    "Unconfirmed",
    "WaitTimeout",
    "WindowFull",
]
