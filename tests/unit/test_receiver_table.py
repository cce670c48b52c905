"""Each message that a receive queue can hold next, in each state of a receiver: the steps that the listener is given, and the state behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver.errors import OtherLog
from lrq_ha.receiver.machine import Apply, Begin, Complete, Hole, Machine, Reach
from lrq_ha.receiver.progress import Phase, Progress
from lrq_ha.replication.positions import Position
from lrq_ha.streams.message import Message

pytestmark = pytest.mark.proves("G6")

QUEUE = "LRQ_Recv_orders_east"
DELTA, ROWS, END = pb.LOG_ENTRY_SYNC, pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY
BASE, LAST, REPLAYED = 5, 10, 20
LOG, OTHER_LOG = b"\x01" * 16, b"\x02" * 16


def at(sequence: int) -> Position:
    return Position(257, sequence)


def message(previous: int, sequence: int, kind: pb.ReplicationType, request: str = "", *payloads: bytes, log: bytes = LOG) -> Message:
    """A batch of one transaction; `previous` 0 restarts the chain."""
    one = pb.ReceivedTransaction(position=pb.Position(epoch=257, sequence=sequence), type=kind, request_id=request, payloads=payloads)
    where = pb.Position(epoch=257 if previous else 0, sequence=previous)
    return Message(sequence, pb.ReceivedBatch(source="east", client_name="orders", previous=where, transactions=[one], log_id=log))


MESSAGES = {
    "a delta": message(LAST, LAST + 1, DELTA, "", b"x"),
    "a delta at the replay's end": message(LAST, REPLAYED, DELTA, "", b"x"),
    "a repeat": message(LAST - 1, LAST, DELTA, "", b"x"),
    "a snapshot begins": message(LAST, LAST + 1, ROWS, "new"),
    "a snapshot restarts the chain": message(0, LAST + 1, ROWS, "new"),
    "an empty snapshot restarts the chain": message(0, LAST + 1, END, "new"),
    "rows": message(LAST, LAST + 1, ROWS, "old", b"x"),
    "rows of another snapshot": message(LAST, LAST + 1, ROWS, "lost", b"x"),
    "an end": message(LAST, LAST + 1, END, "old"),
    "an end at the replay's end": message(LAST, REPLAYED, END, "old"),
    "an end of another snapshot": message(LAST, LAST + 1, END, "lost"),
    "a hole": message(LAST + 2, LAST + 3, DELTA, "", b"x"),
}


def _announced() -> Machine:
    machine = Machine(QUEUE, Progress(Phase.NORMAL, at(LAST - 1), log=LOG.hex()))
    assert machine.take([message(LAST - 1, LAST, ROWS, "old")]) == []
    return machine


_BOOTSTRAP = Progress(Phase.BOOTSTRAP, at(LAST), "old", at(BASE), missed=True, log=LOG.hex())
STATES = {
    "waiting": lambda: Machine(QUEUE, None),
    "bootstrap": lambda: Machine(QUEUE, replace(_BOOTSTRAP, missed=False)),
    "bootstrap, deltas have come": lambda: Machine(QUEUE, _BOOTSTRAP),
    "local-replay": lambda: Machine(QUEUE, Progress(Phase.LOCAL_REPLAY, at(LAST), "old", at(BASE), at(REPLAYED), log=LOG.hex())),
    "normal": lambda: Machine(QUEUE, Progress(Phase.NORMAL, at(LAST), log=LOG.hex())),
    "normal, a snapshot has begun": _announced,
}

Cells = dict[str, tuple[list[type], Phase | None]]

_NEW_SNAPSHOT: Cells = {
    "a snapshot restarts the chain": ([Begin], Phase.BOOTSTRAP),
    "an empty snapshot restarts the chain": ([Begin, Complete], Phase.NORMAL),
}
_NORMAL: Cells = _NEW_SNAPSHOT | {
    "a delta": ([Apply], Phase.NORMAL),
    "a delta at the replay's end": ([Apply], Phase.NORMAL),
    "a hole": ([Hole], None),
}
_IN_BOOTSTRAP: Cells = _NEW_SNAPSHOT | {
    "a snapshot begins": ([Begin], Phase.BOOTSTRAP),
    "rows": ([Apply], Phase.BOOTSTRAP),
    "a hole": ([Hole], None),
}
_ENDS = ("an end", "an end at the replay's end")
#: By state and message; a cell that is not here gives no step and leaves the state.
CELLS: dict[str, Cells] = {
    "waiting": _NEW_SNAPSHOT | {"a snapshot begins": ([Begin], Phase.BOOTSTRAP)},
    "bootstrap": _IN_BOOTSTRAP | dict.fromkeys(_ENDS, ([Complete], Phase.NORMAL)),
    "bootstrap, deltas have come": _IN_BOOTSTRAP | dict.fromkeys(_ENDS, ([Complete], Phase.LOCAL_REPLAY)),
    "local-replay": _NEW_SNAPSHOT | {
        "a delta": ([Apply], Phase.LOCAL_REPLAY),
        "a delta at the replay's end": ([Apply, Reach], Phase.NORMAL),
        "an end at the replay's end": ([Reach], Phase.NORMAL),
        "a hole": ([Hole], None),
    },
    "normal": _NORMAL,
    "normal, a snapshot has begun": _NORMAL,
}  # fmt: skip
#: Where reading then goes back to, so that what follows this position comes next.
REWINDS = {
    (state, end): behind for state, behind in (("bootstrap, deltas have come", BASE), ("normal, a snapshot has begun", LAST - 1)) for end in _ENDS
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("came", MESSAGES)
def test_each_message_in_each_state(state: str, came: str) -> None:
    machine = STATES[state]()
    steps, phase = CELLS[state].get(came, ([], machine.phase))
    seen = max(machine.seen, at(MESSAGES[came].batch.transactions[0].position.sequence))
    found = machine.take([MESSAGES[came]])
    assert ([type(step) for step in found], machine.phase) == (steps, phase)
    back = REWINDS.get((state, came))
    assert (machine.rewind, machine.seen) == (back is not None, seen if back is None else at(back))


@pytest.mark.parametrize("state", STATES)
def test_a_message_of_another_log_in_each_state(state: str) -> None:
    machine, came = STATES[state](), message(0, LAST + 1, ROWS, "new", log=OTHER_LOG)
    if state == "waiting":
        assert [type(step) for step in machine.take([came])] == [Begin]
        return
    with pytest.raises(OtherLog, match=OTHER_LOG.hex()):
        machine.take([came])
