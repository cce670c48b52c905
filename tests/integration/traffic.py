"""Load for fault tests, over the doors of a group: publishers with replication IDs, ordinary ones, and consumers that ack, give back, reject,
hold on to messages and disconnect. What they did is in a History, which checks it.

Rules: all that is random comes from the seed; every message is published once by the application (an ordinary publisher does not know what
became of one that was not confirmed, so it goes on with the next). A consumer that loses its connection does not know whether the last that it
said was heard: a broker gives it no more than PREFETCH messages beyond what it has heard, so all before that was. `Load` is the plain form: one
publisher, one consumer that acks, one queue.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pika
from history import Broken, Doubt, History, dead
from load import eventually
from pika.adapters.blocking_connection import BlockingChannel
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from lrq_ha.errors import LrqError
from lrq_ha.publisher import Confirm, Publisher

Settled = tuple[str, str, float]

PREFETCH = 100
#: Many clients that ask all the time would be a fault of their own on a machine with two cores.
RETRY_S = 0.2
#: Held messages are not many: a consumer that holds its whole prefetch gets no more.
HELD_MAX = PREFETCH // 4
#: Of a node that stands still, a client goes to the other; but a machine that is busy takes seconds to let one in.
LOGIN_TIMEOUT_S = 10.0
#: For all that is under way at the end, on a machine that stands still now and then.
FINISH_S = 240.0
OPEN_SHOWN_MAX = 5
#: What a moody consumer does, of a thousand deliveries; else it acks.
MOODS = (("give back", 30), ("reject", 30), ("hold", 30), ("disconnect", 3))


class Traffic:
    """See above.

    Args:
        nodes: Doors.
        queues: Names; with `moody` consumers each has a queue for its dead letters.
        kept: Queues from which nobody consumes before the end; then one each, that acks. So what lay there over every fault is seen in its order.
        producers: Names of publishers with replication IDs.
        ordinary: Number of publishers without.
        consumers: Number of consumers of each queue.
        moody: Consumers do not only ack.
        rate_per_s: Messages that each publisher sends in a second at most.
        history: A file for it.
    """

    #: What has been started and is not known to be over.
    running: ClassVar[list[Traffic]] = []

    def __init__(self, nodes: Sequence[str], queues: Sequence[str], producers: Sequence[str], *, kept: Sequence[str] = (), ordinary: int = 0,
                 consumers: int = 1, moody: bool = False, rate_per_s: float = 4000.0, seed: int = 0, history: Path | None = None,
                 heartbeat_s: int = 10) -> None:
        self.nodes, self.queues, self._moody, self._rate = list(nodes), list(queues), moody, rate_per_s
        self._kept = frozenset(kept)
        self._published_to = [*queues, *kept]
        self.history = History(history)
        self._publishers = [
            Publisher(self.nodes, producer=name, client_name="test", confirm_timeout_s=60, heartbeat_s=heartbeat_s) for name in producers]
        self._stop_publishing, self._stop_consuming = threading.Event(), threading.Event()
        self._calm = threading.Event()
        self._errors: list[BaseException] = []
        #: A consumer's connection, numbered over all of them.
        self._connections = itertools.count()
        publishing: list[Callable[[random.Random], None]] = [
            *(lambda rng, number=number: self._publish(number, rng) for number in range(len(producers))),
            *(lambda rng, number=number: self._publish_ordinarily(f"o{number}", rng) for number in range(ordinary))]
        taken_from = [*queues, *(dead(queue) for queue in queues if moody)]
        taken_by = [*(queue for queue in taken_from for _ in range(consumers)), *kept]
        consuming = [lambda rng, queue=queue: self._consume(queue, rng) for queue in taken_by]
        self._publishing, self._consuming = (
            [threading.Thread(target=self._run, args=(body, random.Random(f"{seed} {kind} {number}")), daemon=True)
             for number, body in enumerate(bodies)] for kind, bodies in (("publisher", publishing), ("consumer", consuming)))

    @property
    def confirmed(self) -> int:
        return len(self.history.confirmed)

    def start(self) -> None:
        Traffic.running.append(self)
        for thread in (*self._publishing, *self._consuming):
            thread.start()

    def _run(self, body: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            body(rng)
        except BaseException as error:
            self._errors.append(error)

    # -- publishers

    def _publish(self, which: int, rng: random.Random) -> None:
        began = time.monotonic()
        for number in itertools.count():
            while number > (time.monotonic() - began) * self._rate and not self._stop_publishing.is_set():
                time.sleep(0.002)
            if self._stop_publishing.is_set():
                break
            queue, message = rng.choice(self._published_to), f"p{which} 0 {number}"
            self.history.send(message, queue)
            confirm = self._publishers[which].publish("", queue, message.encode())
            confirm.add_done_callback(lambda confirm, message=message: self._answered(confirm, message))
        self._publishers[which].flush(FINISH_S)

    def _answered(self, confirm: Confirm, message: str) -> None:
        if confirm.error is None:
            self.history.confirm(message)

    def _publish_ordinarily(self, name: str, rng: random.Random) -> None:
        numbers = itertools.count()
        for connections in itertools.count():
            if self._stop_publishing.is_set():
                return
            try:
                with self._connect(connections) as connection:
                    channel = connection.channel()
                    channel.confirm_delivery()
                    while not self._stop_publishing.is_set():
                        queue, message = rng.choice(self._published_to), f"{name} {connections} {next(numbers)}"
                        self.history.send(message, queue)
                        channel.basic_publish("", queue, message.encode(), pika.BasicProperties(delivery_mode=2), mandatory=True)
                        self.history.confirm(message)
                        connection.sleep(1 / self._rate)
            except (AMQPError, AMQPConnectorException, OSError) as error:
                self.history.note("publisher lost", name=name, error=repr(error))
                time.sleep(RETRY_S)

    def _connect(self, turn: int) -> pika.BlockingConnection:
        parameters = pika.URLParameters(self.nodes[turn % len(self.nodes)])
        parameters.socket_timeout = parameters.stack_timeout = LOGIN_TIMEOUT_S
        parameters.heartbeat = 4
        try:
            return pika.BlockingConnection(parameters)
        except ValueError as error:  # pika's word for a node that is gone in the moment in which it was reached
            raise ConnectionResetError(str(error)) from error

    # -- consumers

    def _consume(self, queue: str, rng: random.Random) -> None:
        while queue in self._kept and not (self._calm.is_set() or self._stop_consuming.is_set()):
            time.sleep(RETRY_S)
        for turn in itertools.count():
            if self._stop_consuming.is_set():
                return
            said: list[Settled | None] = []
            me = next(self._connections)
            try:
                with self._connect(turn) as connection:
                    self._serve(connection.channel(), queue, rng, me, said)
            except (AMQPError, AMQPConnectorException, OSError):
                self.history.lost(me, filter(None, said))
                time.sleep(RETRY_S)

    def _serve(self, channel: BlockingChannel, queue: str, rng: random.Random, me: int, said: list[Settled | None]) -> None:
        """Consumes until it has had enough of the connection, or the broker has cancelled it: what it holds then goes back with the connection.

        Args:
            me: The consumer, for the history.
            said: What may not have been heard yet, in order; None for what settles nothing.
        """
        held = came = heard = 0
        moody = self._moody and queue in self.queues
        channel.basic_qos(prefetch_count=PREFETCH)
        for method, _properties, body in channel.consume(queue, inactivity_timeout=0.1):
            if self._stop_consuming.is_set() or (held and self._calm.is_set()):
                return
            if method is None:
                continue
            came += 1
            if came - PREFETCH > heard:
                heard += 1
                del said[0]
            message = body.decode()
            self.history.deliver(me, queue, message, method.redelivered, alone=queue in self._kept)
            mood = _mood(rng) if moody and not self._calm.is_set() else "ack"
            if mood == "ack":
                said.append(self.history.settle(queue, message))
                channel.basic_ack(method.delivery_tag)
            elif mood == "reject":
                said.append(self.history.settle(queue, message, rejected=True))
                channel.basic_reject(method.delivery_tag, requeue=False)
            elif mood == "give back":
                said.append(None)
                channel.basic_nack(method.delivery_tag, requeue=True)
            else:
                held += 1
                if mood == "disconnect" or held >= HELD_MAX:
                    self.history.note("consumer disconnects", queue=queue, held=held)
                    return

    # -- the end

    @classmethod
    def abandon_all(cls) -> None:
        """Ends what a test that failed has left running: it would go on at whatever listens on those ports later."""
        while cls.running:
            traffic = cls.running.pop()
            traffic.stop()
            for publisher in traffic._publishers:
                with suppress(LrqError):
                    publisher.close(0)

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Stops publishing, waits until all is answered and what was confirmed is consumed, then ends."""
        self._stop_publishing.set()
        self._calm.set()
        for thread in self._publishing:
            thread.join(timeout_s)
        if self._errors:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._publishing), f"only {self.confirmed} of {len(self.history.sent)} were confirmed"
        self._consume_all()
        time.sleep(0.5)  # in which what comes twice would come
        self._stop_consuming.set()
        for thread in self._consuming:
            thread.join(10)
        for publisher in self._publishers:
            publisher.close()
        if self._errors:
            raise self._errors[0]

    def _consume_all(self) -> None:
        def done() -> bool:
            if self._errors:
                raise AssertionError(f"a client has failed: {self._errors[0]!r}") from self._errors[0]
            return not self.history.open()

        try:
            eventually("consuming all that was confirmed", done, FINISH_S)
        except AssertionError as error:
            left = self.history.open()
            told = {message: self.history.settled.get((self.history.sent[message], message), []) for message in left[:OPEN_SHOWN_MAX]}
            queues = Counter(self.history.sent[message] for message in left)
            raise Broken(f"{error}; {len(left)} of {self.confirmed} are open, {dict(queues)}, and were settled so: {told}") from error

    def stop(self) -> None:
        """Ends at once, whatever is open."""
        self._stop_publishing.set()
        self._stop_consuming.set()
        for thread in self._consuming:
            thread.join(10)
        self.history.close()

    def check(self, doubts: Sequence[Doubt]) -> None:
        """0 lost, 0 twice but for what is in doubt, 0 from nowhere, order kept. `doubts`: see `history`."""
        self.history.check(doubts)


class Load(Traffic):
    """One publisher with replication IDs and one consumer of one queue."""

    def __init__(self, nodes: Sequence[str], queue: str, producer: str, *, rate_per_s: float = 4000.0, heartbeat_s: int = 10) -> None:
        super().__init__(nodes, [queue], [producer], rate_per_s=rate_per_s, heartbeat_s=heartbeat_s)


def _mood(rng: random.Random) -> str:
    drawn = rng.randrange(1000)
    for mood, share in MOODS:
        if drawn < share:
            return mood
        drawn -= share
    return "ack"
