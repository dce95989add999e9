"""`python -m bench.routing`; see `decisions.py`."""

from __future__ import annotations

import sys

from bench.routing.decisions import main

sys.exit(main())
