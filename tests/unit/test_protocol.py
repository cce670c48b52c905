"""The table of methods: complete, shown to be true by tests that exist, and what docs/protocol.md says.

`python tests/unit/test_protocol.py` writes the tables in docs/protocol.md anew.
"""

from __future__ import annotations

import pytest
from named_tests import TESTS, defined
from pamqp import commands

from broker_plugin.protocol import BROKER, CLIENT, BrokerRow, ClientRow, name_of

DOC = TESTS.parent / "docs" / "protocol.md"
MARK = "<!-- made by tests/unit/test_protocol.py -->\n"
# Which side sends a method stands in the specification, not in pamqp: these either may send.
BOTH = {"connection.close", "connection.close-ok", "channel.close", "channel.close-ok", "channel.flow", "channel.flow-ok", "basic.ack", "basic.nack",
        "basic.cancel"}  # fmt: skip


def tables() -> str:
    """The generated part of docs/protocol.md."""
    lines = []
    for title, rows in (("From clients", CLIENT), ("From the broker", BROKER)):
        lines += [f"\n## {title}\n", "| method | the door | shown by |", "|---|---|---|"]
        for row in rows:
            file, test = row.tests.split(".")
            lines.append(f"| `{name_of(row.method)}` | {row.does} | `{test}` in [test_{file}.py](../tests/integration/test_{file}.py) |")
    return "\n".join(lines) + "\n"


def test_every_method_that_pamqp_knows_has_a_row() -> None:
    named = [row.method for row in CLIENT], [row.method for row in BROKER]
    assert {*named[0], *named[1]} == set(commands.INDEX_MAPPING)
    for side in named:
        assert len(side) == len(set(side))
    assert {name_of(method) for method in named[0] if method in named[1]} == BOTH


def test_what_is_answered_is_sent_by_one_side_and_answered_by_the_other() -> None:
    sides = {row.method for row in CLIENT}, {row.method for row in BROKER}
    for method, kind in commands.INDEX_MAPPING.items():
        if method == commands.Basic.Cancel.index:
            continue  # a broker's is not answered
        for answer in kind.valid_responses:
            index = getattr(getattr(commands, answer.split(".")[0]), answer.split(".")[1]).index
            for here, there in (sides, sides[::-1]):
                assert method not in here or index in there, name_of(method)


@pytest.mark.parametrize("row", [*CLIENT, *BROKER], ids=lambda row: f"{type(row).__name__}-{name_of(row.method)}")
def test_every_row_names_a_test_that_exists(row: ClientRow | BrokerRow) -> None:
    file, test = row.tests.split(".")
    assert test in defined(TESTS / "integration" / f"test_{file}.py")


def test_documented_tables_are_up_to_date() -> None:
    assert DOC.read_text("utf-8").partition(MARK)[2] == tables(), "run: python tests/unit/test_protocol.py"


if __name__ == "__main__":
    DOC.write_text(DOC.read_text("utf-8").partition(MARK)[0] + MARK + tables(), "utf-8")
