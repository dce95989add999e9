"""Which pair of workers serves a request. Read `pair_selector.py` first, then `prefix_router.py`."""
