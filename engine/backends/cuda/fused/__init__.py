"""Kernels that stand for several elementwise operations of a model's own code, and what puts them in its place."""
