"""Reads streams over AMQP 0-9-1 from any node that takes readers.

Rules:

- A stream is consumed with a bounded prefetch and acks for many at once.
- A consumer is never cancelled with messages under way, because the client library would reject them and a stream closes the
  connection for that (540).
- A node that does not answer is left: its connection is cut with a private method of pika. (Pika's own heartbeats do that too, but need a
  thread that sends them.)
"""

from __future__ import annotations

import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from typing import Any

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPConnectionError, AMQPError, ChannelClosedByBroker, ProbableAccessDeniedError, ProbableAuthenticationError

from lrq_ha import urls
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.streams.errors import ConnectionLost, MessageRefused, MissingQueue, NoNode, QueueRefused, StreamSilent
from lrq_ha.streams.message import Message, Record, parse_message

PREFETCH_MESSAGES = 500
ACK_MESSAGES = 100
TCP_TIMEOUT_S = 5
CONNECT_TIMEOUT_S = 10.0  # all nodes in turn, again and again
ROUND_PAUSE_S = 0.25
ANSWER_TIMEOUT_S = 10.0  # a node that stands still
IDLE_TIMEOUT_S = 30.0  # a message that must be there does not come
TAIL_ROUNDS_MAX = 64  # times the prefetch: more than any chunk holds; bounds the chase after an active writer
EMPTY_WAIT_S = 10.0  # no message, and the broker counts none either: its writer process, which serves readers and counts, may wait for its disk
POLL_S = 0.05
OFFSET = "x-stream-offset"
NOT_FOUND = 404
REFUSED = frozenset((403, 530))  # ACCESS_REFUSED; NOT_ALLOWED, as for a vhost that does not exist
NOT_RUNNING = "running replica"  # in the text of a 406: the broker has just started, and its stream has not
# Exceptions of pika for a failed connection. ValueError: of a node that dies just after it has taken one.
NOT_CONNECTED = (AMQPError, AMQPConnectorException, OSError, ValueError)


class NodeConnection:
    """One connection to a node, for one thread. Closes itself as a context manager.

    Attributes:
        address: host:port of the node.
        empty_wait_s: Seconds that `first` and `tail` wait for a message of a queue that looks empty.
    """

    def __init__(self, connection: Any, address: str, empty_wait_s: float = EMPTY_WAIT_S) -> None:
        self._connection = connection
        self.address = address
        self.empty_wait_s = empty_wait_s

    @classmethod
    def open(
        cls,
        nodes: Sequence[pika.ConnectionParameters],
        name: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        producer: str = "",
        empty_wait_s: float = EMPTY_WAIT_S,
    ) -> NodeConnection:
        """Connects to the first of `nodes` that takes readers; a backup's door refuses them.

        Args:
            nodes: Addresses and users, in turn. `address_of` makes them.
            name: Of the connection, for operators.
            timeout_s: How long all nodes are tried, again and again.
            producer: The name with which `publish` publishes.
            empty_wait_s: The attribute.

        Raises:
            NoNode: No node did within `timeout_s`, or every one refused the user.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answers: dict[str, str] = {}
            hopeless = True
            for given in nodes:
                parameters = copy(given)  # other threads connect with it, too
                parameters.client_properties = {"connection_name": name} | ({"lrq_producer": producer} if producer else {})
                address = f"{parameters.host}:{parameters.port}"
                try:
                    return cls(pika.BlockingConnection(parameters), address, empty_wait_s)
                except NOT_CONNECTED as error:
                    answers[address] = _answer(error)
                    hopeless = hopeless and _is_hopeless(error)
            if hopeless or time.monotonic() + ROUND_PAUSE_S >= deadline:
                raise NoNode(answers, retriable=not hopeless)
            time.sleep(ROUND_PAUSE_S)

    def __enter__(self) -> NodeConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            if self._connection.is_open:
                self.guarded(self._connection.close)
        except LrqError:
            pass  # it is gone

    def count(self, queue: str) -> int:
        """Number of messages by the broker's count, which it updates for streams every few seconds only.

        Raises:
            MissingQueue: There is no such queue.
            ConnectionLost: The node went away.
        """
        channel = self.channel()
        number: int = self.guarded(lambda: channel.queue_declare(queue, passive=True), queue).method.message_count
        self.guarded(channel.close)
        return number

    def first(self, queue: str) -> Message | None:
        """The first message that is left; None if the queue is empty."""
        return _parsed(queue, self.first_record(queue))

    def first_record(self, queue: str) -> Record | None:
        """As `first`, for a stream of any kind."""
        return self._look(queue, "first")

    def tail(self, queue: str) -> Message | None:
        """The last message: every message confirmed before this call is it, or before it. None if the queue is empty.

        A consumer with offset `last` begins with the stream's last chunk, which has an unknown number of messages. But a broker's
        channel delivers every message that is there and that the prefetch allows before it answers the next request. So this method acknowledges
        and sends a request; an answer without a message before it marks the end. No waiting, no guess.
        """
        return _parsed(queue, self.tail_record(queue))

    def tail_record(self, queue: str) -> Record | None:
        """As `tail`, for a stream of any kind."""
        return self._look(queue, "last")

    def at(self, queue: str, offset: int) -> Message:
        """The message at `offset`, or the first after it. Raises StreamSilent if there is none."""
        with closing(_Consumer(self, queue, offset, 1)) as consumer:
            return consumer.next()

    def read(self, queue: str, offset: int) -> Generator[Message, None, None]:
        """Messages from `offset` on (from the first one left if that is trimmed), without end.

        Raises:
            StreamSilent: No message came for IDLE_TIMEOUT_S.
            ConnectionLost: The node went away, or stands still.
        """
        with closing(_Consumer(self, queue, offset, PREFETCH_MESSAGES)) as consumer:
            while True:
                yield consumer.next()

    def follow(self, queue: str, offset: int, idle_s: float, prefetch: int = PREFETCH_MESSAGES) -> Generator[list[Message], None, None]:
        """Lists of messages from `offset` on, without end; an empty list after `idle_s` without a message.

        Raises:
            MissingQueue: The queue was deleted.
            ConnectionLost: The node went away, or stands still.
        """
        for records in self.follow_records(queue, offset, idle_s, prefetch):
            yield [parse_message(queue, record.offset, record.body) for record in records]

    def follow_records(self, queue: str, offset: int, idle_s: float, prefetch: int = PREFETCH_MESSAGES) -> Generator[list[Record], None, None]:
        """As `follow`, for a stream of any kind."""
        with closing(_Consumer(self, queue, offset, prefetch)) as consumer:
            while True:
                if not consumer.wait(idle_s):
                    consumer.settle()
                yield [consumer.next_record() for _ in range(len(consumer.waiting))]

    def get(self, queue: str) -> bytes | None:
        """The answer of the door to a question; None: there is none. Raises as `guarded` does."""
        channel = self.channel()
        body: bytes | None = self.guarded(lambda: channel.basic_get(queue, auto_ack=True), queue)[2]
        self.guarded(channel.close)
        return body

    def publish(self, queue: str, body: bytes) -> None:
        """Publishes a message, and returns when the door has confirmed it.

        Raises:
            MessageRefused: The door refuses it.
            ConnectionLost: The connection is gone.
        """
        channel = self.channel()
        self.guarded(channel.confirm_delivery, queue)
        try:
            self.guarded(lambda: channel.basic_publish("", queue, body), queue)
        except QueueRefused as error:
            raise MessageRefused(queue, self.address, error.said) from error
        self.guarded(channel.close)

    def _look(self, queue: str, where: str) -> Record | None:
        to_end = where == "last"
        with closing(_Consumer(self, queue, where, PREFETCH_MESSAGES if to_end else 1)) as consumer:
            if not consumer.wait(self.empty_wait_s):
                consumer.settle()
                if not consumer.waiting and self.count(queue) == 0 and not consumer.wait(0):
                    return None
            found = consumer.next_record()
            for _ in range(TAIL_ROUNDS_MAX if to_end else 0):
                while consumer.waiting:
                    found = consumer.next_record()
                consumer.settle()
                if not consumer.waiting:
                    break
            return found

    def channel(self) -> Any:
        return self.guarded(self._connection.channel)

    def process(self, seconds: float) -> None:
        """Lets the client library work; returns at the first input, after `seconds` at the latest."""
        self.guarded(lambda: self._connection.process_data_events(seconds))

    def guarded(self, call: Callable[[], Any], queue: str = "") -> Any:
        """The result of the client library's `call`.

        Raises:
            MissingQueue: The queue does not exist.
            QueueRefused: The node does not let us read it.
            ConnectionLost: The connection is gone; it is cut if the call takes longer than ANSWER_TIMEOUT_S.
        """
        try:
            with self._time_limit():
                return call()
        except ChannelClosedByBroker as error:
            if error.reply_code == NOT_FOUND:
                raise MissingQueue(queue) from error
            if NOT_RUNNING in error.reply_text:
                raise ConnectionLost(self.address, _answer(error)) from error
            raise QueueRefused(queue, self.address, error.reply_text) from error
        except (AMQPError, OSError) as error:
            raise ConnectionLost(self.address, _answer(error)) from error

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """A limit for pika, which waits for an answer, or for its turn to write, for as long as the connection stands."""
        connection = self._connection._impl
        if connection.is_closed:  # the call says so
            yield
            return
        late = AMQPConnectionError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
        timer = connection._adapter_call_later(ANSWER_TIMEOUT_S, lambda: connection._terminate_stream(late))
        try:
            yield
        finally:
            connection._adapter_remove_timeout(timer)


class _Consumer:
    """One consumer of one stream, on a channel of its own.

    Attributes:
        waiting: Messages that were not taken, each with its delivery tag: at most `prefetch` of them, or one chunk.
    """

    def __init__(self, node: NodeConnection, queue: str, offset: int | str, prefetch: int) -> None:
        self._node = node
        self._queue = queue
        self._prefetch = prefetch
        self._ack_every = min(ACK_MESSAGES, max(1, prefetch // 2))
        self.waiting: deque[tuple[int, Record]] = deque()
        self._unacked = 0
        self._tag = 0
        self._cancelled = False
        self._channel = node.channel()
        self._channel.add_on_cancel_callback(self._on_cancel)
        self._fence()
        node.guarded(lambda: self._channel.basic_consume(queue, self._on_message, arguments={OFFSET: offset}), queue)

    def wait(self, seconds: float) -> bool:
        """Whether a message is there, within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.waiting:
            if self._cancelled:
                raise MissingQueue(self._queue)
            left = deadline - time.monotonic()
            self._node.process(max(min(left, POLL_S), 0))
            if left <= 0:
                break
        return bool(self.waiting)

    def next(self) -> Message:
        """The next message of a receive queue. Raises as `next_record` does."""
        record = self.next_record()
        return parse_message(self._queue, record.offset, record.body)

    def next_record(self) -> Record:
        """The next message. Raises StreamSilent if none comes within IDLE_TIMEOUT_S, though the node answers."""
        if not self.wait(IDLE_TIMEOUT_S):
            self.settle()
            if not self.waiting:
                raise StreamSilent(self._queue, IDLE_TIMEOUT_S, "the next message")
        self._tag, record = self.waiting.popleft()
        self._unacked += 1
        if self._unacked >= self._ack_every:
            self._ack()
        return record

    def settle(self) -> None:
        """Acknowledges the messages taken; on return, every message that the broker sent before is here."""
        self._ack()
        self._fence()
        self._node.process(0)

    def close(self) -> None:
        try:
            self._fence()  # nothing is acknowledged any more: after this, no message comes
            self._node.process(0)
            self._node.guarded(self._channel.close)
        except LrqError:
            pass  # the connection is gone, and the consumer with it

    def _ack(self) -> None:
        if self._unacked:
            self._unacked = 0
            self._node.guarded(lambda: self._channel.basic_ack(self._tag, multiple=True))

    def _fence(self) -> None:
        self._node.guarded(lambda: self._channel.basic_qos(prefetch_count=self._prefetch))

    def _on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.waiting.append((method.delivery_tag, Record(int(properties.headers[OFFSET]), properties.headers, body)))

    def _on_cancel(self, _frame: Any) -> None:
        self._cancelled = True


def address_of(url: str, tls: ssl.SSLContext | None = None) -> pika.ConnectionParameters:
    """The address and user of a node's door.

    Args:
        url: amqp:// or amqps:// with user and password. The vhost is always `lrq`.
        tls: For amqps://; None: the system's trusted CAs.

    Raises:
        MalformedInput: It is another kind of URL, or has a part that would not be used. The URL is not shown, since it may hold a password.
    """
    fault = urls.amqp_fault(url, ROUTING_VHOST) or ("" if urls.split(url).hostname else urls.NOT_AMQP)
    if fault:
        raise MalformedInput(f"An address in nodes {fault}", todo=f"Give amqp://user:password@host:port or amqps://…; {urls.PASSWORD_RULE}")
    parameters = pika.URLParameters(url)
    if tls is not None and parameters.ssl_options is not None:
        parameters.ssl_options = pika.SSLOptions(tls, parameters.host)
    return suit_readers(parameters)


def suit_readers(parameters: pika.ConnectionParameters) -> pika.ConnectionParameters:
    """The parameters, changed to those of a reader: vhost `lrq`, time limits, no heartbeats."""
    parameters.virtual_host = ROUTING_VHOST
    # An application may leave a reader waiting for as long as it likes, and nothing could send heartbeats meanwhile.
    parameters.heartbeat = 0
    parameters.tcp_options = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    parameters.socket_timeout = parameters.stack_timeout = TCP_TIMEOUT_S
    return parameters


def _parsed(queue: str, record: Record | None) -> Message | None:
    return parse_message(queue, record.offset, record.body) if record is not None else None


def _is_hopeless(error: BaseException) -> bool:
    """Whether the node refused this user or address, so that a retry is of no use.

    Pika takes each connection that ends during the login for a refusal. The reply code, which only the text of its error has, tells those of
    a node that starts, stops or does not lead (320 CONNECTION_FORCED).
    """
    if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError):
        code = re.search(r"\((\d{3})\)", str(error))
        return code is not None and int(code[1]) in REFUSED
    return isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reply_code", 0) in REFUSED


def _answer(error: BaseException) -> str:
    """A node's answer in few words: the text of the innermost cause that has one."""
    inner = getattr(error, "exception", None)  # of pika's errors of a socket
    if isinstance(inner, BaseException):
        return _answer(inner)
    args = getattr(error, "args", ())
    if args and isinstance(args[0], BaseException):
        return _answer(args[0])
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
