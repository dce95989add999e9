"""`python -m bench.engine`; see `throughput.py`."""

from __future__ import annotations

import sys

from bench.engine.throughput import main

sys.exit(main())
