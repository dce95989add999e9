"""Actuators: local processes, Docker Engine, Kubernetes. Read `actuator.py` first: the interface."""
