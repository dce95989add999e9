"""The handoff as a finite system of its own state machines, to be explored completely. Read `world.py` first."""
