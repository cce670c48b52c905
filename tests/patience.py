"""What lets tests outlast a machine that stands still for half a minute: longer time-outs, where a test is not about them.

Rule: a test that is about a time-out or about heartbeats asks for its own.
"""

from __future__ import annotations

import pika.connection

#: Keys of [door] for labs whose tests are not about slow logins.
PATIENT_DOOR = {"handshake_timeout_s": 40.0}


def patient_pika() -> None:
    """pika's clients take their time to log in; and they may do something else for minutes, in which they send no heartbeats."""
    defaults = pika.connection.Parameters
    defaults.DEFAULT_SOCKET_TIMEOUT = 60.0
    defaults.DEFAULT_STACK_TIMEOUT = 120.0
    defaults.DEFAULT_HEARTBEAT_TIMEOUT = 0
