"""`python -m bench.autoscaling`; see `attainment.py`."""

from __future__ import annotations

import sys

from bench.autoscaling.attainment import main

sys.exit(main())
