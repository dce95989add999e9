"""Rules of generation shared by workers and coordinator. Read `bounds.py` first."""
