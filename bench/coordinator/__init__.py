"""The coordinator alone under load: scripted workers, a load generator, and the CPU time of the process between.

Read `cpu_per_token.py` first.
"""
