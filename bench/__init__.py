"""Measurements of splitserve: real processes on this machine, figures as tables or JSON.

Each folder is a bench: `python -m bench.engine`, `bench.handoff`, `bench.coordinator`, `bench.routing`,
`bench.autoscaling`, `bench.advisor`, `bench.chaos`, `bench.goodput`.
"""
