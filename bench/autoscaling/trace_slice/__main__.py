"""`python -m bench.autoscaling.trace_slice`; see `run.py`."""

from __future__ import annotations

import sys

from bench.autoscaling.trace_slice.run import main

if __name__ == "__main__":
    sys.exit(main())
