"""`python -m bench.coordinator`; see `cpu_per_token.py`."""

from __future__ import annotations

from bench.coordinator.cpu_per_token import main

main()
