"""What a client publishes: into the log and, when safe, to the broker; and whose confirm it becomes. The hottest half of the door.

Rules:
- A run of publishes that follow each other is one entry of the log, however many they are. A content that needs a stamp has its header frame
  rebuilt, its body never.
- The broker's answers become the client's through channels.Confirms; what the broker refuses, or whose fate nobody can know, becomes REFUSED,
  unless a copy of it has been seen.
- R6: an ID that is in the log is not appended again; its confirm waits for the first entry's.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pamqp import commands

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import STAMP_MAX_BYTES
from lrq_ha.replication.ids import ReplicationId

from . import closing, endpoints, frames, settling
from .channels import Channel, Transaction
from .frames import BASIC_ACK, BASIC_PUBLISH, FrameError, Item, publish_route
from .headers import check_header, cut, position_field, replication_id, stamp

if TYPE_CHECKING:
    from .relay import Relay

TRANSACTION_BYTES_MAX = 64 << 20
POSITION_BYTES_MAX = 4 + len(position_field(b"")) + STAMP_MAX_BYTES  # what a stamp may add to a content header


# ---- from the client -------------------------------------------------------------------------------------------------------


def take(relay: Relay, data: bytes, items: list[Item], at: int) -> int:
    """Takes a run of publishes, beginning with items[at]; returns the index of the first item it did not take."""
    settling.flush(relay)
    relay.alarm.publishes()
    replica = relay.replica
    number = items[at][1]
    channel = relay.channel(number)
    if channel.tx is not None:
        return _rehearse(relay, channel, channel.tx, data, items, at)
    producer_key = relay.producer_key
    decisions = relay.decisions
    prefix, suffix = replica.stamp_affixes
    first = sequence = replica.next_sequence
    run_number = next_number = 0
    run_has_ids = False
    lengths: list[int] = []
    stored: list[bytes] = []
    slice_from = slice_to = -1
    out: list[bytes] = []
    total, room = len(items), relay.header_bytes_max
    while at < total:
        kind, same, start, end, header, header_end, stop = items[at]
        if kind != BASIC_PUBLISH or not stop or same != number:
            break
        method = data[start:end]
        decision = decisions.get(method) or _decide(relay, method)
        if channel.closing:
            at += 1
            continue
        if decision is not endpoints.LOGGED:
            if lengths:
                break
            at += 1
            body = frames.body_of(data, header_end, stop)
            elsewhere = endpoints.take if relay.watch is None else relay.watch.elsewhere
            elsewhere(relay, channel, decision, method, data[header:header_end], body, data[start - 7 : stop])
            if relay.closed or relay.client is None:
                return total
            first = sequence = replica.next_sequence
            continue
        payload = data[header:header_end]
        original = payload
        has_id = False
        rid = replication_id(payload) if b"x-lrq-id" in payload else None
        if rid is not None and producer_key:
            identity = _identity(relay, rid)
            if identity is not None:
                has_id = True
                if lengths and not (run_has_ids and identity.sequence == next_number):
                    break
                known = replica.dedup.seen(producer_key, identity.sequence)
                if known:
                    if lengths:
                        break
                    at += 1
                    _repeat(relay, channel, producer_key, identity.sequence)
                    if relay.watch is not None:
                        relay.watch.repeated(number, method, payload)
                    continue
                next_number = identity.sequence + 1
                if not lengths:
                    run_number, run_has_ids = identity.sequence, True
        if not has_id:
            if lengths and run_has_ids:
                break
            if b"x-lrq-id" in payload:
                payload = cut(payload, b"x-lrq-id")  # an ID counts only with its announced producer
        if b"x-lrq-pos" in payload:
            payload = cut(payload, b"x-lrq-pos")
        check_header(payload)
        stamped = stamp(payload, position_field(b"%b%d%b" % (prefix, sequence, suffix)))
        sequence += 1
        at += 1
        if payload is original:
            lengths.append(stop - start + 7)
            if slice_to == start - 7:
                slice_to = stop
            else:
                if slice_to >= 0:
                    stored.append(data[slice_from:slice_to])
                slice_from, slice_to = start - 7, stop
        else:
            if slice_to >= 0:
                stored.append(data[slice_from:slice_to])
                slice_to = -1
            changed = b"".join((data[start - 7 : header - 7], frames.header_head(number, len(payload)), payload, data[header_end:stop]))
            lengths.append(len(changed))
            stored.append(changed)
        size = len(stamped)
        if size > room:
            raise _no_room(relay, len(payload))
        out += (data[start - 7 : header - 7], frames.header_head(number, size), stamped, data[header_end:stop])
    if lengths:
        if slice_to >= 0:
            stored.append(data[slice_from:slice_to])
        run = pb.Run()
        entry = run.enqueues
        entry.vhost = relay.vhost
        entry.channel = number
        blob = stored[0] if len(stored) == 1 else b"".join(stored)
        entry.frames = blob
        entry.lengths.extend(lengths)
        if run_has_ids:
            entry.producer = producer_key
            entry.id_first = run_number
        count = len(lengths)
        replica.append(run, count, len(blob))
        if relay.watch is not None:
            relay.watch.enqueued(number, first, run)
        if channel.committing is not None:
            channel.committing.runs.append((first, run))
        else:
            _confirmed_by_broker(relay, channel)
            channel.confirms.forwarded(count, first, producer_key if run_has_ids else "", run_number)
        relay.outbox.put(b"".join(out), first + count - 1)
    return at


def _rehearse(relay: Relay, channel: Channel, tx: Transaction, data: bytes, items: list[Item], at: int) -> int:
    """Within a transaction: to the broker's own as it came, into the log at commit (see `transacting`). All that can be wrong is found now."""
    if channel.closing:
        return at + 1  # sent before the client knew
    begin, end, total = items[at][2] - 7, 0, len(items)
    while at < total:
        kind, number, _, _, header, header_end, stop = items[at]
        if kind != BASIC_PUBLISH or not stop or number != channel.number:
            break
        payload = data[header:header_end]
        check_header(payload)
        if len(payload) + POSITION_BYTES_MAX > relay.header_bytes_max:
            raise _no_room(relay, len(payload))
        if b"x-lrq-id" in payload and (raw := replication_id(payload)) is not None:
            _identity(relay, raw)
        at, end = at + 1, stop
    tx.keep(data[begin:end])
    if tx.bytes > TRANSACTION_BYTES_MAX:
        refuse(relay, channel, 406, f"a transaction of more than {TRANSACTION_BYTES_MAX} bytes")
    else:
        relay.outbox.put(data[begin:end])
    return at


def _no_room(relay: Relay, size: int) -> FrameError:
    return FrameError(
        f"a message's headers of {size} bytes and its position are more than {relay.header_bytes_max}; "
        "the limits are the frame size and door.header_bytes_max"
    )


def _decide(relay: Relay, method: bytes) -> endpoints.Decision:
    if len(relay.decisions) >= frames.ROUTES_MAX:
        relay.decisions.clear()
    decision = relay.decisions[method] = endpoints.decide(relay, publish_route(method))
    return decision


def _identity(relay: Relay, raw: bytes) -> ReplicationId | None:
    """An ID of the announced producer; None for any other, as of a consumer that publishes what it received."""
    if not raw.startswith(relay.id_prefix):
        return None
    return ReplicationId.parse(raw)


def _confirmed_by_broker(relay: Relay, channel: Channel) -> None:
    """The door needs the broker's answers to these publishes, whether or not the client asked for them."""
    if not channel.broker_confirms:
        channel.broker_confirms = True
        relay.outbox.put(frames.method_frame(channel.number, commands.Confirm.Select(nowait=True)))


def pass_on(relay: Relay, channel: Channel, blob: bytes) -> None:
    """A publish that is not replicated: to the broker as it came."""
    if channel.committing is None and (relay.producer_key or channel.confirms.selected or channel.broker_confirms):
        _confirmed_by_broker(relay, channel)
        channel.confirms.forwarded(1, 0)
    relay.outbox.put(blob)


def ended_here(relay: Relay, channel: Channel, sequence: int) -> None:
    """A publish that ended here as log entry `sequence`: it is acked when that is safe (0: now)."""
    tag = channel.confirms.ended_here()
    if not tag:
        return
    if sequence <= relay.replica.safe:
        _confirm(relay, channel, tag)
    else:
        relay.until_safe.append((channel, tag, sequence))
        relay.replica.waiting_safe.add(relay)


def refuse(relay: Relay, channel: Channel, code: int, text: str) -> None:
    """A publish that the door does not take: the channel is closed, as a broker would."""
    relay.door.counters["refused_publishes"] += 1
    closing.refuse(relay, channel, code, text, BASIC_PUBLISH)


def _repeat(relay: Relay, channel: Channel, producer: str, number: int) -> None:
    relay.door.counters["repeats"] += 1
    if channel.committing is not None:
        channel.committing.after = max(channel.committing.after, relay.replica.dedup.position_of(producer, number) or 0)
        return
    tag = channel.confirms.ended_here()
    if not tag:
        return
    sequence = relay.replica.dedup.position_of(producer, number)
    if sequence is None or relay.replica.tracker.is_applied(sequence):
        _confirm(relay, channel, tag)
    else:
        relay.until_applied.append((channel, tag, sequence, number))
        relay.replica.waiting_applied.add(relay)


def _confirm(relay: Relay, channel: Channel, tag: int, ok: bool = True) -> None:
    channel.confirms.local.discard(tag)
    if channel.speaks:
        relay.to_client(frames.ack(channel.number, tag) if ok else frames.nack(channel.number, tag))


def select_confirms(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """confirm.select."""
    channel.confirms.selected = channel.broker_confirms = True
    relay.outbox.put(frames.frame(frames.METHOD, channel.number, payload))  # a broker that has it on already just answers


# ---- what became of it -----------------------------------------------------------------------------------------------------


def safe_advanced(relay: Relay) -> None:
    """The log is safe further than before: acks what ended here."""
    safe = relay.replica.safe
    waiting = relay.until_safe
    while waiting and waiting[0][2] <= safe:
        channel, tag, _ = waiting.popleft()
        _confirm(relay, channel, tag)
    if waiting:
        relay.replica.waiting_safe.add(relay)


def applied_advanced(relay: Relay) -> None:
    """More of the log is in the queues and confirmed: answers repeats."""
    tracker, dedup = relay.replica.tracker, relay.replica.dedup
    left: deque[tuple[Channel, int, int, int]] = deque()
    for channel, tag, sequence, number in relay.until_applied:
        if tracker.is_applied(sequence):
            # The first one was refused: its ID is free again, and the repeat is refused too.
            _confirm(relay, channel, tag, dedup.seen(relay.producer_key, number))
        else:
            left.append((channel, tag, sequence, number))
    relay.until_applied = left
    if left:
        relay.replica.waiting_applied.add(relay)


def answered(relay: Relay, number: int, kind: int, data: bytes, start: int) -> bytes:
    """The broker's ack or nack of publishes. Returns the frames for the client."""
    channel = relay.channel(number)
    confirms = channel.confirms
    tag, bits = frames.tag_and_bits(data, start)
    multiple, ok = bool(bits & 1), kind == BASIC_ACK
    settled = confirms.answered(tag, multiple)
    for run in settled:
        if run.sequence:
            if ok:
                relay.replica.applied(run.sequence, run.sequence + run.publishes - 1)
            else:
                relay.replica.refuse([run])
    if relay.watch is not None:
        relay.watch.answered(settled, ok)
    answers = b""
    if channel.speaks and any(run.client_tag for run in settled):
        last = settled[-1]
        client_last = last.client_tag + last.publishes - 1
        make = frames.ack if ok else frames.nack
        if multiple and not (confirms.local and min(confirms.local) <= client_last):
            answers = make(number, client_last, True)
        else:
            answers = b"".join(make(number, t) for run in settled if run.client_tag for t in range(run.client_tag, run.client_tag + run.publishes))
    if not channel.unanswered:
        closing.settled(relay, channel)
    return answers
