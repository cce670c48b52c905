"""The programs of docs/clients.md, as ordinary users run them: each framework's sender is fed numbered orders, its worker writes what it did and when
to a ledger."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lrq_ha.lab.files import python_environment

CLIENTS_MD = Path(__file__).parents[2] / "docs" / "clients.md"
PROGRAM = re.compile(r"```python\n# (\w+\.py)\n.*?```", re.DOTALL)
#: Queue, sender and worker of each framework.
FRAMEWORKS = {
    "pika": ("pika-orders", ["pika_send.py"], ["pika_work.py"]),
    "aio-pika": ("aio-orders", ["aio_send.py"], ["aio_work.py"]),
    "kombu": ("kombu-orders", ["kombu_send.py"], ["kombu_work.py"]),
    "celery": ("celery", ["celery_send.py"], ["-m", "celery", "-A", "tasks", "worker", "-c", "2"]),
}
ORDERS_PER_SECOND = 40


def write_programs(folder: Path) -> None:
    """The page's programs, as files of the names that their first lines say."""
    for found in PROGRAM.finditer(CLIENTS_MD.read_text()):
        (folder / found[1]).write_text(found[0].removeprefix("```python\n").removesuffix("```"))


@dataclass
class Framework:
    """One framework's two programs, fed by a thread. `fed`: orders given to the sender so far."""

    queue: str
    ledger: Path
    sender: subprocess.Popen[str]
    worker: subprocess.Popen[str]
    fed: int = 0

    def done(self) -> dict[int, list[float]]:
        """Orders in the ledger, with the times at which they were done."""
        found: dict[int, list[float]] = defaultdict(list)
        if self.ledger.exists():
            for line in self.ledger.read_text().splitlines():
                when, order = line.split()
                found[int(order)].append(float(when))
        return found

    def feed(self, enough: threading.Event) -> None:
        """Orders at a steady pace, then the end of the input."""
        assert self.sender.stdin is not None
        with self.sender.stdin as orders:
            while not enough.wait(1 / ORDERS_PER_SECOND):
                orders.write(f"{self.fed}\n")
                orders.flush()
                self.fed += 1


def start(name: str, folder: Path, doors: str) -> Framework:
    queue, sender, worker = FRAMEWORKS[name]
    ledger = folder / f"{name}.ledger"
    environment = python_environment() | {"DOORS": doors, "LEDGER": str(ledger)}

    def run(kind: str, arguments: list[str]) -> subprocess.Popen[str]:
        with open(folder / f"{name}.{kind}.log", "w") as output:
            return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, text=True, stdin=subprocess.PIPE,
                                    stdout=output, stderr=subprocess.STDOUT)

    return Framework(queue, ledger, run("sender", sender), run("worker", worker))


def alive(frameworks: dict[str, Framework], folder: Path) -> Callable[[], bool]:
    """A check that none of the programs has given up."""

    def check() -> bool:
        for name, framework in frameworks.items():
            for kind, process in (("sender", framework.sender), ("worker", framework.worker)):
                assert process.poll() is None, f"{name}'s {kind} has ended:\n{(folder / f'{name}.{kind}.log').read_text()[-4000:]}"
        return True

    return check
