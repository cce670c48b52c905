"""What a diverged node alone held is published again: whose numbers are whose, and what is said of it. The group is a dictionary."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from broker_plugin.amqp import content_header
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.errors import ConnectionClosed
from broker_plugin.log import stamps
from lrq_ha.cli import republish
from lrq_ha.cli.main import main
from lrq_ha.routing.names import parse_numbers_queue

pytestmark = pytest.mark.proves("republish")

DOOR = "amqp://app:SECRET@127.0.0.1:1"
HAD = "have numbers that the group has already: they are there, unless the publisher has been restarted since the promotion"


class Group:
    """What messages a group has by their IDs, and one connection to it at a time. It takes the place of `Connection` and its channel.

    Attributes:
        taken: Bodies by ID, of user app.
        unroutable: Routing keys of no queue.
        meanwhile: Called with the ID of each message before it is taken.
    """

    def __init__(self, taken: dict[str, bytes] | None = None) -> None:
        self.taken = taken or {}
        self.unroutable: set[str] = set()
        self.meanwhile: Callable[[str], None] = lambda _: None
        self.names: list[str] = []
        self.error: ConnectionClosed | None = None
        self.refused = 0

    async def open(self, to: Address, *, client_properties: dict[str, str]) -> Self:
        assert to.user == "app"
        self.names.append(client_properties["lrq_producer"])
        self.error, self.refused = None, 0
        return self

    async def channel(self, *, on_return: Callable[..., None]) -> Self:
        self.came_back = on_return
        return self

    async def confirm_select(self) -> None:
        pass

    async def queue_declare(self, queue: str, *, passive: bool) -> tuple[str, int, int]:
        self._alive()
        assert passive
        asked = parse_numbers_queue(queue)
        assert asked is not None
        producer, first, last = asked
        assert producer == self.names[-1], "a producer asks for itself only"
        return queue, sum(f"{producer}/{number}" in self.taken for number in range(first, last + 1)), 0

    def publish_content(self, exchange: str, routing_key: str, header: bytes, body: bytes, mandatory: bool) -> None:
        self._alive()
        identity = (stamps.replication_id(header) or b"").decode()
        assert (exchange, mandatory, identity.rpartition("/")[0]) == ("", True, self.names[-1])
        self.meanwhile(identity)
        if self.error is None and identity not in self.taken:
            if routing_key in self.unroutable:
                self.came_back()
            else:
                self.taken[identity] = body

    async def confirmed(self) -> None:
        self._alive()

    def _alive(self) -> None:
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        pass


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    monkeypatch.setattr(republish, "Connection", found)
    return found


def body(text: str) -> bytes:
    return f"{text} of the tail".encode()


def write_tail(folder: Path, ids: Iterable[str | None], user: str = "app") -> Path:
    """Each message's body names its ID, or its place."""
    file = folder / "tail.jsonl"
    with file.open("w") as out:
        for sequence, identity in enumerate(ids, 101):
            text = body(identity or str(sequence))
            entry: dict[str, Any] = {"kind": "publish", "epoch": "1.1", "sequence": sequence, "user": user, "vhost": "/", "exchange": ""}
            entry |= {"replication_id": identity or "", "routing_key": "odd" if sequence % 2 else "even"}
            entry |= {"header": base64.b64encode(content_header.header_payload(len(text))).decode(), "body": base64.b64encode(text).decode()}
            out.write(json.dumps(entry) + "\n")
    return file


def ids(producer: str, numbers: Sequence[int]) -> list[str]:
    return [f"{producer}/{number}" for number in numbers]


def numbered(producer: str, numbers: Sequence[int], text: str = "") -> dict[str, bytes]:
    return {each: text.encode() or body(each) for each in ids(producer, numbers)}


def run(capsys: pytest.CaptureFixture[str], file: Path, *options: str) -> tuple[int, str]:
    """Exit status, and what was said of what became of it."""
    code = main(["republish", str(file), "--to", DOOR, *options])
    said = capsys.readouterr()
    return code, said.out + said.err if code and not said.out else said.out


def test_numbers_that_others_have_are_not_taken_for_published(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The publisher was told 80 after the promotion, and gave 81 to 85 to new messages: those of the tail counted as published, and were lost."""
    group.taken = numbered("shop", range(1, 81)) | numbered("shop", range(81, 86), "new")
    tail = write_tail(tmp_path, [*ids("shop", range(81, 101)), None])
    for _ in range(2):  # the second time, the group has all of these numbers, from here
        code, said = run(capsys, tail)
        assert (code, said.startswith(f"16 messages published and confirmed, 5 {HAD}")) == (1, True), said
        assert said.endswith("If it has, run this again with --new-ids\n")
    assert len(group.taken) == 101
    for _ in range(2):
        assert run(capsys, tail, "--new-ids") == (0, "21 messages published and confirmed\n")
    news = {f"tail:1.1/{sequence}": body(f"shop/{number}") for sequence, number in enumerate(range(81, 86), 101)}
    sent = numbered("shop", range(1, 81)) | numbered("shop", range(81, 86), "new") | numbered("shop", range(86, 101))
    assert group.taken == sent | news | {"tail:1.1/121": body("121")}


def test_new_ids_at_once(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the file, also where two producers take turns, and over more than one window."""
    both = [each for number in range(1, 31) for each in (f"shop/{number}", f"web/{number}")]
    group.taken = numbered("shop", range(1, 11), "new")
    assert run(capsys, write_tail(tmp_path, both), "--new-ids") == (0, "60 messages published and confirmed\n")
    assert list(group.taken.values())[10:] == [body(each) for each in both]
    assert numbered("shop", range(1, 11), "new").items() <= group.taken.items()


def test_what_no_queue_takes_is_not_had_the_next_time(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tail = write_tail(tmp_path, ids("shop", range(1, 5)))
    group.unroutable = {"odd"}
    back = "2 came back, as no queue takes them: declare what is missing, and run this again"
    assert run(capsys, tail) == (1, f"2 messages published and confirmed, {back}\n")
    group.unroutable = set()
    assert run(capsys, tail) == (0, "4 messages published and confirmed\n")
    assert group.taken == numbered("shop", range(1, 5))


def test_a_publisher_that_comes_in_the_middle(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the connection, and gives the next numbers to messages of its own: nothing of that is taken for republish's."""
    monkeypatch.setattr(republish, "WINDOW_MESSAGES", 3)
    tail = write_tail(tmp_path, ids("shop", range(1, 11)))

    def publisher_comes(identity: str) -> None:
        if identity == "shop/8":
            group.meanwhile = lambda _: None
            group.error = ConnectionClosed(320, "producer 'shop' has connected again")
            group.taken |= numbered("shop", (8, 9), "new")

    group.meanwhile = publisher_comes
    code, said = run(capsys, tail)
    assert code == 1
    assert said.splitlines() == [
        "In the names of these producers, whose publishers must have stopped: shop",
        "lrq-ha: the connection ended: 320 producer 'shop' has connected again; 6 messages were published and confirmed before. See that no client "
        "publishes in these producers' names, and run this again: what is confirmed is not enqueued twice",
    ]
    doubt = "3 were under way when an earlier run was cut off, and the group has their numbers"
    for options in ([], ["--new-ids"]):
        code, said = run(capsys, tail, *options)
        assert (code, said.startswith(f"7 messages published and confirmed, {doubt}: they are there, unless their publisher came")) == (1, True)
    assert len(group.taken) == 10, "nothing is there twice"


def test_a_publisher_that_went_on(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gave no number of the tail again, and so they are free, though the group has come further: they counted as had, and then came twice."""
    group.taken = numbered("shop", range(1, 81)) | numbered("shop", range(86, 91), "new")
    tail = write_tail(tmp_path, ids("shop", range(81, 86)))
    for options in ([], [], ["--new-ids"]):
        assert run(capsys, tail, *options) == (0, "5 messages published and confirmed\n")
    assert len(group.taken) == 90


@pytest.mark.parametrize("taken", [range(0), range(1, 2_501), [1], [2], range(1, 2_501, 2), [999, 1_000, 1_001, 2_500], range(700, 1_900)])
def test_each_number_is_known(taken: Sequence[int], group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group.taken = numbered("shop", taken, "new")
    code, said = run(capsys, write_tail(tmp_path, ids("shop", range(1, 2_501))))
    assert (code, said.startswith(f"{2_500 - len(taken)} messages published and confirmed")) == (bool(taken), True)
    assert group.taken == numbered("shop", range(1, 2_501)) | numbered("shop", taken, "new")


def test_cut_off_with_new_ids(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was under way then went out once more, as a new message."""
    group.taken = numbered("shop", (11,), "new")
    tail = write_tail(tmp_path, ids("shop", range(11, 21)))

    def ends(identity: str) -> None:
        if identity == "shop/20":
            group.meanwhile = lambda _: None
            group.error = ConnectionClosed(320, "it is over")

    group.meanwhile = ends
    assert run(capsys, tail, "--new-ids")[0] == 1
    assert run(capsys, tail, "--new-ids")[0] == 1, "of eight it is not known"
    assert list(group.taken.values()).count(body("shop/15")) == 1
    assert len(group.taken) == 11


def test_notes_of_another_tail(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They lay there from the incident before, and what others had counted as published."""
    assert run(capsys, write_tail(tmp_path, ids("shop", range(81, 101))))[0] == 0
    group.taken = numbered("shop", range(81, 86), "new")
    code, said = run(capsys, write_tail(tmp_path, ids("shop", range(81, 86))))
    assert (code, "tail.jsonl.numbers was written for another tail than" in said) == (1, True)


def test_a_publisher_that_comes_while_another_name_is_used(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group.meanwhile = lambda identity: group.taken.update(numbered("shop", (2, 3), "new") if identity == "web/1" else {})
    code, said = run(capsys, write_tail(tmp_path, ["shop/1", "web/1", "shop/2", "shop/3", "shop/4"]))
    assert (code, said.startswith(f"3 messages published and confirmed, 2 {HAD}")) == (1, True), said


def test_names_are_said_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tail = write_tail(tmp_path, [f"app{number:02}/1" for number in range(25)])
    assert main(["republish", str(tail), "--to", DOOR]) == 1
    said = capsys.readouterr().err
    names = ", ".join(f"app{number:02}" for number in range(20))
    assert said.startswith(f"In the names of these producers, whose publishers must have stopped: {names}, 5 more\nlrq-ha: ")
    assert "cannot be reached" in said


def test_other_users(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["republish", str(write_tail(tmp_path, ["shop/1", None], user="other")), "--to", DOOR])
    said = capsys.readouterr()
    assert (code, said.out, said.err) == (1, "0 messages published and confirmed, 2 left out: run this as other, too\n", "")
    assert group.names == []


@pytest.mark.parametrize("notes", ["{", "5", '["begun", "app", "/", "shop"]', '["ended", "app", "/", "shop", 1, 1]'])
def test_notes_that_were_cut_short(notes: str, group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tail = write_tail(tmp_path, ["shop/1"])
    with (tmp_path / "tail.jsonl.numbers").open("w") as written:
        print(json.dumps(republish._digest(tail)), notes, sep="\n", end="", file=written)
    assert "tail.jsonl.numbers is not what republish wrote" in run(capsys, tail)[1]
    assert group.names == []


def test_notes_that_cannot_be_written(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tail = write_tail(tmp_path, ["shop/1"])
    (tmp_path / "tail.jsonl.numbers").mkdir()
    assert "tail.jsonl.numbers cannot be written: Is a directory" in run(capsys, tail)[1]
    assert group.names == []
