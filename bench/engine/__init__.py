"""The engine alone, beside the machine's limits and other engines. Read `throughput.py` first."""
