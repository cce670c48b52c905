"""The page docs/verification.md: for each promise and condition, the tests that try to break it.

    python tests/verification.py    writes the page

A test names what it tries to break, a file whose tests all do names it once:

    @pytest.mark.proves("G2", "in-doubt")
    @pytest.mark.proves("queue: priority", cases=("priority", "priority_quorum"))    some parameters only
    pytestmark = [pytest.mark.broker, pytest.mark.proves("G1")]

The files of the tests are read, not imported. `STATEMENTS` has every slug; an unknown slug is an error, and so is one without a test
(`tests/unit/test_verification.py`). A test that asks for the fixture `broker_version` runs on all versions of `tests/conftest.py`, or on the one
that its mark `one_version` names; another test with brokers runs on any. The table of the rules belongs to another program
(`tests/simulation/table.py`), and is kept.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "verification.md"
ANY = "any"
BEGIN, END = "<!-- rules: made by tests/simulation/table.py -->", "<!-- end of rules -->"

#: What a test may be said to prove. A word before a colon names the section of the page.
STATEMENTS = {
    # docs/guarantees.md
    "G1": "A publish confirmed through the door survives the loss of any node, as long as one in-sync node is left.",
    "G2": "A publish repeated with its replication ID is enqueued once.",
    "G3": "A failover loses no message and delivers no acknowledged message again, except for acks younger than the replication lag.",
    "G4": "The order in each queue is the order that RabbitMQ itself would give.",
    "G5": "A node confirms nothing that the later history of the group lacks.",
    "G6": "A log entry reaches the receive queue of each destination once, in source order, in whole transactions; a snapshot repairs a gap.",
    "away": "A backup that was away finds the log it needs up to `log_bytes_max`; operators are warned before and told what to do afterwards.",
    "broker-lacks": "A node whose broker lacks a vhost, a permission or a queue keeps the log, and leads only if an operator insists.",
    "coordination": "With etcd a node takes over by itself, and what was confirmed is in its history; etcd away stops nothing else.",
    "expected-backups": "A new primary with `expected_backups` confirms nothing before they are in sync, or the time is over.",
    "fault-checker": "The checker of the fault tests finds the errors it exists for.",
    "growing": "A group that grows from one used broker to three nodes loses and duplicates nothing.",
    "in-doubt": "A publish in doubt is either in the queue or forgotten, never both.",
    "local-completion": "A publish with local completion waits for the primary's own stream only, and its losses are counted.",
    "permissions": "A publish that its client has no permission for is in no log, whenever its broker dies.",
    "power-loss": "A host that loses power rejoins by catching up; the group keeps what it had confirmed.",
    "outbox": "What an application commits to an outbox is in the log once, in commit order and whole, whatever is killed.",
    "promotion": "A promotion needs the answers of all nodes or an operator's assertion, and never skips a longer log without `--force`.",
    "renewal": "A renewal brings everything live to a new node, once and in order, while clients go on.",
    "republish": "Messages of a diverged node can be published again; what the group has is not enqueued twice.",
    "rules": "Without any single part of a rule of the design, a promise breaks.",
    "slow-backup": "A backup with a slow broker slows publishers, so that a promotion has little left to write.",
    "stall": "A primary or backup that stands still and resumes confirms nothing that the others lack.",
    "strict": "In mode `strict`, nothing is confirmed without a node that no operator has removed.",
    "upgrade-rabbitmq": "A pair is upgraded from RabbitMQ 3.10 to 4.3 while clients go on: nothing is lost, nothing comes twice.",
    # docs/queue-types.md
    "queue: adopted": "Messages from before the sidecar are replicated after `lrq-ha adopt`, with their properties and order.",
    "queue: at-least-once": "Dead letters with the strategy `at-least-once` are in their queue, once.",
    "queue: auto-delete": "An auto-delete queue with `x-lrq-replicate` is replicated and goes with its last consumer.",
    "queue: classic and quorum": "Messages and their order are identical on the new primary, without the acknowledged ones.",
    "queue: dead letter published again": "A dead letter that a client publishes again with its `x-death` is a message of its own.",
    "queue: dead letters": "Dead letters are in their queue once, also in chains.",
    "queue: dead letters that meet": "Two dead letters of one message that meet in one queue count as one.",
    "queue: deleted by an operator": "A queue that an operator deleted stays deleted; a new one has new messages only.",
    "queue: deleted by clients": "A queue that clients deleted and declared again has the new messages only.",
    "queue: delivery limit": "A message over its delivery limit is a dead letter once; sweeps do not count as deliveries.",
    "queue: drop-head": "A full `drop-head` queue has the content of the primary's queue, and its dead letters once.",
    "queue: exclusive": "Exclusive, server-named and plain auto-delete queues stay on their node.",
    "queue: expires": "A queue that clients use does not expire on a backup; a queue that expired on the primary is gone.",
    "queue: held messages": "Messages that a consumer held are delivered again, marked as redelivered.",
    "queue: length in bytes": "`x-max-length-bytes` behaves as on the primary.",
    "queue: level configuration": "A queue of the level `configuration` exists with arguments and bindings, and is empty.",
    "queue: level none": "A queue of the level `none` does not exist on the other nodes.",
    "queue: levels": "The argument `x-lrq-replicate` or the name of a queue sets its level once; wrong levels are refused.",
    "queue: not durable": "A queue that is not durable is replicated, except for what its broker loses at a restart.",
    "queue: priority": "The new primary delivers the highest priority first.",
    "queue: purged before a restart": "Messages that came after the answer to a purge or deletion outlive a kill of the sidecar.",
    "queue: purged by a client": "A purge takes ready messages; messages that clients held stay.",
    "queue: purged by an operator": "A queue that an operator purged stays empty.",
    "queue: reject-publish": "A full `reject-publish` queue has every confirmed message and no refused one; other queues do not wait.",
    "queue: reject-publish behind an exchange": "A message that one of its queues refuses is in the other queues once.",
    "queue: reject-publish-dlx": "The door refuses queues with `reject-publish-dlx`.",
    "queue: rejected before a failover": "Messages rejected just before a failover become dead letters on the new primary.",
    "queue: rejected before a purge": "Messages rejected just before a purge or deletion become dead letters on every node.",
    "queue: retry loop": "A message in a retry loop is there once, with its `x-death` counts.",
    "queue: silent removals": "Removals by RabbitMQ or an operator reach the backups; no backup loses a live message by them.",
    "queue: single active consumer": "One consumer is active, and the next one takes over.",
    "queue: stream": "A stream has all messages once, in the order of the log.",
    "queue: TTL": "Expired messages are gone on the new primary.",
    "exchange: alternate": "A message that cannot be routed takes the alternate exchange on the new primary, too.",
    "exchange: amq": "Bindings to the `amq.*` exchanges are replicated.",
    "exchange: auto-delete": "Auto-delete exchanges are replicated and go with their last binding.",
    "exchange: deleted by an operator": "An exchange that an operator deleted and clients declared otherwise is the new one.",
    "exchange: not durable": "An exchange that is not durable is there with its bindings, also after a restart of a broker.",
    "exchange: refused": "The door refuses exchanges that route at random or delay messages.",
    "client: direct reply-to": "A requester is gone with its primary; a reply to it goes nowhere.",
    "client: transactions": "A transaction happens wholly or not at all, and moves a message once.",
    # docs/limitations.md
    "limit: cycle by expiry": "A message in a cycle that expiry alone closes may be lost on a backup.",
    "limit: deleted queues": "Knowledge about a deleted queue goes with it, unless it may have dead-lettered.",
    "limit: delivery limit on 3.x": "A backup sweeps a quorum queue with a delivery limit only if no message has to go back.",
    "limit: unseen messages": "A renewal loses no message that RabbitMQ counts in no queue length.",
    "order: renewal": "A renewal keeps the order of each queue, also of a slow one, except for messages on their way to consumers.",
    "order: sweep": "A sweep of a backup keeps the order of a queue, also of a deep one.",
}  # fmt: skip

SECTIONS = {
    "promise": "Promises",
    "condition": "Conditions",
    "queue": "Queue features",
    "exchange": "Exchanges",
    "client": "Features of clients",
    "order": "Order",
    "limit": "Limitations",
}

HEAD = """\
# Verification

This page lists, for each promise of [guarantees.md](guarantees.md), each feature of [queue-types.md](queue-types.md)
and each rule of the design, the tests that try to break it. `python tests/verification.py` writes the page from the
`proves` marks of the tests.

Numbers in parentheses are the RabbitMQ versions that a test runs on; `pytest --broker VERSION` runs it on another one.
"Any" is the RabbitMQ that the machine has. Tests without either need no broker. A name in code style is one parameter
of the test.

## Kinds of evidence

| folder | what runs |
|---|---|
| `tests/integration`, `tests/spark` | real brokers, sidecars and clients |
| `tests/simulation` | whole groups in one process, from a seed, with simulated brokers, links, clocks and clients |
| `tests/scenarios`, `tests/model` | the real core: single histories, and random ones |
| `tests/unit` | single parts |

### Fault tests

[test_faults.py](../tests/integration/test_faults.py) checks real brokers and sidecars. Two publishers with replication
IDs, one without, and consumers that ack, return, reject, hold messages and disconnect use a classic and a quorum queue,
each with dead letters. A seed draws the faults:

- as processes: the primary, its broker or its sidecar is killed, or stands still and is promoted over; these parts
  of the backup; both nodes;
- as containers: a network that is cut between the two, too.

At the end everything is repaired, and every message is accounted for:

- no confirmed message is lost, except for [dead letters that a killed broker had just
  made](limitations.md#killed-brokers);
- no message comes again that was settled more than 5 s before a fault of the primary;
- no message comes from nowhere or out of order; two queues without consumers show the order over all faults;
- both logs are equal, and all queues are empty.

| variable | effect |
|---|---|
| (none) | `make test`: one life with each fault once, per version, as processes and in containers (skipped without Docker) |
| `LRQ_FAULT_HOURS=2` | continues with the next seeds for that time |
| `LRQ_FAULT_SEED`, `LRQ_FAULT_ROUNDS` | choose a life |
| `LRQ_FAULT_DIR` | folder for the file with every event of a life (default: pytest's temporary folder) |

A failure names that file and the seed. A seed repeats the actions and their times, not the timing of the machine.

### Simulation

`tests/simulation` runs the core, the real `Replica`, `rebuild` and confirms around simulated brokers (contents, unacked
deliveries, dead letters, expiry, length limits), links, clocks and clients.

- Checked in every step: what a client is told, given or loses (G1 to G5; of the order, first deliveries).
- Checked every ten steps, at each start and at the end: the memory of a node is what its stream says, the node would
  say the truth if promoted, no queue has a message twice.
- Faults: crashes of sidecar, broker and host, partitions, stalls, disk alarms; in lives of the log also logs that lose
  their beginning.
- One life in twenty each: `restart_alone`; one of the two connections of a pair lost until the faults end, while an
  operator asserts a node to be down that the other hears; four nodes; pushes that arrive twice. Four in twenty:
  transactions that publish and settle. One in ten: local completion.
- At the end everything is repaired and must become equal.

`make test` runs 1,000 lives; `LRQ_SEEDS` sets another number. Renewals have a simulation of their own, in which one
node writes and is lost (`tests/simulation/renewing.py SEED`). The census is not simulated; it has tests of its own
([test_tallying.py](../tests/unit/test_tallying.py), [test_census.py](../tests/integration/test_census.py)), so silent
removals may differ between the nodes of a life.
"""

RULES = """\
## Rules of the design

With any part of a rule of [architecture.md](architecture.md#the-rules) switched off, a test fails: a life of the whole
(`tests/simulation/life.py SEED`), a life of the log (`tests/simulation/chaos.py SEED`), a life of a group that etcd
coordinates (`tests/simulation/registered.py SEED`), or a trace (`tests/scenarios`).
[test_rules.py](../tests/simulation/test_rules.py) runs each row, and shows that each kind of check finds an error.
`python tests/simulation/table.py` writes the table.
"""


class Proof(NamedTuple):
    """A test, a file of tests, or some parameters of a test, and the RabbitMQ versions that it runs on (empty: it needs no broker)."""

    slug: str
    file: Path
    name: str = ""
    cases: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    def __str__(self) -> str:
        label = f"{self.file.name}::{self.name}" if self.name else self.file.name
        path = Path(os.path.relpath(self.file, DOCUMENT.parent)).as_posix()
        notes = ", ".join((*(f"`{case}`" for case in self.cases), *self.versions))
        return f"[{label}]({path})" + (f" ({notes})" if notes else "")


class BadMark(Exception):
    """A mark `proves` that cannot be read."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))


def _marks(node: ast.AST) -> Iterator[tuple[str, ast.Call | None]]:
    """Names and calls of the `pytest.mark`s in an expression: one, or a list of them."""
    if isinstance(node, ast.List | ast.Tuple):
        for element in node.elts:
            yield from _marks(element)
    elif isinstance(node, ast.Call):
        yield from ((name, node) for name, _ in _marks(node.func))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark":
        yield node.attr, None


def _marks_of_module(tree: ast.Module) -> list[tuple[str, ast.Call | None]]:
    return [
        mark
        for statement in tree.body
        if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in statement.targets)
        for mark in _marks(statement.value)
    ]


def _strings(node: ast.AST) -> tuple[str, ...]:
    value = ast.literal_eval(node)
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _proofs(file: Path, name: str, marks: list[tuple[str, ast.Call | None]], versions: tuple[str, ...]) -> Iterator[Proof]:
    for mark, call in marks:
        if mark != "proves":
            continue
        where = f"{file.name}::{name}"
        if call is None or not call.args or any(keyword.arg != "cases" for keyword in call.keywords):
            raise BadMark(f'{where}: a mark is as proves("G1", "strict") or proves("queue: TTL", cases=("queue_ttl",))')
        try:
            slugs = [_strings(argument)[0] for argument in call.args]
            cases = _strings(call.keywords[0].value) if call.keywords else ()
        except ValueError:
            raise BadMark(f"{where}: slugs and cases are literal strings") from None
        for slug in slugs:
            if slug not in STATEMENTS:
                raise BadMark(f"{where}: the slug {slug!r} is not in STATEMENTS of tests/verification.py")
            yield Proof(slug, file, name, cases, versions)


def all_versions() -> tuple[str, ...]:
    """The RabbitMQ versions that tests run on, unless they name one."""
    for statement in _parsed(TESTS / "conftest.py").body:
        if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "VERSIONS" for t in statement.targets):
            return _strings(statement.value)
    raise BadMark("tests/conftest.py has no VERSIONS")


@cache
def _files() -> dict[str, list[Path]]:
    """All files of the tests, by the name of their module."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(TESTS.rglob("*.py")):
        found[file.stem].append(file)
    return found


@cache
def _functions(file: Path) -> dict[str, _Function]:
    """Functions of a module, methods of its classes included."""
    inside = [(statement, *getattr(statement, "body", ())) for statement in _parsed(file).body]
    return {each.name: each for parts in inside for each in parts if isinstance(each, _Function)}


@cache
def _fixtures(file: Path) -> dict[str, _Function]:
    """Functions that may be fixtures of a file: its own, those that it imports from other files of tests, and those of each `conftest.py` above."""
    found: dict[str, _Function] = {}
    for folder in reversed(file.parents):
        if folder.is_relative_to(TESTS) and (folder / "conftest.py").exists():
            found |= _functions(folder / "conftest.py")
    for statement in _parsed(file).body:
        if isinstance(statement, ast.ImportFrom):
            for source in _files().get(statement.module or "", ()):
                found |= {alias.name: _functions(source)[alias.name] for alias in statement.names if alias.name in _functions(source)}
    return found | _functions(file)


def _asked(file: Path, function: _Function) -> frozenset[str]:
    """The fixtures of a test, with those that they ask for."""
    fixtures, seen, waiting = _fixtures(file), set[str](), [function]
    while waiting:
        arguments = waiting.pop().args
        asked = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - seen
        seen |= asked
        waiting += [fixtures[name] for name in asked if name in fixtures]
    return frozenset(seen)


def _versions(file: Path, function: _Function) -> tuple[str, ...]:
    decorators = (mark for decorator in function.decorator_list for mark in _marks(decorator))
    marks = dict((*_marks_of_module(_parsed(file)), *decorators))
    asked = _asked(file, function)
    if "broker_version" in asked:
        one = marks.get("one_version")
        return _strings(one.args[0]) if one is not None else all_versions()
    return (ANY,) if "new_lab" in asked or marks.keys() & {"broker", "docker"} else ()


def proofs_of(file: Path) -> list[Proof]:
    """What the tests of a file prove.

    Raises:
        BadMark: A mark is wrong.
    """
    if "mark.proves" not in file.read_text("utf-8"):
        return []
    tree = _parsed(file)
    tests = [function for name, function in _functions(file).items() if name.startswith("test_")]
    ran_on = {version for test in tests for version in _versions(file, test)}
    found = list(_proofs(file, "", _marks_of_module(tree), tuple(v for v in (*all_versions(), ANY) if v in ran_on)))
    for statement in tree.body:
        if isinstance(statement, _Function | ast.ClassDef):
            marks = [mark for decorator in statement.decorator_list for mark in _marks(decorator)]
            versions = _versions(file, statement) if isinstance(statement, _Function) else ()
            found += _proofs(file, statement.name, marks, versions)
    return found


@cache
def all_proofs() -> tuple[Proof, ...]:
    """What all tests prove, by file and place in it."""
    files = sorted(file for name, found in _files().items() if name.startswith("test_") for file in found)
    return tuple(proof for file in files for proof in proofs_of(file))


def section_of(slug: str) -> str:
    """The key of `SECTIONS` that a slug belongs to."""
    kind, colon, _ = slug.partition(": ")
    if colon:
        return kind
    return "promise" if slug[0] == "G" else "condition"


def page(rules: str) -> str:
    """The whole page; `rules`: the table of the rules, as it stands in the page."""
    tests: dict[str, list[str]] = defaultdict(list)
    for proof in all_proofs():
        if str(proof) not in tests[proof.slug]:
            tests[proof.slug].append(str(proof))
    parts = [HEAD]
    for key, title in SECTIONS.items():
        rows = [f"| {slug} | {text} | {', '.join(tests[slug])} |" for slug, text in STATEMENTS.items() if section_of(slug) == key]
        parts.append("\n".join((f"## {title}\n", "| slug | statement | tests |", "|---|---|---|", *rows, "")))
    return "\n".join((*parts, RULES, f"{BEGIN}{rules}{END}\n"))


def rules_of(text: str) -> str:
    """The table of the rules in the page."""
    return text.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    DOCUMENT.write_text(page(rules_of(DOCUMENT.read_text("utf-8"))), "utf-8")
