"""Autoscaling of both pools: signals, policies, planner, actuators, simulation."""
