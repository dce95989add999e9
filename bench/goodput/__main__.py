"""`python -m bench.goodput`; see `main.py`."""

from __future__ import annotations

import sys

from bench.goodput.main import main

sys.exit(main())
