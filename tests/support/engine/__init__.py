"""Engines, models and references for tests."""
