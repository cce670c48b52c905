"""Keeps an application at a sink in step with a source: a whole snapshot, then every delta, in order.

`Receiver` reads `LRQ_Recv_<client_name>_<source>` and gives a `Listener` one list of updates at a time. A `SqlListener` commits its position and
its data in one transaction, so each list is applied exactly once.

`AsyncReceiver` does that for a program with an event loop; the methods of an `AsyncListener` may be coroutines.

Payloads must be absolute (put and delete by key): after a snapshot, deltas that came meanwhile are given again.
"""

from .async_listener import AsyncListener
from .async_receiver import AsyncReceiver
from .errors import Fenced, OtherLog, ReceiverError, Redelivery, Stop, Trimmed
from .forwarder import Forwarder
from .listener import Listener
from .positions import SqlPositions
from .progress import Phase, Progress
from .receiver import Receiver, SourceStatus
from .sql import SqlListener
from .states import State
from .table_listener import Table, TableListener
from .updates import Snapshot, Update, UpdateType

__all__ = [
    "AsyncListener",
    "AsyncReceiver",
    "Fenced",
    "Forwarder",
    "Listener",
    "OtherLog",
    "Phase",
    "Progress",
    "Receiver",
    "ReceiverError",
    "Redelivery",
    "Snapshot",
    "SourceStatus",
    "SqlListener",
    "SqlPositions",
    "State",
    "Stop",
    "Table",
    "TableListener",
    "Trimmed",
    "Update",
    "UpdateType",
]
