"""Replicas of several classes in one pool: each with a speed and a price. Read `class_plan.py` first."""
