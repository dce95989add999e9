"""Makes snapshots from the coordinators' counters. Read `observer.py` first."""
