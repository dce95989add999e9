"""Replay of traces on a virtual clock, with the routing and policy code that production runs.

Read `simulator.py` first.
"""
