"""Traces: file formats, synthetic load, scaling. Read `trace.py` first."""
