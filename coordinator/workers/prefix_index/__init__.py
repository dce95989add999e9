"""Which worker holds which prefix. Read `index.py` first."""
