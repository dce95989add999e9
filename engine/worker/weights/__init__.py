"""Weights between workers: who gives them, and who starts with them. Read `service.py` first, then `pull.py`."""
