"""P3: a pair beside what stock RabbitMQ offers: a shovel to a second broker, and a quorum queue of three nodes. Publishes with confirms, in turns.

Rules:
- A message counts when a second broker has it: at the pair's door and at the quorum queue when it is confirmed, behind the shovel when it is in
  the second broker's queue. Messages are persistent, queues durable; the shovel acks what the second broker has confirmed.
- All brokers run throughout, on loopback, each as a process of its own; those that are not measured stand idle: `others_cpu_s` of a run is theirs.
- The quorum queue's publisher is connected to the node of its leader: the best that it can have. A quorum queue behind the door has one member on
  each node, and is compared with both; a classic one, for which there is no cluster that replicates it any more, with the shovel.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from pamqp import commands

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from . import wire
from .cost import cpu_of
from .measure import WAIT_S, Figure, Row, applied, asking, declare, delete, go, note, ready, until
from .throughput import SIZE_BYTES, WINDOW_MESSAGES, Plan

GOALS = {"shovel": 1.5, "cluster": 1.0}
BATCH_MESSAGES = 50
CLUSTER_NODES = 3
SHOVELLED = "bench-shovel-{kind}"
RIVALS = {"classic": ("shovel",), "quorum": ("shovel", "cluster")}
SHORT = Plan(1, 20_000, 2_000)


@dataclass(frozen=True)
class Stage:
    """The brokers of a series: a pair with its sidecars, two brokers with shovels between them, a cluster."""

    pair: Lab
    two: Lab
    cluster: Lab

    def lab(self, side: str) -> Lab:
        return {"door": self.pair, "shovel": self.two, "cluster": self.cluster}[side]

    def cpu_s(self) -> dict[str, float]:
        """CPU time used by everything, by side."""
        return {side: sum(cpu_of(self.lab(side)).values()) for side in ("door", "shovel", "cluster")}


def p3(brokers: list[str], plan: Plan) -> Row:
    """Each rival has its goal."""
    runs: list[dict[str, Any]] = []
    details: list[str] = []
    figures: list[Figure] = []
    for broker in brokers:
        with (
            Lab({"east": 2}, broker=broker, sites={}) as pair,
            Lab({"east": 2}, broker=broker, brokers_only=True, plugins=["rabbitmq_shovel"]) as two,
            Lab({"east": CLUSTER_NODES}, broker=broker, brokers_only=True) as cluster,
        ):
            stage = Stage(pair, two, cluster)
            _cluster(cluster)
            for kind, rivals in RIVALS.items():
                _shovel(two, kind)
                rounds = [_round(stage, kind, ("door", *rivals), number, plan) for number in range(plan.rounds)]
                runs += [run for each in rounds for run in each.values()]
                for rival in rivals:
                    figures.append(figure_beside(rival, f"{broker} {kind}", rounds))
                    details.append(_detail(f"{broker} {kind} ÷ {rival}", rival, rounds))
                    note(f"P3 {details[-1]}")
    return Row("P3", figures, "; ".join(details), runs)


def figure_beside(rival: str, variant: str, rounds: list[dict[str, dict[str, Any]]]) -> Figure:
    """Rate through the door ÷ rate of a rival, and its goal."""
    return Figure(f"of_{rival}", median(_ratios(rival, rounds)), GOALS[rival], least=True, variant=variant)


def _ratios(rival: str, rounds: list[dict[str, dict[str, Any]]]) -> list[float]:
    return [each["door"]["rate"] / each[rival]["rate"] for each in rounds]


def _cluster(lab: Lab) -> None:
    """Makes one cluster of a lab's brokers."""
    first, *others = lab.nodes
    for name in others:
        for command in (("stop_app",), ("reset",), ("join_cluster", f"{first}@localhost"), ("start_app",)):
            lab.ctl(name, *command)
    running = json.loads(lab.ctl(first, "cluster_status", "--formatter", "json"))["running_nodes"]
    if len(running) != CLUSTER_NODES:
        raise LrqError(f"Of the cluster only {', '.join(running)} run")


def _shovel(lab: Lab, kind: str) -> None:
    """A queue on each of the two brokers, and a shovel between them."""
    queue, (source, target) = SHOVELLED.format(kind=kind), (node.broker for node in lab.nodes.values())
    for url in (source, target):
        declare(url, queue, kind)
    shovel = {
        "src-protocol": "amqp091", "src-uri": source, "src-queue": queue, "dest-protocol": "amqp091", "dest-uri": target, "dest-queue": queue,
        "ack-mode": "on-confirm"}  # fmt: skip
    definitions = lab.directory / f"{queue}.json"  # a file of the user's alone: the addresses hold passwords
    definitions.write_text(json.dumps({"parameters": [{"vhost": "/", "component": "shovel", "name": queue, "value": shovel}]}))
    lab.ctl("e1", "import_definitions", str(definitions))


def _detail(variant: str, rival: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    ratios = _ratios(rival, rounds)
    door, other = (median(each[side]["rate"] for each in rounds) for side in ("door", rival))
    text = f"{variant} {median(ratios):.2f} (rounds {min(ratios):.2f} to {max(ratios):.2f}; {door:,.0f} and {other:,.0f} msg/s"
    text += f"; {median(each['door']['applied_rate'] / each[rival]['rate'] for each in rounds):.2f} when counted until the backup's queue has all"
    return text + ")"


def _round(stage: Stage, kind: str, sides: tuple[str, ...], number: int, plan: Plan) -> dict[str, dict[str, Any]]:
    first = number % len(sides)
    found = {}
    for side in sides[first:] + sides[:first]:
        load, before = os.getloadavg(), stage.cpu_s()
        found[side] = {"door": _door, "shovel": _behind_the_shovel, "cluster": _replicated}[side](stage.lab(side), kind, plan)
        used = stage.cpu_s()
        spent = {each: used[each] - before[each] for each in used}
        found[side] |= {
            "side": side, "kind": kind, "broker": stage.pair.version, "load": load, "cpu_us": 1e6 * spent[side] / (plan.warm_up + plan.messages),
            "others_cpu_s": sum(spent.values()) - spent[side],
        }
        note(f"P3 {stage.pair.version}/{kind} {side}: {found[side]['rate']:,.0f} msg/s")
    return found


def _publishing(url: str, queue: str, plan: Plan) -> Any:
    return ready("publish", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, connections=1, channels=1, window=WINDOW_MESSAGES,
                 batch=BATCH_MESSAGES, warm_up=plan.warm_up)


def _door(lab: Lab, kind: str, plan: Plan) -> dict[str, Any]:
    url, queue = lab.nodes["e1"].door, f"bench-{kind}"
    declare(url, queue, kind)
    applied(lab)
    with _publishing(url, queue, plan) as process:
        result = go(process)
        after_s = applied(lab)
    delete(url, queue)
    applied(lab)
    return result | {"applied_after_s": after_s, "applied_rate": result["messages"] / (result["seconds"] + after_s)}


def _behind_the_shovel(lab: Lab, kind: str, plan: Plan) -> dict[str, Any]:
    queue, (source, target) = SHOVELLED.format(kind=kind), (node.broker for node in lab.nodes.values())
    with _publishing(source, queue, plan) as process, asking(target, queue) as arrived:
        until("the warm-up to be at the second broker", lambda: arrived() == plan.warm_up)
        result = go(process)
        behind_s = until("all to be at the second broker", lambda: arrived() == plan.warm_up + plan.messages)
    _purge(target, queue)
    seconds = result["seconds"] + behind_s
    return result | {"seconds": seconds, "rate": result["messages"] / seconds, "confirmed_rate": result["rate"], "behind_s": behind_s}


def _replicated(lab: Lab, kind: str, plan: Plan) -> dict[str, Any]:
    url, queue = lab.nodes["e1"].broker, f"bench-{kind}"
    declare(url, queue, kind)
    if (members := _members(lab, queue)) != CLUSTER_NODES:
        raise LrqError(f"The quorum queue has {members} members, not {CLUSTER_NODES}")
    with _publishing(url, queue, plan) as process:
        result = go(process)
    delete(url, queue)
    return result


def _members(lab: Lab, queue: str) -> int:
    queues = json.loads(lab.ctl("e1", "list_queues", "name", "members", "--formatter", "json"))
    return next((len(each["members"]) for each in queues if each["name"] == queue), 0)


def _purge(url: str, queue: str) -> None:
    connection = wire.Raw(url)
    connection.socket.settimeout(WAIT_S)
    connection.call(commands.Queue.Purge(queue=queue))
    connection.close()
