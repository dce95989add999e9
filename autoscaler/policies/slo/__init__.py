"""The default policy: demand, times what a replica carries within the targets. Read `slo_prefill.py` first."""
