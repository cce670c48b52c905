"""Whatever the documentation names as a test, or as a file of tests, is there, as is whatever it links to; commands are ones that there are.

And every scenario of docs/scenarios.md has its answer.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from named_tests import TESTS, defined
from pika import exceptions

from lrq_ha.cli.main import parser

ROOT = TESTS.parent
SCENARIOS = ROOT / "docs" / "scenarios.md"
PAGES = [ROOT / "README.md", ROOT / "compose" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(r"\btests/[\w./-]*\w")
FILE = re.compile(r"\btest_\w+\.py\b")
TEST = re.compile(r"\btest_\w+\b(?!\.py)")
IN_FILE = re.compile(r"\b\w+\.py::\w+")
LINK = re.compile(r"\[(?P<file>\w+\.py)(?:::(?P<name>\w+))?\]\((?:\.\./)+(?P<path>tests/[\w/]+\.py)\)")
ANSWER = re.compile(rf"{LINK.pattern}|Does not apply: |\*\*Not yet\*\*")

#: What the systems that this one learnt from test, and what users of RabbitMQ complain of, by section of docs/scenarios.md.
ROWS = {
    "Qpid C++ HA": """replication; sync; send_receive; failover; heartbeat; backup_failover; empty_backup_failover; qpid_config_replication
        broker_info; standalone_queue_replica; lvq; ring; reject; priority; priority_fairshare; priority_ring; each further kind of RabbitMQ's
        backup_acquired; replicate_default; replicate_binding; invalid_replication; exclusive_queue; auto_delete_exclusive; auth
        alternate_exchange; priority_reroute; delete_missing_response; delete after a failover; auto_delete_failover; auto_delete_close
        missed_recreate; expired; resource_limit; failover_send_receive; tx_send_receive; tx_simple_commit; tx_simple_rollback; tx_simple_failure
        tx_join_leave; tx_block_threads; qmf_order; max_queues; queue_hold; expected_backup_timeout; join_ready_cluster; stalled_backup
        store_recovery; catchup_store""",
    "Tarantool relay": """persistent gc consumer; gc when the disk is full; logs that a replica needs are not deleted after a restart; missing log
        long subscribe; downstream lag by the master's clock only; split brain is refused; final join under synchronous load
        applier stops on an error in the initial fetch; stale ack on reconnect; rejoin; large rows do not time out; refused: no log
        refused: nil id; refused: self-connection; refused: other group's id; refused: second connection with an id in use; refused: too early""",
    "Corfu log replication": """RoutingQueueReplication; RoutingQueueFullSyncs; RoutingQueue2way; SnapshotSyncCancel; ScopedTxn
        OrderOfDataOnReceiveQueue; WithFullSyncData; NoFullSyncData; checkpoint-and-trim; snapshot reader with data; snapshot reader without data
        snapshot sync with trimmed exceptions; log entry sync with trim; log entry sync with ack drops; with message and ack drops
        with state-machine change and ack drop; snapshot sync with ack drops; long and delayed apply; role switch; two active; all standby
        lock release; enforced snapshot sync; backup-restore; duplicate start does not reset; a source that goes silent
        every take-over fences the previous leader's writer; a silent trim is never mistaken for "no data\"""",
    "mria RLOG": """no_unexpected_events; replicant_no_restarts; no_split_brain; replicant_bootstrap_stages; all_intercepted_commit_logs_received
        all_batches_received; counter_import_check; no_tlog_gaps; graceful_stop; agent_restart; random error injection; sum_verify
        replica_reconnect; dirty bootstrap heals by replay; core node down; many nodes joining at once; full restart; rebalance""",
    "Qpid's former cluster": """four senders, numbered messages, four receivers; acquire then release; acquire then kill; acquire then reject
        message_enqueue; message_dequeue; wiring; dequeue_mutex; member joins under load; ownership passes round; flow control; restart from store""",
    "What users of RabbitMQ complain of": """confirm only once another site has it; all queues of two sites in step
        switch freely between clusters; publisher dedup; a shovel on every node, tripling messages; a link that says running while nothing moves
        split brain in spite of pause_minority; eight days partitioned with no signal; a leader whose lease renews while its disk is dead
        155 MB of lag""",
    "Failover by a lease": """a primary whose lease is lost before it serves; a lease that is renewed too late
        "lease not found" repeated without an end
        a restart of etcd ends the broker; the last in-sync node gives up without a fault; a follower that stands still blocks all
        confirms before the set's change is committed; a mode for the time without etcd; a primary whose disk hangs keeps its lease
        etcd comes back with an older state; clocks that differ; two nodes only""",
}


def wrong(page: str) -> list[str]:
    """What a page names and is not there."""
    files = list(TESTS.rglob("*.py"))
    found = [path for path in PATH.findall(page) if not (ROOT / path).exists()]
    found += set(FILE.findall(page)) - {file.name for file in files}
    found += set(TEST.findall(page)).difference(*map(defined, files))
    links = list(LINK.finditer(page))
    for link in links:
        path = ROOT / link["path"]
        if path.name != link["file"] or not path.exists() or (link["name"] and link["name"] not in defined(path)):
            found.append(link[0])
    linked = {f"{link['file']}::{link['name']}" for link in links}
    return found + [mention for mention in IN_FILE.findall(page) if mention not in linked]


BOTH = re.compile(rf"{LINK.pattern}(?P<between>[^|\[]{{0,80}}?)(?:\(both\b|, both\b|3\.10, 4\.3)")
ONE_VERSION = re.compile(r"^@pytest\.mark\.one_version\(.*\n(?:@.*\n)*def (\w+)|^pytestmark = .*one_version", re.MULTILINE)


def of_one_version(page: str) -> list[str]:
    """Tests that are said to be for both versions of RabbitMQ, and run on one."""
    found = []
    for link in BOTH.finditer(page):
        marked = {mark[1] or "" for mark in ONE_VERSION.finditer((ROOT / link["path"]).read_text("utf-8"))}
        if "" in marked or link["name"] in marked:
            found.append(link[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_said_to_be_for_both_versions_runs_on_both(page: Path) -> None:
    assert of_one_version(page.read_text("utf-8")) == []


def test_what_is_said_of_versions_and_is_wrong_is_found() -> None:
    link = "(../tests/integration/{file}.py)"
    assert of_one_version(f"[test_three_nodes.py]{link.format(file='test_three_nodes')} (both)")
    assert of_one_version(f"[test_three_nodes.py]{link.format(file='test_three_nodes')} (`a`, 3.10, 4.3)")
    assert of_one_version(f"[test_adopt.py::test_a_backup_has_what_was_there_before]{link.format(file='test_adopt')}, both)")
    assert not of_one_version(f"[test_adopt.py]{link.format(file='test_adopt')} (both)")
    assert not of_one_version(f"[test_three_nodes.py]{link.format(file='test_three_nodes')} (4.3), [x] (both)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_is_named_exists(page: Path) -> None:
    assert wrong(page.read_text("utf-8")) == []


FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\((?P<inline>[^()\s]+)\)|^\[[^\]]+\]: (?P<reference>\S+)$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Of each heading, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", page))
    return {re.sub(r"[^\w -]", "", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text("utf-8"))
    lost = [f"[{name}]" for name in re.findall(r"\w\]\[(\w+)\]", text) if not re.search(rf"^\[{name}\]: \S+$", text, re.MULTILINE)]
    for found in TARGET.finditer(text):
        path, _, anchor = (found["inline"] or found["reference"]).partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text("utf-8"))):
            lost.append(found[0])
    assert lost == []


COMMAND = re.compile(r"^ {4,}(?:\S*bin/)?lrq-ha (.+)$", re.MULTILINE)
TO_PASTE = [*sorted((ROOT / "docs" / "operations").glob("*.md")), ROOT / "docs" / "quickstart.md", ROOT / "docs" / "configuration.md"]


@pytest.mark.parametrize("page", TO_PASTE, ids=lambda page: page.name)
def test_every_command_can_be_pasted(page: Path) -> None:
    for command in COMMAND.findall(page.read_text("utf-8")):
        arguments = shlex.split(command, comments=True)
        assert callable(parser().parse_args(arguments).run), command


@pytest.mark.parametrize(
    "text",
    [
        "`tests/unit/test_nothing.py`",
        "`tests/nowhere`",
        "`test_nothing.py`: order",
        "`test_nothing` in [test_docs.py](../tests/unit/test_docs.py)",
        "[test_docs.py::test_nothing](../tests/unit/test_docs.py)",
        "[test_docs.py::wrong](../tests/unit/test_protocol.py)",
        "test_docs.py::wrong, without a link",
    ],
)
def test_what_is_wrong_is_found(text: str) -> None:
    assert wrong(text)


def test_every_scenario_is_answered() -> None:
    sections = dict(re.findall(r"^## (.+?)(?: \([^\n]*\))?\n(.*?)(?=^## |\Z)", SCENARIOS.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    assert sections.keys() == {*ROWS, "Not yet"}
    for section, names in ROWS.items():
        rows = re.findall(r"^\| (.+?) \| (.+) \|$", sections[section], re.MULTILINE)
        assert [scenario for scenario, answer in rows if not ANSWER.search(answer) and answer != "answer"] == []
        for name in re.split(r"; |\n\s+", names):
            assert any(re.search(rf"(^|, ){re.escape(name)}($|[,:]| \()", scenario) for scenario, _ in rows), f"{section}: {name} is not answered"


def test_what_pika_raises_at_a_door_that_refuses_is_named_and_caught() -> None:
    """The names look fatal, so applications gave up; what the page advises to catch has to cover them."""
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    for name in ("IncompatibleProtocolError", "ProbableAccessDeniedError", "ProbableAuthenticationError"):
        assert f"`{name}`" in page
        assert issubclass(getattr(exceptions, name), exceptions.AMQPError)
    assert "except AMQPError" in page
