"""Who waits at the coordinator, for how long, and in which order. `gate.py` is the edge; the rest is pure."""
