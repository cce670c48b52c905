"""A group's register in etcd: the keys and their JSON.

    NAMESPACE/GROUP/state          the record, and the log's identity
    NAMESPACE/GROUP/leader         the leader's id; it goes with the leader's lease
    NAMESPACE/GROUP/history/EPOCH  the leader of each epoch, since when, by which right, and from whom; for people

Rule: the history keeps the last HISTORY_MAX epochs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lrq_ha.errors import MalformedInput
from lrq_ha.replication.positions import epoch_name
from lrq_ha.replication.register import Record, RegisterView

from .etcd import Etcd, KeyValue

HISTORY_MAX = 200


class Found(NamedTuple):
    """What the register holds. `log_id`: identity of the group's log, in hexadecimal digits; empty if there is no record."""

    record: Record | None
    log_id: str
    revision: int
    holder: int
    holder_revision: int

    def view(self, log_id: str) -> RegisterView:
        """As the core sees it. `log_id`: of the node's own log; empty: it has none yet."""
        foreign = bool(log_id and self.log_id) and log_id != self.log_id
        return RegisterView(self.record, self.revision, self.holder, self.holder_revision, foreign)


class Register:
    """The register of one group.

    Args:
        etcd: The client.
        namespace: Before the group's name.
        group: The group.
        names: Names of the nodes by id, for the history.
    """

    def __init__(self, etcd: Etcd, namespace: str, group: str, names: Mapping[int, str]) -> None:
        self._etcd = etcd
        self._folder = f"{namespace.rstrip('/')}/{group}"
        self._names = names
        self._keys = (f"{self._folder}/state", f"{self._folder}/leader")

    async def read(self) -> Found:
        """What it holds now. Raises EtcdError, or MalformedInput."""
        return self._found(*await self._etcd.read(self._keys))

    async def write(self, record: Record, log_id: str, seen: RegisterView, lease: int, taken: Mapping[str, Any] | None = None) -> tuple[bool, Found]:
        """Writes a record, if the register is as it was seen.

        Args:
            lease: With which the key `leader` is written, too, if that key is as it was seen; 0: it is left alone.
            taken: More of a new epoch for the history: its right under `why`, and the `end` of the log.

        Returns:
            Whether the register has that record now, and what it holds.

        Raises:
            EtcdAway: It may have been written, and may still be: repeat this call until it is answered.
            LeaseGone: Nothing was written.
            EtcdError, MalformedInput: Nothing was written.
        """
        state, leader = self._keys
        unchanged = {state: seen.revision}
        puts = {state: (_encode(record, log_id), 0)}
        if lease:
            unchanged[leader] = seen.holder_revision
            puts[leader] = (str(record.leader).encode(), lease)
        if seen.record is None or seen.record.epoch != record.epoch:
            puts[self._history_key(record.epoch)] = (self._history(record, seen, taken or {}), 0)
        _, values = await self._etcd.change(unchanged, puts, self._keys)
        found = self._found(*values)
        return found.record == record, found

    async def release(self, node: int) -> bool:
        """Deletes the leader's key if it is this node's; returns whether it was. Raises EtcdError, or MalformedInput."""
        found = await self.read()
        return found.holder == node and await self._etcd.delete(self._keys[1], found.holder_revision)

    async def read_history(self) -> list[dict[str, Any]]:
        """The last epochs, the oldest first: `epoch`, `leader`, `from`, `at`, and if known `why`, `end` and `steps`.

        Raises:
            EtcdError, MalformedInput: It cannot be read.
        """
        found = await self._etcd.read_all(f"{self._folder}/history/")
        try:
            return [dict(json.loads(each.value)) for _, each in found]
        except (ValueError, TypeError) as error:
            raise self._malformed(error) from error

    async def recovered(self, epoch: int, steps: Mapping[str, int]) -> None:
        """Adds the steps of the recovery of an epoch, in milliseconds, to the history, and drops its oldest epochs.

        Raises:
            EtcdError, MalformedInput: It may not be so.
        """
        found = dict(await self._etcd.read_all(f"{self._folder}/history/"))
        key = self._history_key(epoch)
        if (entry := found.get(key)) is not None:
            try:
                told = json.loads(entry.value) | {"steps": dict(steps)}
            except (ValueError, TypeError) as error:
                raise self._malformed(error) from error
            await self._etcd.change({key: entry.revision}, {key: (json.dumps(told).encode(), 0)}, ())
        if len(found) > HISTORY_MAX:
            await self._etcd.delete_before(f"{self._folder}/history/", sorted(found)[-HISTORY_MAX])

    def _history_key(self, epoch: int) -> str:
        return f"{self._folder}/history/{epoch:020d}"

    def _history(self, record: Record, seen: RegisterView, taken: Mapping[str, Any]) -> bytes:
        before = self._names.get(seen.record.leader, str(seen.record.leader)) if seen.record else None
        name = self._names.get(record.leader, str(record.leader))
        told = {"epoch": epoch_name(record.epoch), "leader": name, "from": before, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        return json.dumps(told | dict(taken)).encode()

    def _malformed(self, error: Exception) -> MalformedInput:
        return MalformedInput(f"{self._folder} in etcd is not as lrq-ha writes it: {error!r}", todo="choose another namespace")

    def _found(self, state: KeyValue, leader: KeyValue) -> Found:
        try:
            record, log_id = _decode(state.value) if state.revision else (None, "")
            return Found(record, log_id, state.revision, int(leader.value or b"0"), leader.revision)
        except (ValueError, KeyError, TypeError) as error:
            raise self._malformed(error) from error


def _encode(record: Record, log_id: str) -> bytes:
    told = {"v": record.version, "epoch": record.epoch, "leader": record.leader, "set": sorted(record.members), "paused": record.paused}
    return json.dumps(told | {"log": log_id}).encode()


def _decode(value: bytes) -> tuple[Record, str]:
    told = json.loads(value)
    paused = "paused" in told and bool(told["paused"])
    return Record(int(told["v"]), int(told["epoch"]), int(told["leader"]), frozenset(map(int, told["set"])), paused), str(told["log"])
