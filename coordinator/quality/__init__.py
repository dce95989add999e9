"""The quality watch: golden prompts that find wrong answers. Read `watch.py` first, then `judge.py`."""
