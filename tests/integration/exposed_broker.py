"""A broker that listens at every address of a network that has nothing but loopback, and what the doctor says of it before and after its advice.

`unshare --map-root-user --net python exposed_broker.py FOLDER VERSION WARNINGS` prints both as JSON: level, text and advice of each finding.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from lrq_ha.cli.doctor.command import examine
from lrq_ha.lab import Lab


def look(config: Path, warnings: int) -> list[tuple[str, str, str]]:
    """The findings of `listeners`, once there are so many warnings: a broker that starts tells of one listener after the other."""
    for _ in range(100):
        found = [each.finding for each in examine(config) if each.check == "listeners"]
        told = not any("is not checked" in finding.text for finding in found)
        if told and sum(finding.level.value == "warn" for finding in found) == warnings:
            break
        time.sleep(0.3)
    return [(finding.level.value, finding.text, finding.todo) for finding in found]


def main(folder: Path, version: str, warnings: int) -> None:
    """Starts the broker, asks, does as it is told, and asks again."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    lab = Lab({"east": 1}, folder, version, brokers_only=True, plugins=["rabbitmq_management"])
    lab.prepare()
    config = lab.nodes["e1"].config
    [file] = folder.rglob("rabbitmq.conf")
    file.write_text(re.sub(r"(listeners\.tcp\.1 = |management\.tcp\.ip = )127\.0\.0\.1", r"\g<1>0.0.0.0", file.read_text()))
    with lab:
        before = look(config, warnings)
        for todo in [todo for level, _, todo in before if level == "warn"]:
            key, value = re.fullmatch(r"Put (\S+) = (\S+) into rabbitmq.conf, and restart the broker", todo).groups()  # type: ignore[union-attr]
            file.write_text(re.sub(rf"(?m)^{re.escape(key)} = .*$", f"{key} = {value}", file.read_text()))
        lab.kill("e1.broker")
        lab.start("e1.broker")
        print(json.dumps({"before": before, "after": look(config, 0)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
