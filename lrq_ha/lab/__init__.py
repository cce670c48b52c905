"""Private brokers and sidecars on loopback, as plain processes: for tests, benchmarks, the demo and experiments.

Usage::

    from lrq_ha.lab import Lab
    with Lab(groups={"east": 2, "west": 1}, directory=Path(".lab")) as lab:
        lab.kill("e1.broker")

`brokers` finds RabbitMQ installations, `keeper` owns every process, `files` writes a node's files, `lab` combines them.
"""

from lrq_ha.lab.brokers import Installation, installations
from lrq_ha.lab.errors import LabError
from lrq_ha.lab.lab import Lab
from lrq_ha.lab.node import LabNode

__all__ = ["Installation", "Lab", "LabError", "LabNode", "installations"]
