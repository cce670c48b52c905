"""Text for a terminal or a log: one line, whatever names clients give. Rule: text that may hold a client's name is printed by `one_line`."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}


def one_line(text: str) -> str:
    """The text with control characters, and code points that are no characters, escaped."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()
