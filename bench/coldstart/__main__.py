"""`python -m bench.coldstart`; see `starts.py`."""

from __future__ import annotations

import sys

from bench.coldstart.starts import main

sys.exit(main())
