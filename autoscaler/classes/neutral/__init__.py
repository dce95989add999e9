"""Replica classes of neutral workers: one price list, a speed on each side. Read `neutral_plan.py` first."""
