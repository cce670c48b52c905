"""The lab's error."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class LabError(LrqError):
    """Something about the lab's processes, folder or brokers; the text says what to do."""


class NoLab(LabError):
    """None runs in a folder."""
