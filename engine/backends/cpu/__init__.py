"""The cpu backend: our own kernels, compiled at the first start. Read `forward.py` first."""
