"""Measurements of splitserve: real processes on this machine, figures as tables or JSON.

A folder is a bench, run as `python -m bench.engine`: `engine`, `vllm`, `handoff`, `coordinator`, `routing`,
`autoscaling`, `chaos` and `goodput`. `observability` holds two benches, run by their modules; `peers` holds other
serving systems.
"""
