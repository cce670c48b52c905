"""How many files a sidecar may have open: two for each connection of a client, and some for all else."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("lrq_ha.process")

OTHER_FILES = 256  # for other nodes, sites, HTTP and the broker
OTHER_FILES_SHARE = 4  # of the allowed files, if there are few


def count_needed(connections_max: int) -> int:
    """The files that so many connections need, and all else."""
    return 2 * connections_max + OTHER_FILES


def allow_files(connections_max: int) -> int:
    """Raises the limit on open files to the door's need (two for each connection), as far as possible. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count_needed(connections_max)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return connections_max
    found = max((allowed - min(OTHER_FILES, allowed // OTHER_FILES_SHARE)) // 2, 1)
    text = "door.connections_max = %d needs %d open files, and %d are allowed: the door takes %d connections. Raise LimitNOFILE"
    log.warning(text, connections_max, wanted, allowed, found)
    return found
