"""Spot notices: requests leave a worker whose machine is taken away. Read `move_plan.py` first; `mover.py` runs it."""
