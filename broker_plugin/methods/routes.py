"""Decides for each publish whether it goes to the log, the broker or both. No I/O."""

from __future__ import annotations

from lrq_ha.routing import names

from ..amqp.content_header import routes_on
from ..amqp.direct_reply import DIRECT_REPLY_TO
from ..amqp.frames import Route
from ..session.decisions import LOCAL, LOGGED, Decision
from ..session.session import ClientSession

_OF_ROUTING_VHOST = {
    names.SEND_LOG_ENTRIES: Decision.TRANSMIT,
    names.SEND_SNAP_SYNC: Decision.TRANSMIT,
    names.STATUS: Decision.STATUS,
    names.DEMAND: Decision.DEMAND,
    names.COMMIT: Decision.COMMIT,
}


def decide(session: ClientSession, route: Route) -> Decision:
    """The destination of publishes on this route."""
    if not names.is_routing(session.vhost):
        name = route.exchange or route.routing_key
        if not route.exchange and name.startswith(DIRECT_REPLY_TO):
            return Decision.PASSED
        logged = session.replica.declared.replicates_exchange(name) if route.exchange else session.replica.declared.replicates((session.vhost, name))
        if not logged:
            return Decision.PASSED
        session.replica.undeclared.note_publish(session.vhost, route.exchange, route.routing_key)
        plain = not (route.exchange or route.mandatory or route.immediate)  # a basic.return comes before its confirm
        if not (plain and session.door.completes_locally(name)):
            return LOGGED
        return LOGGED if session.replica.declared.is_stream((session.vhost, name)) else LOCAL  # a stream does not take every header
    if route.exchange:
        return Decision.FORBIDDEN
    if route.routing_key in _OF_ROUTING_VHOST:
        return _OF_ROUTING_VHOST[route.routing_key]
    if names.parse_recv_queue(route.routing_key) is not None and session.peer is not None and session.peer.site:
        return Decision.RECEIVE
    return Decision.FORBIDDEN


def names_more(decision: Decision, header: bytes) -> bool:
    """Whether a message that is not replicated, or answers a direct reply-to, names more queues: they may be replicated, so it enters the log."""
    return decision is Decision.PASSED and routes_on(header)
