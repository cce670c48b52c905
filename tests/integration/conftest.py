"""The door's rig, for the tests that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from door_rig import Rig

from lrq_ha.lab import Lab


@pytest.fixture
def rig(pair: Lab) -> Iterator[Rig]:
    """The shared pair; checks after the test that its logs are whole."""
    rig = Rig(pair)
    yield rig
    rig.finish()
