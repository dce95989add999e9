"""The buckets of every latency histogram, the same wherever durations are counted, so that they can be added."""

from __future__ import annotations

LATENCY_BOUNDS_S: tuple[float, ...] = tuple(0.0005 * 1.15**i for i in range(104))
"""0.5 ms to about 15 minutes, each 15% above the last: percentiles are exact to some percent anywhere."""
