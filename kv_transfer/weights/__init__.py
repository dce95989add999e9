"""Weights from one worker to another that starts. Read `manifest.py` first, then `giver.py` and `taker.py`."""
