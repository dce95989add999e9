"""Forward passes captured once and replayed without Python, on cpu. Read `capture.py` first."""
