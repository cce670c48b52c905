"""What lets tests outlast a machine that stands still for half a minute: longer time-outs, where a test is not about them.

Rule: a test that is about a time-out or about heartbeats asks for its own.
"""

from __future__ import annotations

import pika.connection
from hypothesis import HealthCheck, settings

#: Keys of [door] for labs whose tests are not about slow logins.
PATIENT_DOOR = {"handshake_timeout_s": 40.0}


def patient_pika() -> None:
    """pika's clients take their time to log in; and they may do something else for minutes, in which they send no heartbeats."""
    defaults = pika.connection.Parameters
    defaults.DEFAULT_SOCKET_TIMEOUT = 60.0
    defaults.DEFAULT_STACK_TIMEOUT = 120.0
    defaults.DEFAULT_HEARTBEAT_TIMEOUT = 0


def patient_hypothesis() -> None:
    """An example that takes long, or is long in the making, has met a pause of the machine."""
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
