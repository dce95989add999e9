"""How many GPUs a traffic needs. Read `sizing.py` first."""
