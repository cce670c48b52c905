"""Text for a terminal or a log: one line, whatever clients call their queues. Rule: what may hold a name of theirs is printed by `one_line`."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}


def one_line(text: str) -> str:
    """The text with its control characters, and what is no character, escaped."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()
