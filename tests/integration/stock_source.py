"""A source's application that keeps the stock of some items, for tests of receivers."""

from __future__ import annotations

import json
import threading

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Table

TABLE = Table("stock", ("item", "count"), ("item",))
ITEMS = 40


class Source:
    """An application with a table, which it transmits: whole in full syncs, its changes as log entries."""

    def __init__(self, lab: Lab, client_name: str, node: str = "e1", to: str = "west") -> None:
        self._to = to
        self.client_name = client_name
        self.stock = dict.fromkeys(range(ITEMS), 0)
        self.last = ""
        self._lock = threading.Lock()
        doors = [each.door for each in lab.nodes.values() if each.group == lab.nodes[node].group]
        self.publisher = Publisher(doors, f"{client_name}-app", client_name, confirm_timeout_s=60)
        self.publisher.on_full_sync(self._provide)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        for item in list(self.stock):
            with self._lock:
                rows = [{"item": item, "count": self.stock[item]}] if item in self.stock else []
                context.transmit(json.dumps({"table": "stock", "rows": rows}).encode())
        context.complete()

    def change(self, item: int, count: int | None) -> None:
        """Puts or deletes (None) an item."""
        op, row = ("put", {"item": item, "count": count}) if count is not None else ("delete", {"item": item})
        with self._lock:
            self.stock.pop(item, None)
            if count is not None:
                self.stock[item] = count
            body = json.dumps({"table": "stock", "op": op, "rows": [row]}).encode()
            self.last = self.publisher.transmit_log_entry_message(body, [self._to]).replication_id

    def change_many(self, seed: int, count: int) -> None:
        for number in range(seed, seed + count):
            self.change(number % (ITEMS + 7), None if number % 11 == 0 else number)


def doors(lab: Lab) -> list[str]:
    return [node.door for node in lab.nodes.values() if node.group == "west"]
