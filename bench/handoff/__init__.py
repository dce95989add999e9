"""The handoff: its phases, the raw write beside it, and checksums. Read `phases.py` first."""
