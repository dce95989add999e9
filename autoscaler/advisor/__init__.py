"""Which split of the workers a recorded traffic asks for. Read `advice.py` first."""
