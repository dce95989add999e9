"""Queueing formulas for pools whose replicas share one line."""

from __future__ import annotations

import math


def erlang_c(servers: int, load: float) -> float:
    """The share of arrivals that wait in M/M/c. `load` is in erlangs; 1.0 from `servers` on.

    By the recursion of Erlang B (B(0) = 1, B(k) = load B(k-1) / (k + load B(k-1))) and C = B / (1 - rho (1 - B)).
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = load * blocked / (k + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_exceeds(
    servers: int, load: float, service_s: float, wait_s: float, variability: float = 1.0
) -> float:
    """P(wait > wait_s) in a G/G/c queue: Erlang C times the exponential tail of heavy traffic.

    The tail is that of M/M/c stretched by `variability` = (ca² + cs²) / 2, squared coefficients of variation of the
    times between arrivals and of service (Allen-Cunneen; Whitt, "Approximations for the GI/G/m queue", 1993).
    """
    if load >= servers:
        return 1.0
    if service_s <= 0:
        return 0.0
    return erlang_c(servers, load) * math.exp(
        -(servers - load) * wait_s / (service_s * max(variability, 1e-9))
    )


def replicas_for_wait(load: float, service_s: float, wait_s: float, share: float, most: int) -> int:
    """Fewest replicas with which `share` of requests wait at most `wait_s`; `most` + 1 when that is not enough."""
    servers = max(1, math.floor(load) + 1)
    while servers <= most and wait_exceeds(servers, load, service_s, wait_s) > 1 - share:
        servers += 1
    return servers
