"""Pools with classes for tests."""
