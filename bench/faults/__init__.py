"""Workers with planned faults, for tests and `bench.chaos`. Read `plan.py` first."""
