"""docs/spark/options.md has each option of format lrq with its values and its default, and docs/spark/running.md names errors that there are.

`python tests/unit/test_spark_options.py` writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed")

from lrq_ha.spark.options import ALLOWED, COUNTERPARTS, DEFAULTS, parse_options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spark" / "options.md"
RUNNING = ROOT / "docs" / "spark" / "running.md"
MARK = "<!-- The table is written by: python tests/unit/test_spark_options.py -->\n"
NEEDED = {"nodes": "amqp://a:b@192.0.2.1", "subscribe": "LRQ_Recv_a_b"}


def with_table(page: str) -> str:
    """The page with the table of today's options."""
    before, _, rest = page.partition(MARK)
    rows = [f"| `{name}` | {_escape(text)} | {_code(DEFAULTS.get(name))} |" for name, text in ALLOWED.items()]
    table = "\n".join(["| option | value | default |", "|---|---|---|", *rows])
    return f"{before}{MARK}\n{table}\n\n{rest[rest.index('## Notes') :]}"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is; code keeps its marks."""
    parts = text.split("`")
    return "`".join(part if number % 2 else re.sub(r"([<>_|*{}])", r"\\\1", part) for number, part in enumerate(parts))


def _code(default: str | None) -> str:
    return "–" if default is None else f"`{default}`"


def test_the_page_has_every_option() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_table(page)
    assert [name for name in COUNTERPARTS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_what_an_option_has_that_is_left_out(name: str) -> None:
    given = NEEDED | {name: DEFAULTS[name]}
    assert parse_options(given) == parse_options(NEEDED)


def test_every_error_that_is_named_is_one_of_the_code() -> None:
    """A gap in an error's text is an ellipsis."""
    code = "".join(path.read_text("utf-8") for path in sorted((ROOT / "lrq_ha").rglob("*.py")))
    ours = RUNNING.read_text("utf-8").partition("\nThese come from Spark itself:")[0]
    section = re.search(r"^## Errors\n(.*)", ours, re.MULTILINE | re.DOTALL)
    assert section is not None
    named = re.findall(r"^\| `([^`]+)` \|", section[1], re.MULTILINE)
    assert len(named) >= 10
    assert [part for text in named for part in text.split("…") if part.strip(" :,") and part.strip() not in code] == []


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
