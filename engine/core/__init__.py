"""The engine's logic, independent of model and device. Read `engine_core.py` first (one step), then `scheduler.py`."""
