"""The whole door under hostile sessions, on real brokers: each costs its own connection only. LRQ_FUZZ=1000000 makes it a hundredth of that."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus import corpus

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from door_rig import Rig
from load import eventually
from raw_client import RawClient

from lrq_ha.lab import Lab
from lrq_ha.replication.errors import LrqError

pytestmark = pytest.mark.broker

INPUTS = max(150, int(os.environ.get("LRQ_FUZZ", "0")) // 100)
LOOK_EVERY = 50
SEED = int(os.environ.get("LRQ_FUZZ_SEED", "1"))


@pytest.fixture
def rig(pair: Lab) -> Iterator[Rig]:
    rig = Rig(pair)
    yield rig
    rig.finish()


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One to three sessions after each other, with a few octets changed, cut out, put in or repeated."""
    data = bytearray(b"".join(rng.choice(seeds) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.randint(0, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                data[at:at] = data[at : at + rng.randint(1, 200)]
    return bytes(data)


@pytest.mark.timeout(max(300, INPUTS))
def test_hostile_sessions_cost_their_own_connection_only(rig: Rig) -> None:
    rng = random.Random(SEED)
    seeds = corpus()
    log = rig.lab.nodes[rig.primary].log
    before = len(log.read_text())
    bystander = rig.channel(confirms=True)
    queue = rig.declare(bystander)
    count = 0
    for number in range(INPUTS):
        logged_in = rng.random() < 0.7
        data = mutated(rng, seeds)
        try:
            with RawClient(rig.url, login=logged_in) as client:
                for at in range(0, len(data), size := rng.choice([1, 7, 100, 1 << 20])):
                    client.send(data[at : at + size])
                    if at > 300 * size:
                        break
                client.closed(rng.choice([0.001, 0.02]))
        except (OSError, AssertionError, LrqError):
            pass
        if number % LOOK_EVERY == 0:
            bystander.basic_publish("", queue, b"%d" % number)
            count += 1
    assert bystander.queue_declare(queue, passive=True).method.message_count == count
    eventually("the door to let go of them", lambda: rig.lab.status(rig.primary)["connections"] <= 2)
    said = log.read_text()[before:]
    assert "could not be handled" not in said
    assert "Traceback" not in said
    bystander.queue_delete(queue)
