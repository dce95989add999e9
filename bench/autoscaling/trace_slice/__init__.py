"""A trace's slice on real processes, beside its forecast. Read `run.py` first."""
