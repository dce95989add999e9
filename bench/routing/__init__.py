"""Routing: time of a decision, and hits on a trace. Read `decisions.py` first."""
