"""Where neutral workers lean. Read `leaning_planner.py` first; `leaning_loop.py` runs it."""
