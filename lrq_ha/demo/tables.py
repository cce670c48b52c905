"""The tables at the other site, and the configuration of the pipeline that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

#: Table -> its columns and its key.
TABLES = {
    "flights": (
        "id BIGINT, year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay BIGINT, arr_time INT, sched_arr_time INT, "
        "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, distance INT, hour INT, "
        "minute INT, time_hour STRING",
        "id",
    ),
    "airlines": ("carrier STRING, name STRING", "carrier"),
    "airports": ("faa STRING, name STRING, lat DOUBLE, lon DOUBLE, alt INT, tz INT, dst STRING, tzone STRING", "faa"),
    "planes": (
        "tailnum STRING, year INT, type STRING, manufacturer STRING, model STRING, engines INT, seats INT, speed INT, engine STRING",
        "tailnum",
    ),
}


def pipeline_config(queue: str, path: Path) -> str:
    """The configuration of lrq-ha-pipeline, in TOML, without the addresses of nodes: LRQ_NODES has them, as they hold passwords.

    Args:
        queue: The receive queue.
        path: Folder of the tables.
    """
    lines = ["[source]", f"subscribe = {json.dumps(queue)}"]
    for name, (columns, key) in TABLES.items():
        lines += ["", f"[tables.{name}]", f"schema = {json.dumps(columns)}", f"key = {json.dumps([key])}"]
        lines += [f"buckets = {2 if name == 'flights' else 1}"]
    lines += ["", "[sink]", f"path = {json.dumps(str(path))}", "", "[run]", 'interval = "1s"']
    lines += ["", "[spark]", '"spark.sql.shuffle.partitions" = "2"']
    return "\n".join(lines) + "\n"
