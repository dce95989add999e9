"""`python -m bench.advisor`; see `regret.py`."""

from __future__ import annotations

import sys

from bench.advisor.regret import main

sys.exit(main())
