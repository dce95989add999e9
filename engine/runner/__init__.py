"""Model runners, from scheduled sequences to sampled tokens. Read `torch_runner.py` first."""
