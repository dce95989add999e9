"""Samples tokens on the device that has their logits. Read `row_sampler.py` first."""
