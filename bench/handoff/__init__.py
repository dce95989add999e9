"""The handoff: its phases, its lanes, narrower KV, checksums. Read `phases.py` first."""
