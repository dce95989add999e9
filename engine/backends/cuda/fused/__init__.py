"""Kernels that stand for several elementwise operations of a model's own code. Read `install.py` first."""
