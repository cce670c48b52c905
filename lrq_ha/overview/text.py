"""Text for a terminal or a log: one line, whatever names clients give, and tables.

Rule: text that may hold a client's name goes through `one_line`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

NAMED_MAX = 5
_KIB, _UNITS = 1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_CONTINUED = " " * 6  # before the further lines of a text

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}


#: Headings of numbers, which are aligned to the right.
NUMBERS = frozenset({"AGE S", "LAG", "LAG S", "LAST", "LEFT", "LOG END", "LOG LEFT", "MS"})


class Table(NamedTuple):
    """A table for people. `rows`: as many cells as there are headings; `remarks`: the subject of each, and the text."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[tuple[str, str]] = ()


def one_line(text: str) -> str:
    """The text with control characters, and code points that are no characters, escaped."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()


def align_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    cells = [headings, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    return [
        "  ".join(cell.rjust(width) if heading in NUMBERS else cell.ljust(width) for heading, cell, width in zip(headings, row, widths)).rstrip()
        for row in cells
    ]


def wrap_remark(head: str, text: str, width: int | None) -> list[str]:
    """The lines of a text below a table. `head`: what it is about, one line; `width`: columns of a line, unless a word is longer; None: one line."""
    first = f"  {head}  "
    if width is None:
        return [first + one_line(text)]
    return textwrap.wrap(
        one_line(text), width, initial_indent=first, subsequent_indent=_CONTINUED, break_long_words=False, break_on_hyphens=False
    )


def name_some(names: Sequence[str]) -> str:
    """The first few of some names, quoted, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(f"'{name}'" for name in names[:NAMED_MAX]) + more


def format_cell(value: object) -> str:
    """A value in a table; None is a dash."""
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def format_size(value: object) -> str:
    """Bytes in the largest unit of which there is at least one; any other value as it is."""
    if not isinstance(value, int) or value < _KIB:
        return format_cell(value)
    size, unit = float(value), -1
    while size >= _KIB:
        size, unit = size / _KIB, unit + 1
    return f"{size:.{0 if size >= 99.95 else 1}f} {_UNITS[min(unit, len(_UNITS) - 1)]}"
