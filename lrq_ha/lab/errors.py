"""The lab's error."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class LabError(LrqError):
    """A fault of the lab's processes, folder or brokers; the text names the remedy."""


class NoLab(LabError):
    """No lab runs in a folder."""
