"""Scales the two pools of workers, each by its own signals. Read `control_loop.py` first, then `decide.py`."""
