"""Goodput under open load, beside other systems on the same cores. Read `main.py` first."""
