"""`python -m bench.chaos`; see `run.py`."""

from __future__ import annotations

import sys

from bench.chaos.run import main

sys.exit(main())
