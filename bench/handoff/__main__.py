"""`python -m bench.handoff`; see `phases.py`."""

from __future__ import annotations

import sys

from bench.handoff.phases import main

sys.exit(main())
