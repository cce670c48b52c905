"""The tables of sites and receive queues below the nodes of `lrq-ha list`."""

from __future__ import annotations

from typing import Any

from lrq_ha.cli.list_nodes import as_text
from lrq_ha.overview import sites
from lrq_ha.overview.asking import Report, Target
from lrq_ha.overview.sites import site_lines

IN_STEP: dict[str, Any] = {"state": "in_log_entry_sync", "lag_entries": 0, "lag_seconds": 0.0, "bytes_left": 7 << 30, "snapshot": None, "problem": ""}
AWAY: dict[str, Any] = IN_STEP | {
    "state": "waiting_for_connection", "lag_entries": 300, "lag_seconds": 61.26, "bytes_left": 1 << 30,
    "problem": "bills to north is in danger of falling off LRQ_Send_LogEntries: the site lacks 6442450944 bytes",
}  # fmt: skip
UNKNOWN: dict[str, Any] = IN_STEP | {"lag_entries": None, "lag_seconds": None, "bytes_left": None}
FULL_SYNC: dict[str, Any] = UNKNOWN | {
    "state": "in_snapshot_sync", "snapshot": {"request": "r", "since": 1.0, "rows": 200, "bytes": 3 << 20, "attempts": 2},
}  # fmt: skip
QUEUE: dict[str, Any] = {
    "source": "east", "client": "orders", "last": "513.4711", "age_s": 3.4, "demand": None,
    "snapshot": {"request": "r", "complete": True, "begun": "513.7", "whole": "513.7"},
}  # fmt: skip


def test_sites_and_receive_queues_stand_below_the_nodes() -> None:
    sessions = {
        "west": {"connected": True, "problem": "", "clients": {"bills": FULL_SYNC, "orders": IN_STEP}},
        "north": {"connected": False, "problem": "192.0.2.7:5673: it cannot be reached", "clients": {"bills": AWAY}},
        "south": {"connected": True, "problem": "", "clients": {}},
    }
    queue = QUEUE | {"demand": "rows were lost", "age_s": None}
    queue["receivers"] = {
        "bills-db": {"position": "513.4700", "phase": "normal", "lag_entries": 11},
        "archive": {"position": "257.9", "phase": None, "lag_entries": None},
    }
    receiving = {"LRQ_Recv_orders_east": QUEUE, "LRQ_Recv_bills_east": queue | {"client": "bills"}}
    status = {"role": "active", "epoch": 513, "in_set": True, "end": 4711, "sessions": sessions, "receiving": receiving, "reason": "primary"}
    backup = Report(Target("e2", "centre", "http://127.0.0.1:2"), {"role": "ready", "sessions": sessions, "receiving": receiving})
    lines = as_text([Report(Target("e1", "centre", "http://127.0.0.1:1"), status), backup], 80).splitlines()
    assert lines == [
        "NODE  GROUP   ROLE    EPOCH  IN SYNC  LOG END  LAG  LAG S  LOG LEFT",
        "e1    centre  active  2.1    yes         4711    -      -         -",
        "e2    centre  ready   -      no             -    -      -         -",
        "",
        "  e1    primary",
        "",
        "sites to which centre sends:",
        "SITE   CLIENT  STATE                   LAG  LAG S     LEFT",
        "west   bills   in_snapshot_sync          -      -        -",
        "west   orders  in_log_entry_sync         0    0.0  7.0 GiB",
        "north  bills   waiting_for_connection  300   61.3  1.0 GiB",
        "south  -       connected                 -      -        -",
        "",
        "  north  192.0.2.7:5673: it cannot be reached",
        "  west  bills  full sync: 200 rows, 3.0 MiB, attempt 2",
        "  north  bills  bills to north is in danger of falling off LRQ_Send_LogEntries:",
        "      the site lacks 6442450944 bytes",
        "",
        "receive queues of centre:",
        "SOURCE  CLIENT  LAST  AGE S  SNAPSHOT  DEMAND",
        "east    orders  4711    3.4  whole     -",
        "east    bills   4711      -  whole     open",
        "",
        "  east  bills  a full sync is demanded: rows were lost",
        "",
        "receivers at centre:",
        "RECEIVER  SOURCE  CLIENT  PHASE   LAG",
        "bills-db  east    bills   normal   11",
        "archive   east    bills   -         -",
    ]
    assert max(map(len, lines)) <= 80


def test_a_group_without_sites_has_no_tables() -> None:
    assert site_lines("east", {"sessions": {}, "receiving": {}}, 80) == site_lines("east", {}, None) == []


def test_each_state_of_a_snapshot_is_told() -> None:
    snapshots = {
        "none": {"begun": None, "complete": False, "whole": None},
        "under way": {"begun": "513.9", "complete": False, "whole": None},
        "whole, under way": {"begun": "513.9", "complete": False, "whole": "513.7"},
        "whole": {"begun": "513.9", "complete": True, "whole": "513.9"},
    }
    receiving = {state: QUEUE | {"client": "c", "snapshot": snapshot} for state, snapshot in snapshots.items()}
    lines = site_lines("west", {"receiving": receiving}, None)
    start = lines[2].index("SNAPSHOT")
    assert [line[start:].rpartition("-")[0].strip() for line in lines[3:]] == list(snapshots)


def test_names_cannot_write_to_the_terminal() -> None:
    queue = QUEUE | {"client": "a\x1b[2J", "demand": "b\nc"}
    lines = site_lines("west", {"receiving": {"q": queue}}, None)
    assert lines[3].split()[1] == "a\\x1b[2J"
    assert lines[-1] == "  east  a\\x1b[2J  a full sync is demanded: b\\x0ac"


def test_of_very_many_sessions_those_that_lack_most_are_shown() -> None:
    clients = {f"c{number}": IN_STEP | {"lag_entries": number} for number in range(3 * sites.ROWS_MAX)}
    clients["c7"] = UNKNOWN
    lines = site_lines("east", {"sessions": {"west": {"connected": True, "clients": clients}}}, None)
    shown = lines[3:-2]
    assert len(shown) == sites.ROWS_MAX
    assert shown[0].split()[:4] == ["west", "c7", "in_log_entry_sync", "-"]
    assert [int(line.split()[3]) for line in shown[1:]] == list(range(201, 300)), "in the order of the status"
    assert lines[-2:] == ["", "  ...  and 200 more: lrq-ha list --format json"]


def test_a_link_without_a_text_is_told() -> None:
    assert site_lines("east", {"sessions": {"west": {"connected": False}}}, None)[-1] == "  west  no link"
