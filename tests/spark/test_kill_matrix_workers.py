"""SIGKILL of the driver or an executor between any two steps of a micro-batch: the tables equal the source."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_matrix import cluster, kill_before_any_step, sites  # noqa: F401
from pyspark.sql import SparkSession
from standalone import Cluster

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(3600), pytest.mark.one_version("4.3"), pytest.mark.proves("G6")]


@pytest.mark.parametrize("victim", ["driver", "executor"])
def test_a_kill_before_any_step(spark: SparkSession, sites: Lab, cluster: Cluster, tmp_path: Path, victim: str) -> None:  # noqa: F811
    """Takes minutes: a driver on a cluster that is killed needs a Spark for each of its lives, and a killed node a promotion."""
    kill_before_any_step(spark, sites, cluster, tmp_path, victim)
