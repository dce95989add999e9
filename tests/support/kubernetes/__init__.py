"""Actuators and signals for tests of the autoscaler."""
