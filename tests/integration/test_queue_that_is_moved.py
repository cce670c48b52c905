"""What clients do to the very queue that a renewal moves (R17), in the middle of that: it waits, and is then done as if the queue had not been moved.

Rule: a queue holds more than the renewal takes at once, so that who did not wait would get, count or delete something else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pika
import pytest
from load import command, consume, declare, eventually, in_sync, primary_of, renew, set_up, told
from pamqp import commands
from raw_client import RawClient
from raw_client import publish as publish_frames
from renewals import equal, has, levels, part_of_it, publish, rest_of_it

from broker_plugin.amqp import encode, frames
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.proves("renewal")]

SETTINGS = "backup_timeout_s = 600.0\napply_delay_s = 0.1\n"
MANY = 3_000
FEW = 400
TAKE_S = 240.0
WAITING = 8
READ_S = 0.01
CLOSE_TO_IT = 100
DEEP = 6_000  # more than a quorum queue gives to one consumer before it acks
HELD_UP_S = 60
#: In a broker: a quorum queue that has given to a consumer all that it had, and so many more, stands still until the next thing that it is told is
#: waited for: to cancel that consumer. What the acks before that bring is then on its way to a consumer that is no more.
HOLD_UP = """
Queue = '%2F_{queue}',
spawn(fun() ->
    Until = erlang:monotonic_time(second) + {seconds},
    Wait = fun Wait(Done) ->
        Done() orelse erlang:monotonic_time(second) < Until andalso begin timer:sleep(1), Wait(Done) end
    end,
    Given = fun(State) -> lists:max([0 | [element(4, Consumer) || Consumer <- maps:values(element(10, State))]]) end,
    Told = fun() -> {{messages, Found}} = process_info(whereis(Queue), messages), Found end,
    Wait(fun() -> {{ok, {{_, Found}}, _}} = ra:local_query({{Queue, node()}}, Given), Found > {count} end) andalso begin
        sys:suspend(Queue),
        Wait(fun() -> lists:any(fun(One) -> string:find(io_lib:format("~0p", [One]), ",cancel,") =/= nomatch end, Told()) end),
        sys:resume(Queue)
    end
end).
"""


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("moved") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with lab:
        yield lab


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> None:
    """What an earlier test left, having failed in the middle perhaps, would be moved, too."""
    primary, _ = in_sync(lab, applied=True)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        for queue in levels(lab, primary):
            connection.channel().queue_delete(queue)


class Taker(RawClient):
    """A client with one channel. It may consume from a queue, and acks what has come when it is told to.

    Attributes:
        taken: What has come.
        again: What of it came as redelivered.
    """

    def __init__(self, door: str, queue: str = "", *, prefetch: int = 1, exclusive: bool = False) -> None:
        super().__init__(door)
        self.taken: list[int] = []
        self.again: set[int] = set()
        self._tag, self._again = 0, False
        self._gone = False
        self.open_channel()
        self.call(1, commands.Basic.Qos(prefetch_count=prefetch), frames.BASIC_QOS_OK)
        if queue:
            self.call(1, commands.Basic.Consume(queue=queue, consumer_tag="taker", exclusive=exclusive), frames.BASIC_CONSUME_OK)

    def ask(self, method: Any) -> None:
        """Sends this, and waits for nothing."""
        self.send(encode.method_frame(1, method))

    def answer(self, kind: int) -> Any:
        """The method of this kind that comes next."""
        return frames.decode_method(self.expect(kind))

    def vanish(self) -> None:
        self._gone = True
        self.socket.close()

    def take(self) -> None:
        """Acks what has come."""
        try:
            while not self._gone and (found := self.read(READ_S)):
                if found[0] == frames.BASIC_DELIVER:
                    _, self._tag, origin = frames.deliver_arguments(found[2])
                    self._again = origin.redelivered
                elif found[0] == frames.BODY:
                    self.taken.append(int(found[2]))
                    if self._again:
                        self.again.add(self.taken[-1])
                    self.send(encode.ack(1, self._tag))
        except TimeoutError:
            pass

    def heard(self, kind: int) -> list[Any]:
        """All methods of a kind that have come."""
        return [frames.decode_method(payload) for known, _, payload in self.got if known == kind]


def in_the_middle(lab: Lab, queue: str, takers: Sequence[Taker], do: Callable[[], None], *, in_steps: bool = False) -> None:
    """Renews the log; `do` is what clients do while that is in the middle of this queue. Takers take all the time: else its turn would not come.

    `in_steps`: see rest_of_it.
    """
    primary = primary_of(lab)

    def take() -> None:
        for taker in takers:
            taker.take()

    with ThreadPoolExecutor(1) as operator:
        renewing = operator.submit(renew, lab)
        try:
            part_of_it(lab, primary, queue, take)
            do()
            for _ in range(2):
                told(lab, primary)  # so its door has read what was sent before
            if in_steps:
                rest_of_it(lab, primary, queue)
        finally:
            lab.cont(f"{primary}.broker")
        while not renewing.done():
            take()
            time.sleep(READ_S)
        renewing.result()


def take_all(takers: Sequence[Taker], numbers: set[int], *, in_order: bool = True) -> None:
    """These messages, each once, and to each taker in order; but for those from MANY on, which several have published."""
    deadline = time.monotonic() + TAKE_S
    while sum(len(taker.taken) for taker in takers) < len(numbers):
        assert time.monotonic() < deadline, f"{len(numbers)} were to come to {[len(taker.taken) for taker in takers]}"
        for taker in takers:
            taker.take()
    assert sorted(number for taker in takers for number in taker.taken) == sorted(numbers)
    for taker in takers:  # RabbitMQ itself keeps no order of what a quorum queue has given out and taken back
        found = [min(number, MANY) for number in taker.taken if in_order or number not in taker.again]
        assert found == sorted(found)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_consumers_gets_declarations_and_publishes(lab: Lab, kind: str) -> None:
    primary, _ = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    queue, other = f"asked-{kind}", f"other-{kind}"
    declare(door, queue, queue_type=kind)
    declare(door, other)
    publish(lab, queue, range(MANY))
    with ExitStack() as stack:
        stays, goes, leaves, doubles = (stack.enter_context(Taker(door, queue)) for _ in range(4))
        fresh, gets, asks, commits, closes = (stack.enter_context(Taker(door, prefetch=CLOSE_TO_IT)) for _ in range(5))
        commits.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        commits.send(publish_frames(1, queue, b"%d" % MANY))
        takers = (stays, goes, leaves, doubles, fresh)
        left: list[int] = []

        def do() -> None:
            left.extend(sorted(set(range(MANY)) - {number for taker in takers for number in taker.taken}))
            goes.ask(commands.Basic.Cancel("taker"))
            leaves.vanish()
            doubles.ask(commands.Basic.Consume(queue=other, consumer_tag="taker"))
            fresh.ask(commands.Basic.Consume(queue=queue, consumer_tag="taker"))
            gets.ask(commands.Basic.Get(queue=queue, no_ack=True))
            asks.ask(commands.Queue.Declare(queue=queue, passive=True))
            commits.ask(commands.Tx.Commit())
            closes.send(publish_frames(1, queue, b"%d" % (MANY + 1)) + encode.method_frame(0, commands.Connection.Close(200, "", 0, 0)))

        in_the_middle(lab, queue, takers, do)
        assert goes.heard(frames.BASIC_CANCEL_OK)
        said = [(close.reply_code, close.reply_text) for close in doubles.heard(frames.CONNECTION_CLOSE)]
        assert said == [(530, "NOT_ALLOWED - attempt to reuse consumer tag 'taker'")]
        assert fresh.heard(frames.BASIC_CONSUME_OK)
        commits.answer(frames.TX_COMMIT_OK)
        closes.answer(frames.CONNECTION_CLOSE_OK)
        declared = asks.answer(frames.QUEUE_DECLARE_OK)
        # Of a quorum queue that does not answer in time RabbitMQ says that it is empty.
        assert declared.message_count > len(left) - 2 * CLOSE_TO_IT or (kind == "quorum" and not declared.consumer_count)
        gets.expect(frames.BASIC_GET_OK)
        gets.taken.append(int(gets.expect(frames.BODY)))
        assert gets.taken[0] in left[: 2 * CLOSE_TO_IT]
        take_all((*takers, gets), set(range(MANY + 2)), in_order=kind == "classic")
    equal(lab, {queue: 0})


@pytest.mark.proves("order: renewal")
def test_order_of_a_quorum_queue_that_is_slow(lab: Lab) -> None:
    """RabbitMQ puts what was on its way to a consumer when that was cancelled before what it held."""
    primary, _ = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, "slow"
    declare(door, queue, queue_type="quorum")
    publish(lab, queue, range(DEEP))
    lab.ctl(primary, "eval", HOLD_UP.format(queue=queue, count=DEEP + CLOSE_TO_IT, seconds=HELD_UP_S))
    assert f"{primary} has published {DEEP} messages again" in renew(lab)
    with Taker(door, queue, prefetch=CLOSE_TO_IT) as taker:
        eventually("all of it", lambda: taker.take() is None and len(taker.taken) >= DEEP)
        assert taker.taken == list(range(DEEP))
        assert not taker.again, "nobody has been given any before"
    equal(lab, {queue: 0})


@pytest.mark.proves("order: renewal")
@pytest.mark.parametrize("count", [1, 3])
def test_order_of_what_is_on_its_way_to_consumers(lab: Lab, broker_version: str, count: int) -> None:
    """It comes again, from RabbitMQ 4 on before all others; see docs/limitations.md."""
    primary, _ = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, f"on-its-way-{count}"
    declare(door, queue, queue_type="quorum")
    publish(lab, queue, range(MANY))
    lab.ctl(primary, "eval", HOLD_UP.format(queue=queue, count=2 * CLOSE_TO_IT, seconds=HELD_UP_S))
    with ExitStack() as stack, ThreadPoolExecutor(1) as operator:
        takers = [stack.enter_context(Taker(door, queue, prefetch=CLOSE_TO_IT)) for _ in range(count)]

        def take() -> None:
            for taker in takers:
                taker.take()

        eventually("some of it", lambda: take() is None and len(takers[0].taken) >= CLOSE_TO_IT)
        renewing = operator.submit(renew, lab)
        while not renewing.done():
            take()
        renewing.result()
        take_all(takers, set(range(MANY)), in_order=count == 1 and not broker_version.startswith("3"))
        assert sum(len(taker.again) for taker in takers) < MANY // 2, "what was moved was given to nobody"
    equal(lab, {queue: 0})


@pytest.mark.one_version("4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_purge_and_a_deletion(lab: Lab, kind: str) -> None:
    primary, backup = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, f"purged-{kind}"
    declare(door, queue, queue_type=kind)
    publish(lab, queue, range(MANY))
    with Taker(door) as purges:
        in_the_middle(lab, queue, [], lambda: purges.ask(commands.Queue.Purge(queue=queue)))
        assert purges.answer(frames.QUEUE_PURGE_OK).message_count == MANY
    equal(lab, {queue: 0})

    publish(lab, queue, range(MANY))
    with Taker(door, queue) as taker, Taker(door) as deletes, Taker(door) as declares:
        in_the_middle(lab, queue, [taker], lambda: deletes.ask(commands.Queue.Delete(queue=queue)))
        eventually("its consumer to hear of it", lambda: taker.take() is None and bool(taker.heard(frames.BASIC_CANCEL)), seen=lambda: taker.got[-5:])
        assert taker.taken == list(range(len(taker.taken)))
        assert not taker.heard(frames.CHANNEL_CLOSE)
        assert MANY - len(taker.taken) <= deletes.answer(frames.QUEUE_DELETE_OK).message_count <= MANY
        for name in (primary, backup):
            eventually(f"it to be gone at {name}", lambda name=name: not has(lab.nodes[name].broker, queue))
        declares.call(1, commands.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": kind}), frames.QUEUE_DECLARE_OK)
    publish(lab, queue, range(3))
    equal(lab, {queue: 3})
    assert consume(door, queue, 3) == list(range(3))


@pytest.mark.one_version("4.3")
def test_who_waits_comes_behind_who_was_there(lab: Lab) -> None:
    """New consumers, and a deletion of a queue that is not used, come when its consumers are there again."""
    primary, _ = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    for queue, exclusive in (("shut-out", True), ("in-turn", False)):
        declare(door, queue, **({} if exclusive else {"single_active_consumer": True}))
        publish(lab, queue, range(FEW))
        with ExitStack() as stack:
            first = stack.enter_context(Taker(door, queue, exclusive=exclusive))
            deletes, *others = (stack.enter_context(Taker(door)) for _ in range(WAITING))

            def do(queue: str = queue, deletes: Taker = deletes, others: Sequence[Taker] = others) -> None:
                deletes.ask(commands.Queue.Delete(queue=queue, if_unused=True))
                for other in others:
                    other.ask(commands.Basic.Consume(queue=queue, consumer_tag="taker"))

            in_the_middle(lab, queue, [first, *others], do, in_steps=True)
            take_all([first, *others], set(range(FEW)))
            assert len(first.taken) == FEW, "nobody else has got anything"
            assert not first.heard(frames.CHANNEL_CLOSE)
            assert "in use" in deletes.answer(frames.CHANNEL_CLOSE).reply_text
            for other in others:
                if exclusive:
                    assert [close.reply_code for close in other.heard(frames.CHANNEL_CLOSE)] == [403]
                else:
                    assert other.heard(frames.BASIC_CONSUME_OK)
    equal(lab, {"shut-out": 0, "in-turn": 0})


@pytest.mark.one_version("4.3")
def test_what_a_consumer_has_held_for_too_long_is_not_waited_for(lab: Lab) -> None:
    """RabbitMQ 4's quorum queues end such a consumer, and have its messages back; the door took them for held for as long as its channel lived."""
    primary, backup = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, "overdue"
    declare(door, queue, queue_type="quorum", consumer_timeout=8_000)
    publish(lab, queue, range(3))
    with Taker(door, queue, prefetch=10) as late:
        for _ in range(3):
            late.expect(frames.BODY)
        late.send(encode.ack(1, 2))  # in time
        late.expect(frames.BASIC_CANCEL)
        late.send(encode.ack(1, 3))  # too late for the broker
        late.call(1, commands.Basic.Qos(), frames.BASIC_QOS_OK)
        code, said = command("switchover", backup, "--dry-run", lab=lab)
        assert (code, said.startswith(f"would hand over to {backup}; consumers hold 0 messages; ")) == (0, True), said
        renew(lab, "--timeout", "60")
        assert "is moved" in late.answer(frames.CHANNEL_CLOSE).reply_text
        late.ask(commands.Channel.CloseOk())
    equal(lab, {queue: 1})
    assert consume(door, queue, 1) == [0]


@pytest.mark.one_version("4.3")
def test_a_queue_whose_consumers_are_to_finish_is_in_use(lab: Lab) -> None:
    primary, _ = in_sync(lab, applied=True)
    node, queue = lab.nodes[primary], "finishing"
    declare(node.door, queue)
    publish(lab, queue, range(2))
    with Taker(node.door, queue) as taker, Taker(node.door) as deletes, ThreadPoolExecutor(1) as operator:
        taker.expect(frames.BODY)
        renewing = operator.submit(renew, lab, "--timeout", "600")
        with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
            channel = connection.channel()
            eventually("it to be cancelled", lambda: not channel.queue_declare(queue, passive=True).method.consumer_count)
        deletes.ask(commands.Queue.Delete(queue=queue, if_unused=True))
        for _ in range(2):
            told(lab, primary)
        assert not renewing.done()
        taker.send(encode.ack(1, 1))
        while not renewing.done():
            taker.take()
        renewing.result()
        assert "in use" in deletes.answer(frames.CHANNEL_CLOSE).reply_text
        while not taker.taken:
            taker.take()
        assert taker.taken == [1]
    equal(lab, {queue: 0})


def _transact(client: RawClient, queue: str, over: threading.Event) -> int:
    """Publishes what comes once more and acks it, in one transaction after the other. Returns how many."""
    done, tag, committing = 0, 0, False
    todo: list[bytes] = []
    while committing or not over.is_set():
        try:
            found = client.read(READ_S)
        except TimeoutError:
            continue
        assert found is not None, "closed"
        kind, _, payload = found
        assert kind not in (frames.CHANNEL_CLOSE, frames.CONNECTION_CLOSE), payload
        if kind == frames.BASIC_DELIVER:
            tag = frames.deliver_arguments(payload)[1]
        elif kind == frames.BODY:
            todo.append(publish_frames(1, queue, payload) + encode.ack(1, tag) + encode.method_frame(1, commands.Tx.Commit()))
        elif kind == frames.TX_COMMIT_OK:
            committing, done = False, done + 1
        if todo and not committing and not over.is_set():
            client.send(todo.pop(0))
            committing = True
    return done


@pytest.mark.one_version("4.3")
def test_transactions_of_its_consumers_go_on(lab: Lab) -> None:
    """The broker was told to cancel a consumer while it committed, and ended the connection (504)."""
    primary, _ = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, "transacted"
    declare(door, queue)
    publish(lab, queue, range(FEW))
    over = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(WAITING) as clients:
        running = []
        for _ in range(WAITING):
            client = stack.enter_context(RawClient(door))
            client.open_channel()
            client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            client.call(1, commands.Basic.Qos(prefetch_count=1), frames.BASIC_QOS_OK)
            client.call(1, commands.Basic.Consume(queue=queue), frames.BASIC_CONSUME_OK)
            running.append(clients.submit(_transact, client, queue, over))
        try:
            for _ in range(3):
                renew(lab)
        finally:
            over.set()
        assert all(one.result() for one in running)
    equal(lab, {queue: FEW})
    assert sorted(consume(door, queue, FEW)) == list(range(FEW))


@pytest.mark.one_version("4.3")
def test_consumers_go_on_where_it_is_given_up(lab: Lab) -> None:
    """An exclusive one, too, and in order."""
    primary, _ = in_sync(lab, applied=True)
    door, queue = lab.nodes[primary].door, "given-up"
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-dead-letter-exchange": "amq.fanout"})
        channel.queue_bind(queue, "amq.direct", "some")
    publish(lab, "some", range(FEW), exchange="amq.direct")
    with Taker(door, queue, exclusive=True) as taker, ThreadPoolExecutor(1) as operator:
        renewing = operator.submit(command, "renew", lab=lab)
        while not renewing.done():
            if "renews its log" in told(lab, primary)["reason"]:
                taker.take()
        code, said = renewing.result()
        assert code == 1, said
        assert "dead-letters by routing key" in said, said
        take_all([taker], set(range(FEW)))
        assert not taker.heard(frames.CHANNEL_CLOSE)
    equal(lab, {queue: 0})
