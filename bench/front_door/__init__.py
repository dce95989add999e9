"""The processes between workers and clients under load, and the CPU time that each of them takes.

Read `figures.py` first.
"""
