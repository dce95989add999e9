"""How many replicas a pool should have. Read `policy_file.py` first, then `slo_prefill.py` and `slo_decode.py`."""
