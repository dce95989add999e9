"""Notices that a machine is taken away: spot, preemptible and low-priority machines. Read `watch.py` first."""
