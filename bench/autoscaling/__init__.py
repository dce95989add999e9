"""Scaling policies on traces, in simulated time. Read `attainment.py` first."""
