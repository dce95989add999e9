"""What the autoscaler decided, what it expected of it, and what came. Read `decision.py` first."""
