"""Faults on a running cluster of real workers, and whether its streams notice. Read `run.py` first."""
