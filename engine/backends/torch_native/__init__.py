"""The backend in plain torch. Read `attention.py` first."""
