"""Publishes and questions that end at the door instead of at the broker: routing queues, and pushes of other nodes and sites.

Rules:
- In the vhost `lrq` a client publishes to `LRQ_Send_LogEntries`, `LRQ_Send_SnapSync`, `LRQ_Status`, `LRQ_Demand` and `LRQ_Commit` only; each message
  becomes an entry of the log and is acked when that entry is safe.
- A publish that ends here never reaches the broker. It must take no less right than there. So at the login of a producer the broker is asked whether
  the user may publish to queues by their names (write on `amq.default`); a client without a producer publishes nothing here.
- Clients read `LRQ_Recv_*` and `LRQ_Status`, as far as the broker lets them. The log and the views hold messages of others.
- Only another sidecar (its user is the one that this sidecar itself uses at its broker) pushes batches, control messages and receptions.
- A producer's last number is asked in vhost `lrq`, for any vhost in which the producer publishes, or by the producer itself where it publishes: the
  answer is the greatest number of any vhost.
- A question is a passive declaration. The answer to a client library is in the two counts of declare-ok (pika takes only an answer that names the
  queue it asked for), the answer to another sidecar in the name, which has room for 255 bytes, and in the counts. A receiver's question is a
  basic.get: the answer is a message that the door makes. A position is told to the user of its receiver only.
"""

from __future__ import annotations

from typing import Any

from pamqp import commands

from lrq_ha.errors import LrqError, NotPrimary
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.deduplication import ReplicationId
from lrq_ha.routing import chain, names, statuses
from lrq_ha.routing.commits import COMMIT_BYTES_MAX
from lrq_ha.routing.names import DEMANDS_QUESTION, SINK_QUESTION
from lrq_ha.routing.sink import Accept, AcceptTrimmed, Gap

from ..amqp import encode, frames, reply_codes
from ..amqp.content_header import cut
from ..amqp.frames import Route
from ..amqp.reply_codes import NO_ROUTE
from ..log.stamps import replication_id
from ..session.channel import ClientChannel
from ..session.decisions import Decision
from ..session.session import ClientSession
from . import closing, duplicates, publisher_confirms

NAMES_SHOWN = 10
REQUEST_ID_BYTES_MAX = 128  # the request ID is part of the answer to another sidecar
DEMAND_BYTES_MAX = 1_024
_COUNT_MAX = (1 << 32) - 1  # of a declare-ok
_OF_PRODUCERS = (Decision.TRANSMIT, Decision.STATUS, Decision.DEMAND, Decision.COMMIT)


def may_read(session: ClientSession, queue: str) -> bool:
    """Whether the door lets a client read a queue; the broker is asked afterwards."""
    return not names.is_routing(session.vhost) or queue == names.STATUS or names.parse_recv_queue(queue) is not None


def take(session: ClientSession, channel: ClientChannel, decision: Decision, method: bytes, header: bytes, body: bytes, blob: bytes) -> None:
    """Handles a publish that is neither LOGGED nor LOCAL."""
    if decision is Decision.PASSED:
        if b"x-lrq-pos" in header:  # only the door sets a message's position in the log
            pieces = encode.content(channel.number, cut(header, b"x-lrq-pos"), body, session.frame_max_bytes)
            blob = b"".join((encode.frame(frames.METHOD, channel.number, method), *pieces))
        publisher_confirms.pass_on(session, channel, blob)
        return
    route = frames.publish_route(method)
    if decision in _OF_PRODUCERS and session.producer and not session.may_write:
        text = f"ACCESS_REFUSED - user '{session.user}' lacks the right to write to 'amq.default' in vhost '{session.vhost}'"
        closing.refuse_publish(session, channel, reply_codes.ACCESS_REFUSED, text)
        return
    try:
        if decision is Decision.TRANSMIT:
            _transmit(session, channel, route.routing_key, header, body)
        elif decision is Decision.STATUS:
            _status(session, channel, header, body)
        elif decision is Decision.DEMAND:
            _demand(session, channel, body)
        elif decision is Decision.COMMIT:
            _commit(session, channel, body)
        elif decision is Decision.RECEIVE:
            _receive(session, channel, route.routing_key, body)
        else:
            what = f"exchange '{route.exchange}'" if route.exchange else f"'{route.routing_key}'"
            closing.refuse_publish(session, channel, reply_codes.ACCESS_REFUSED, f"{what} in vhost '{session.vhost}' takes no messages from clients")
    except _Unroutable as error:
        if session.ascending:  # else the next message would make this number known
            closing.refuse_publish(session, channel, NO_ROUTE, str(error))
            return
        _return(session, channel, route, header, body, str(error))
        publisher_confirms.ended_here(session, channel, 0)
    except NotPrimary:  # this node has just stepped down: the connection ends, and the message is not at fault
        raise
    except LrqError as error:
        closing.refuse_publish(session, channel, reply_codes.PRECONDITION_FAILED, str(error))


class _Unroutable(LrqError):
    """The message comes back to the publisher as basic.return."""


def _return(session: ClientSession, channel: ClientChannel, route: Route, header: bytes, body: bytes, text: str) -> None:
    returned = commands.Basic.Return(NO_ROUTE, text.encode()[:250].decode("utf-8", "ignore"), route.exchange, route.routing_key)
    content = encode.content(channel.number, header, body, session.frame_max_bytes)
    session.to_client(encode.method_frame(channel.number, returned) + b"".join(content))


def _identity(session: ClientSession, header: bytes) -> ReplicationId | None:
    """The message's replication ID, if it counts on this connection."""
    raw = replication_id(header)
    if raw is None or not session.producer:
        return None
    identity = ReplicationId.parse(raw)
    return identity if identity.producer == session.producer else None


def _is_repeat(session: ClientSession, channel: ClientChannel, identity: ReplicationId | None) -> bool:
    if identity is None or not session.replica.index.dedup.seen(session.producer_key, identity.sequence):
        return False
    session.door.counters["repeats"] += 1
    publisher_confirms.ended_here(session, channel, session.replica.index.dedup.position_of(session.producer_key, identity.sequence) or 0)
    return True


def _check_number(session: ClientSession, identity: ReplicationId) -> None:
    if not duplicates.may_number(session, identity.sequence):
        raise LrqError(duplicates.GAPS)


def _transmit(session: ClientSession, channel: ClientChannel, queue: str, header: bytes, body: bytes) -> None:
    identity = _identity(session, header)
    if identity is None:
        raise LrqError(
            "a log entry needs a replication ID", todo="announce the producer in the client property lrq_producer and set the header x-lrq-id"
        )
    if _is_repeat(session, channel, identity):
        return
    if len(body) > chain.TRANSMISSION_BYTES_MAX:
        todo = f"transmit at most {chain.TRANSMISSION_BYTES_MAX} at once"
        raise LrqError(f"log entries of {len(body)} bytes are too many for one message", todo=todo)
    transaction = _parse(pb.Transaction, body)
    destinations = chain.check(transaction)
    _check_client(session, transaction.client_name)
    if (queue == names.SEND_SNAP_SYNC) != bool(transaction.request_id):
        todo = f"deltas, which have no request id, go to {names.SEND_LOG_ENTRIES}, a full sync's data to {names.SEND_SNAP_SYNC}"
        raise LrqError(f"{queue} takes nothing with request id {transaction.request_id!r}", todo=todo)
    _check_request(transaction.request_id)
    passed = [destination for destination in destinations if destination in transaction.path]
    for destination in destinations:
        if destination not in passed:
            _check_destination(session, destination)
    if passed and len(passed) == len(destinations):
        way = " > ".join((*transaction.path, session.door.group))
        listed = ", ".join(f"'{destination}'" for destination in passed)
        raise _Unroutable(f"destination {listed} has had this transaction already, which has come by {way}")
    if passed:
        chain.leave_out(transaction, passed)
    _check_number(session, identity)
    transaction.source = session.door.group
    transaction.replication_id = str(identity)
    entry = pb.Transmission(
        queue=queue,
        body=transaction.SerializeToString(),
        producer=session.producer_key,
        id=identity.sequence,
        id_skipped=duplicates.skipped_before(session, identity.sequence),
    )
    session.feeds_views = True
    publisher_confirms.ended_here(session, channel, session.replica.append(pb.Run(transmission=entry), 1, len(body)))


def _status(session: ClientSession, channel: ClientChannel, header: bytes, body: bytes) -> None:
    _require_producer(session, "status")
    identity = _identity(session, header)
    if _is_repeat(session, channel, identity):
        return
    _check_size("status", body, statuses.STATUS_BYTES_MAX, "say it in fewer words")
    status = _parse(pb.Status, body)
    statuses.check(status)
    _check_client(session, status.client.client_name or status.full_sync.client_name)
    _check_request(status.full_sync.request_id)
    known = session.replica.index.statuses
    if status.HasField("full_sync") and not known.ends(status):  # its site may have left the configuration since the request
        _check_destination(session, status.full_sync.destination)
    overtaken = known.overtaken(status)
    if overtaken:  # a newer request, or the cancellation, has overtaken this end of a request: it would only confuse readers
        publisher_confirms.ended_here(session, channel, overtaken)
        return
    entry = pb.StatusEntry(body=body)
    if identity is not None:
        _check_number(session, identity)
        entry.producer, entry.id = session.producer_key, identity.sequence
        entry.id_skipped = duplicates.skipped_before(session, identity.sequence)
    publisher_confirms.ended_here(session, channel, session.replica.append(pb.Run(status=entry), 1, len(body)))


def _demand(session: ClientSession, channel: ClientChannel, body: bytes) -> None:
    _require_producer(session, "demand")
    _check_size("demand", body, DEMAND_BYTES_MAX, "give a shorter reason")
    demand = _parse(pb.Demand, body)
    sink = session.replica.index.sink
    if sink.newest(demand.queue).last == chain.START:
        listed = ", ".join(sink.queues()[:NAMES_SHOWN]) or "none"
        raise LrqError(f"no batch has come for '{demand.queue}'", todo=f"name one of the receive queues of group '{session.door.group}': {listed}")
    publisher_confirms.ended_here(session, channel, session.replica.demand(demand.queue, demand.reason))


def _commit(session: ClientSession, channel: ClientChannel, body: bytes) -> None:
    _require_producer(session, "commit")
    _check_size("commit", body, COMMIT_BYTES_MAX, "commit a shorter value")
    commit = _parse(pb.Commit, body)
    names.check_producer(commit.receiver)
    commit.user = session.user
    index = session.replica.index
    if refusal := index.commits.refusal(commit, index.sink.newest(commit.queue).last):
        raise LrqError(refusal)
    publisher_confirms.ended_here(session, channel, session.replica.append(pb.Run(commit=commit), 1, len(body)))


def _require_producer(session: ClientSession, what: str) -> None:
    if not session.producer:
        raise LrqError(f"a {what} needs a producer", todo="announce it in the client property lrq_producer")


def _check_size(what: str, body: bytes, bytes_max: int, todo: str) -> None:
    if len(body) > bytes_max:
        raise LrqError(f"a {what} of {len(body)} bytes, of {bytes_max} at most", todo=todo)


def _check_client(session: ClientSession, client_name: str) -> None:
    """Refuses a client that has no session, as the log knows too many: its log entries would be confirmed, and go nowhere."""
    if not session.replica.index.statuses.has_room(client_name):
        todo = "use the name of one of them (GET /status of the primary lists them)"
        raise LrqError(f"the log knows {statuses.CLIENTS_MAX} clients, and '{client_name}' is none of them", todo=todo)


def _check_destination(session: ClientSession, destination: str) -> None:
    known = session.door.sites
    if destination not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise _Unroutable(f"destination '{destination}' is not known to group '{session.door.group}'; known: {listed}")


def _check_request(request_id: str) -> None:
    if len(request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise LrqError(f"the request id of a full sync has at most {REQUEST_ID_BYTES_MAX} bytes")


def _receive(session: ClientSession, channel: ClientChannel, queue: str, body: bytes) -> None:
    batch = _parse(pb.ReceivedBatch, body)
    if session.peer is None or batch.source != session.peer.site:
        raise LrqError(f"a batch of {batch.source!r} on a connection of {session.peer.site if session.peer else 'a client'!r}")
    if len(body) > chain.BATCH_BYTES_MAX:  # its view could not take the batch, at any start of this node
        todo = f"it may have {chain.BATCH_BYTES_MAX}: run one version on both sides"
        raise LrqError(f"a batch of {len(body)} bytes is too large for {queue}", todo=todo)
    if held := session.replica.holds(queue):
        raise LrqError(f"{queue}: {held}", retriable=True)
    verdict = session.replica.index.sink.accept(queue, batch)
    if isinstance(verdict, Gap):
        raise LrqError(f"{queue} has everything up to {verdict.last}; what comes between that and this batch is missing", retriable=True)
    if isinstance(verdict, Accept | AcceptTrimmed):
        kept = verdict.body if isinstance(verdict, AcceptTrimmed) else body
        session.feeds_views = True
        publisher_confirms.ended_here(session, channel, session.replica.append(pb.Run(reception=pb.Reception(queue=queue, body=kept)), 1, len(kept)))
    else:
        publisher_confirms.ended_here(session, channel, verdict.op_seq)


def receivers_answer(session: ClientSession, question: str) -> bytes | None:
    """The body that answers a receiver's basic.get; None: not a question.

    Raises:
        LrqError: The user may not ask it.
    """
    if not names.is_routing(session.vhost):
        return None
    if question.startswith(names.POSITION_QUESTION):
        receiver, _, queue = question.removeprefix(names.POSITION_QUESTION).rpartition("/")
        commit = session.replica.index.commits.of(receiver, queue)
        if commit.user not in ("", session.user):
            raise LrqError(f"the positions of receiver '{receiver}' belong to another user")
        return commit.SerializeToString()
    if not question.startswith(names.RECEIVERS_QUESTION):
        return None
    client_name = question.removeprefix(names.RECEIVERS_QUESTION)
    return pb.ReceiveQueues(queues=session.replica.index.sink.receive_states(client_name)).SerializeToString()


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except Exception as error:
        raise LrqError(f"the body is not a {kind.DESCRIPTOR.name}") from error


def answer(session: ClientSession, question: str) -> tuple[str, int] | None:
    """Queue name and number that answer a passive declaration; None: not a question. Outside the routing vhost a producer asks only for itself."""
    producer = names.parse_producer_queue(question)
    if producer is not None and (names.is_routing(session.vhost) or producer == session.producer):
        session.door.end_unread(producer, session)
        index = session.replica.index
        return question, max(map(index.dedup.last, index.producers.of(session.user, producer, index.dedup.producers())), default=0)
    numbers = names.parse_numbers_queue(question)
    if numbers is not None and numbers[0] == session.producer and not names.is_routing(session.vhost):
        dedup = session.replica.index.dedup
        return question, sum(dedup.seen(session.producer_key, number) for number in range(numbers[1], numbers[2] + 1))
    if question.startswith(SINK_QUESTION) and session.peer is not None and session.peer.site:
        state = session.replica.index.sink.status(question.removeprefix(SINK_QUESTION))
        holds = 2 if state.bare else int(state.snapshot_complete)
        last = f"{state.last.epoch}.{state.last.sequence}"
        return f"/{last}/{holds}/{state.log_id.hex()}/{state.snapshot_request}", state.demand % _COUNT_MAX
    if question == DEMANDS_QUESTION and session.peer is not None and session.peer.site:
        return question, session.replica.index.sink.newest_demand(session.peer.site) % _COUNT_MAX
    return None
