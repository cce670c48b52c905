"""A transactional outbox in a SQL database: what an application writes in its own transaction is transmitted once, in commit order.

`Outbox` is the application's side, `OutboxRelay` transmits. See docs/outbox.md.
"""

from lrq_ha.publisher.outbox.errors import NoOutbox, NoTransaction, OutboxError, OutboxRestored, RelayFenced
from lrq_ha.publisher.outbox.relay import OutboxRelay, RelayStatus
from lrq_ha.publisher.outbox.states import RelayState
from lrq_ha.publisher.outbox.table import Outbox

__all__ = [
    "NoOutbox",
    "NoTransaction",
    "Outbox",
    "OutboxError",
    "OutboxRelay",
    "OutboxRestored",
    "RelayFenced",
    "RelayState",
    "RelayStatus",
]
