"""The scenarios of the log run in the simulated cluster, which lives with the simulation."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "simulation"))
