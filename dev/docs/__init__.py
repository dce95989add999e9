"""Generates pages, and checks the hand-written ones. `check.py` is `make docs-check`."""
