"""Whether the advisor's choice is the measured best. Read `regret.py` first."""
