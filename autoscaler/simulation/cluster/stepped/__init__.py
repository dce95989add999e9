"""Replicas computed step by step, by the engine's own core on the virtual clock. Read `stepped_replicas.py` first."""
