"""Latency models of workers in tests, as their load reports have them."""

from __future__ import annotations

from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.v1 import registry_pb2


def latency(tokens_per_s: float = 0.0, step_ms: float = 0.0) -> registry_pb2.LatencyModel:
    """A worker that computes so many prompt tokens a second, and takes `step_ms` for any decode step; 0: unmeasured."""
    prefill = PrefillLatency(0.0, 1 / tokens_per_s) if tokens_per_s else None
    return LatencyModel(prefill, DecodeLatency(step_ms / 1e3) if step_ms else None).to_proto()
