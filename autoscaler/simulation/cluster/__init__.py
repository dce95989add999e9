"""Simulated workers. Read `cluster.py` first."""
