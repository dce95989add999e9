"""Baselines, the clairvoyant bound and plots. Read `comparison.py` first."""
