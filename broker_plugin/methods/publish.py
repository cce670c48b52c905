"""A client's publishes: into the log and, when safe, to the broker; and the mapping of confirms. The hottest half of the door.

Rules:
- A publish enters the log only if the broker has allowed it (`permissions`).
- A run of consecutive publishes is one entry of the log, of any length. A content that needs a stamp has its header frame rebuilt, its body never.
- The broker's answers become the client's through confirms.Confirms. A publish that the broker refuses, or whose fate cannot be known, becomes
  REFUSED, unless a copy of it has been seen.
- R6: an ID that is in the log is not appended again (`duplicates`). An ID that gets free, as its publish is refused or comes back, may be used for
  another message: the client hears of it when that is safe.
- Local completion: the confirm comes when the own stream has the entry; all else is unchanged. No confirmed message may be lost while this node
  lives, so local completion is only for messages that the broker will take: allowed, and not too large. One case remains: the nack of a full
  reject-publish queue comes too late.
"""

from __future__ import annotations

from collections.abc import Iterable

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.deduplication import ReplicationId

from ..amqp import death_headers, direct_reply, encode, frames, reply_codes
from ..amqp.content_header import BODY_SIZE_END, check_header, cut, is_judged, routes_on
from ..amqp.frames import BASIC_ACK, BASIC_PUBLISH, Item, publish_route
from ..log.messages import Settled
from ..log.stamps import POSITION_BYTES_MAX, position_field, replication_id, stamp
from ..session.channel import ClientChannel
from ..session.decisions import IN_LOG, LOCAL, LOGGED, UNASKED, Decision
from ..session.session import ClientSession
from ..session.transaction import Transaction
from . import acknowledge, closing, duplicates, permissions, publisher_confirms, routes, routing_queues
from .duplicates import GAPS

EARLY_BYTES_MAX = 128 << 10  # larger messages get their confirm from the broker, which has a size limit of its own
VIEW_BYTES_MIN = 4096  # a smaller body is copied faster than sliced through a memoryview
WHOLE_SHARE = 4  # a run of less than this part of the read chunk is copied: until its batch is made, it would keep the whole chunk in memory


# ---- from the client -------------------------------------------------------------------------------------------------------


def take(session: ClientSession, data: bytes, items: list[Item], at: int) -> int:
    """Takes a run of publishes, beginning with items[at]. Returns the index of the first item that it did not take.

    If the broker has to be asked about that item first, session.permission_needed is set.
    """
    acknowledge.flush(session)
    session.alarm.publishes()
    replica = session.replica
    number = items[at][1]
    channel = session.channel(number)
    if channel.tx is not None:
        return _rehearse(session, channel, channel.tx, data, items, at)
    producer_key = session.producer_key
    decisions = session.decisions
    prefix, suffix = replica.stamp_affixes
    logged, local = LOGGED, LOCAL
    first = sequence = replica.next_sequence
    stamps = session.stamps
    stamps.renew(replica.stamp_affixes, sequence)
    turn = stamps.turn
    alike = last = before = after = b""  # the message before: all but its body; its header; the parts around the sequence in the broker's version
    run_number = next_number = 0
    run_has_ids = False
    way = logged
    lengths: list[int] = []
    stored: list[bytes | memoryview] = []
    view = memoryview(data)
    slice_from = slice_to = -1
    out: list[bytes | memoryview] = []
    total, room, depth_max = len(items), session.header_bytes_max, session.door.config.header_depth_max
    body_bytes_max = session.door.config.message_bytes_max
    malformed: LrqError | None = None
    try:
        while at < total:
            kind, same, start, end, header, header_end, stop = items[at]
            if alike and data[start - 7 : header_end] == alike and sequence < turn:
                out += (b"%b%d%b" % (before, sequence, after), (view if stop - header_end > VIEW_BYTES_MIN else data)[header_end:stop])
                lengths.append(stop - start + 7)
                slice_to = stop
                sequence += 1
                at += 1
                continue
            alike = b""
            if kind != BASIC_PUBLISH or not stop or same != number:
                break
            if channel.closing:
                at += 1
                continue
            if stop - header_end > body_bytes_max and (size := frames.body_size(data, header)) > body_bytes_max:
                if lengths:
                    break
                closing.too_large(session, channel, size, body_bytes_max)
                continue
            method = data[start:end]
            decision = decisions.get(method) or _decide(session, channel, method)
            if decision is not logged:
                if decision is UNASKED:
                    session.permission_needed = True
                    break
                decision = _of_message(decision, data[header:header_end], stop - header_end)
            if decision is not way:
                if lengths:
                    break
                way = decision
            if way is not logged and way is not local:
                way = logged
                at += 1
                body = frames.body_of(data, header_end, stop)
                elsewhere = routing_queues.take if session.watch is None else session.watch.elsewhere
                elsewhere(session, channel, decision, method, data[header:header_end], body, data[start - 7 : stop])
                if session.gone(channel):
                    return total
                first = sequence = replica.next_sequence
                continue
            payload = data[header:header_end]
            if sequence >= turn:
                stamps.renew(replica.stamp_affixes, sequence)
                turn = stamps.turn
            known = stamps.get(payload[BODY_SIZE_END:])
            if known is not None:
                if lengths and run_has_ids:
                    break
                if slice_to != start - 7:
                    if slice_to >= 0:
                        stored.append(view[slice_from:slice_to])
                    slice_from = start - 7
                slice_to = stop
                lengths.append(stop - start + 7)
                before, after, longer = known
                head = encode.header_head(number, len(payload) + longer)
                before = b"%b%b%b%b" % (data[start - 7 : header - 7], head, payload[:BODY_SIZE_END], before)
                out += (b"%b%d%b" % (before, sequence, after), (view if stop - header_end > VIEW_BYTES_MIN else data)[header_end:stop])
                if payload == last:
                    alike = data[start - 7 : header_end]
                last = payload
                sequence += 1
                at += 1
                continue
            if is_judged(payload) and channel.committing is None and permissions.missing(session, method, payload) is not None:
                session.permission_needed = True
                break
            original = payload
            has_id = False
            rid = replication_id(payload) if b"x-lrq-id" in payload else None
            if rid is not None and producer_key:
                identity = _identity(session, rid)
                if identity is not None:
                    has_id = True
                    if lengths and not (run_has_ids and identity.sequence == next_number):
                        break
                    if replica.index.dedup.seen(producer_key, identity.sequence):
                        if lengths:
                            break
                        at += 1
                        session.repeats.take(channel, identity.sequence, early=way is local)
                        if session.watch is not None:
                            session.watch.repeated(number, method, payload)
                        continue
                    if not lengths and channel.committing is None and not duplicates.may_number(session, identity.sequence):
                        closing.refuse_publish(session, channel, reply_codes.PRECONDITION_FAILED, GAPS)
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
            if death_headers.HINT in payload:
                payload = death_headers.escape(payload)
            check_header(payload, depth_max)
            stamped = stamp(payload, position_field(b"%b%d%b" % (prefix, sequence, suffix)))
            size = len(stamped)
            if size > room:
                raise closing.no_room(session, len(payload))
            if not routes_on(payload):  # an exchange may check the keys in CC and BCC
                stamps.learn(payload, stamped, sequence)
            sequence += 1
            at += 1
            if payload is original:
                lengths.append(stop - start + 7)
                if slice_to == start - 7:
                    slice_to = stop
                else:
                    if slice_to >= 0:
                        stored.append(view[slice_from:slice_to])
                    slice_from, slice_to = start - 7, stop
            else:
                if slice_to >= 0:
                    stored.append(view[slice_from:slice_to])
                    slice_to = -1
                changed = b"".join((data[start - 7 : header - 7], encode.header_head(number, len(payload)), payload, data[header_end:stop]))
                lengths.append(len(changed))
                stored.append(changed)
            body_frames = (view if stop - header_end > VIEW_BYTES_MIN else data)[header_end:stop]
            out += (data[start - 7 : header - 7], encode.header_head(number, size), stamped, body_frames)
    except LrqError as error:  # the publishes before the malformed one are taken, as a broker does
        malformed = error
    if lengths:
        if slice_to >= 0:
            stored.append(view[slice_from:slice_to])
        run = pb.Run()
        entry = run.enqueues
        entry.vhost = session.vhost
        entry.channel = number
        entry.lengths.extend(lengths)
        if run_has_ids:
            entry.producer = producer_key
            entry.id_first = run_number
            if session.ascending:
                entry.id_skipped = duplicates.skipped_before(session, run_number)
        count = len(lengths)
        # Where the frames are needed again:
        if way is local or session.watch is not None or channel.committing is not None or replica.node.log.unfinished:
            entry.frames = b"".join(stored)
            stored = []
        size = sum(lengths)
        if size < len(data) // WHOLE_SHARE:
            stored = [bytes(piece) for piece in stored]
        replica.append(run, count, size, contents=stored)
        if session.watch is not None:
            session.watch.enqueued(number, first, run)
        blob = b"".join(out)
        if channel.committing is not None:
            channel.committing.runs.append((first, run))
        else:
            publisher_confirms.need_broker_confirms(session, channel)
            forwarded = _forwarded if way is logged else _forwarded_early
            forwarded(session, channel, first, run)
        session.outbox.put(blob, first + count - 1)
    if malformed is not None:
        raise malformed
    return at


def _of_message(decision: Decision, header: bytes, size: int) -> Decision:
    """The destination of one message whose route is not simply LOGGED."""
    if decision is LOCAL:
        return decision if _may_be_early(header, size) else LOGGED
    return LOGGED if routes.names_more(decision, header) else decision


def _may_be_early(header: bytes, size: int) -> bool:
    """Whether the broker, which allows this message, takes it in any case, and for one queue."""
    return size <= EARLY_BYTES_MAX and not routes_on(header)


def _forwarded(_session: ClientSession, channel: ClientChannel, first: int, run: pb.Run) -> None:
    """Notes that a run goes to the broker, as the entries from `first` on."""
    entry = run.enqueues
    channel.confirms.forwarded(len(entry.lengths), first, entry.producer, entry.id_first)


def _forwarded_early(session: ClientSession, channel: ClientChannel, first: int, run: pb.Run) -> None:
    """Like `_forwarded`, with local completion where the client has selected confirms."""
    if not channel.confirms.selected:
        _forwarded(session, channel, first, run)
        return
    entry = run.enqueues
    count = len(entry.lengths)
    tag = channel.confirms.forwarded_early(count, first, entry.producer, entry.id_first)
    channel.early.append((first, run))
    session.replica.progress.early.add(first, first + count - 1)
    publisher_confirms.until_durable(session, channel, tag, count, first + count - 1, len(entry.frames))


def _rehearse(session: ClientSession, channel: ClientChannel, tx: Transaction, data: bytes, items: list[Item], at: int) -> int:
    """Within a transaction: to the broker's transaction unchanged, and into the log at commit (see `transactions`). Finds all errors now."""
    if channel.closing:
        return at + 1  # sent before the client knew
    first, begin, upto, total = at, items[at][2] - 7, 0, len(items)
    while at < total:
        kind, number, start, end, header, header_end, stop = items[at]
        if kind != BASIC_PUBLISH or not stop or number != channel.number:
            break
        size = frames.body_size(data, header)
        if size > session.door.config.message_bytes_max:
            if upto:
                break
            closing.too_large(session, channel, size, session.door.config.message_bytes_max)
            return at + 1
        payload = data[header:header_end]
        check_header(payload, session.door.config.header_depth_max)
        if len(death_headers.escape(payload)) + POSITION_BYTES_MAX > session.header_bytes_max:
            raise closing.no_room(session, len(payload))
        if session.producer_key and b"x-lrq-id" in payload and (raw := replication_id(payload)) is not None:
            identity = _identity(session, raw)
            if identity is not None:
                follows = session.ascending or session.replica.index.dedup.adjoins(session.producer_key, identity.sequence)
                tx.number(identity.sequence, follows=follows)
        if direct_reply.is_answer(data[start:end]):
            if upto:
                break
            shown = encode.frame(frames.METHOD, number, direct_reply.answer_to_nobody(data[start:end])) + data[header - 7 : stop]
            acknowledge.rehearse(session, channel, tx, shown, BASIC_PUBLISH)
            tx.keep_instead(data[begin:stop])
            return at + 1
        at, upto = at + 1, stop
    acknowledge.rehearse(session, channel, tx, data[begin:upto], BASIC_PUBLISH, at - first)
    return at


def _decide(session: ClientSession, channel: ClientChannel, method: bytes) -> Decision:
    """The destination of publishes with this method frame; remembered if it is known."""
    route = publish_route(method)
    decision = routes.decide(session, route)
    if decision in IN_LOG and channel.committing is None and permissions.of_route(session, route) not in session.rights:
        return UNASKED
    if len(session.decisions) >= frames.ROUTES_MAX:
        session.decisions.clear()
    session.decisions[method] = decision
    return decision


def _identity(session: ClientSession, raw: bytes) -> ReplicationId | None:
    """An ID of the announced producer; None for any other, as of a consumer that publishes its deliveries unchanged."""
    if not raw.startswith(session.id_prefix):
        return None
    return ReplicationId.parse(raw)


def took(session: ClientSession, channel: ClientChannel, first: int, count: int, producer: str) -> tuple[list[int], int]:
    """The broker has acked publishes: they are in the queues, except those that it returned before, whose IDs are free again.

    (Else a repeat would be acked, and a producer that repeats after a failover would never hear that the message is in no queue.)
    Returns the entries of these IDs, and the entry that frees them.
    """
    replica = session.replica
    back = sorted(sequence for sequence in channel.returned if first <= sequence < first + count) if channel.returned else []
    channel.returned.difference_update(back)
    if not producer:
        back.clear()
    freed = replica.refuse(Settled(0, 1, sequence, producer, 0) for sequence in back) if back else 0
    for sequence in back:
        if first < sequence:
            replica.progress.applied(first, sequence - 1)
        count -= sequence + 1 - first
        first = sequence + 1
    if count:
        replica.progress.applied(first, first + count - 1)
    return back, freed


def answered(session: ClientSession, number: int, kind: int, data: bytes, start: int) -> bytes:
    """The broker's ack or nack of publishes. Returns the frames for the client."""
    channel = session.channel(number)
    confirms = channel.confirms
    tag, bits = frames.tag_and_bits(data, start)
    multiple, ok = bool(bits & 1), kind == BASIC_ACK
    settled = confirms.answered(tag, multiple)
    later: set[int] = set()
    for run in settled:
        if run.sequence:
            back: Iterable[int] = ()
            if ok:
                back, freed = took(session, channel, run.sequence, run.publishes, run.producer)
            else:
                freed = session.replica.refuse([run])
                if run.producer:
                    back = range(run.sequence, run.sequence + run.publishes)
                if channel.early and channel.early_run(run.sequence):
                    session.door.refused_after_confirm(run.publishes)
            if back and run.client_tag:
                later.update(_answer_when_free(session, channel, run, back, freed, ok))
    if channel.early:
        channel.forget_early()
    if session.watch is not None:
        session.watch.answered(number, settled, ok)
    answers = b""
    tagged = [run for run in settled if run.client_tag]
    if channel.speaks and tagged:
        client_last = tagged[-1].client_tag + tagged[-1].publishes - 1
        make = encode.ack if ok else encode.nack
        if multiple and not confirms.covers_others(client_last) and (ok or not session.held_confirms):
            answers = make(number, client_last, True)
        else:
            tags = (t for run in tagged for t in range(run.client_tag, run.client_tag + run.publishes) if t not in later)
            answers = b"".join(make(number, t) for t in tags)
        if ok and session.replica.holds_confirms:
            session.confirm(channel, answers)
            answers = b""
    if not channel.unanswered:
        closing.settled(session, channel)
    return answers


def _answer_when_free(session: ClientSession, channel: ClientChannel, run: Settled, entries: Iterable[int], freed: int, ok: bool) -> list[int]:
    """Answers publishes of a run whose IDs get free, when entry `freed` is safe. Returns their tags.

    A client that hears of it may give these IDs to other messages. No node may then take those messages for repeats, and confirm them.
    """
    tags = [run.client_tag + entry - run.sequence for entry in entries]
    for tag in tags:
        channel.confirms.local.add(tag)
        if freed:  # else this node is no longer the primary that could say so, and its clients' connections end
            publisher_confirms.confirm_when_safe(session, channel, tag, freed, ok)
    return tags
