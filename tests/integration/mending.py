"""What a failed test leaves behind is mended before the next one.

A test of faults that fails in the middle may leave a node killed, paused or out of the set. All others that share its lab would wait for it in
turn, in vain, and a run would never end. Rule: everything of the lab runs again; what does not get whole by that is thrown away for a new lab on
the same ports, and what its nodes said of themselves is a warning of that test.
"""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress

from etcd_rig import post
from load import eventually

from lrq_ha.lab import Lab, LabError
from lrq_ha.lab.probe import excerpt

MEND_S = 60.0
APPLIED_LATE_MAX = 100  # entries that a node without load may not have applied yet: its own


def mend(lab: Lab) -> str:
    """Makes a lab of sidecars whole; nothing happens if it is, or if it is down. Returns what its nodes said if there is a new one now."""
    try:
        if not any(key.endswith(".sidecar") for key in lab.processes()):
            return ""
    except LabError:
        return ""  # it went with the last test
    try:
        for name in lab.nodes:
            with suppress(LabError):
                lab.cont(name)
            with suppress(LabError):  # all of it is running
                lab.start(name)
        eventually("the lab to be whole", lambda: is_whole(lab), MEND_S)
    except (AssertionError, LabError) as error:
        said = [f"{lab.directory} was not mended, but started anew: {error}", *(_last_words(lab, name) for name in lab.nodes)]
        lab.down()
        for url in lab.etcd:  # one that is not the lab's is still there, and a new group does not begin over the record of another
            with suppress(OSError):
                post(url, "kv/deleterange", key=b64encode(b"/lrq-ha").decode(), range_end=b64encode(b"/lrq-hb").decode())
        lab.up()
        return "\n".join(said)
    return ""


def _last_words(lab: Lab, name: str) -> str:
    try:
        says: object = lab.status(name)
    except LabError as error:
        says = error
    return f"{name} says {says}, its log\n{excerpt(lab.nodes[name].log)}"


def is_whole(lab: Lab) -> bool:
    """Whether every group has a primary, with all others in sync, and what is in its log is in the queues of all."""
    for group in {node.group for node in lab.nodes.values()}:
        primary = lab.primary(group)
        names = {node.name for node in lab.nodes.values() if node.group == group}
        if primary is None or set(lab.status(primary)["members"]) != names:
            return False
        said = {name: lab.status(name) for name in names}
        if any(said[name]["role"] != "ready" or said[name]["lacks"] for name in names - {primary}):
            return False
        if min(each["applied"] for each in said.values()) < said[primary]["safe"] - APPLIED_LATE_MAX:
            return False
    return True
