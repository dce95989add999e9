"""`python -m bench.autoscaling`; see `verdict.py`."""

from __future__ import annotations

import sys

from bench.autoscaling.verdict import main

if __name__ == "__main__":
    sys.exit(main())
