"""The identity of a group's log: random bytes that its first MARKER brings. A log of an early version has none, and passes for any."""

from __future__ import annotations

from lrq_ha.errors import MalformedInput


def is_other_log(known: bytes, came: bytes) -> bool:
    """Whether two identities are of different logs, as far as both are known."""
    return bool(known and came) and known != came


def other_log(source: str, known: bytes, came: bytes) -> MalformedInput:
    """The error of a source whose log is not the one that the sink knows by its name."""
    return MalformedInput(
        f"The sink knows the log {known.hex()} by the name {source}, and this is the log {came.hex()}: another group of that name, or one that was "
        "set up again",
        todo="Give that group another name in [node] group of its nodes.",
    )
