"""python -m lrq_ha.spark.pipeline CONFIG"""

import sys

from lrq_ha.spark.pipeline.run import main

sys.exit(main())
