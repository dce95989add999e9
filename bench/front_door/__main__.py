"""`python -m bench.front_door`; see `figures.py`."""

from __future__ import annotations

from bench.front_door.figures import main

main()
