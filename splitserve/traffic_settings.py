"""Settings of model routes and circuit breakers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from splitserve.route_text import parse_route


def _parsed_routes(value: object) -> object:
    """Takes options, "NAME=MODEL:WEIGHT,MODEL:WEIGHT", for what a file says as mappings."""
    if isinstance(value, str):
        value = [value]
    return dict(parse_route(text) for text in value) if isinstance(value, list | tuple) else value


ModelRouteWeights = Annotated[dict[str, dict[str, float]], BeforeValidator(_parsed_routes)]


class CircuitBreakerConfig(BaseModel):
    """When a worker, or the lane between two, is left out for a while because requests fail there."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """Whether anything is ever left out."""
    consecutive_failures: Annotated[int, Field(ge=1, le=10**6)] = 5
    """So many failures in a row open a breaker."""
    failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """So large a part of the requests within `window_s` opens it too."""
    min_requests: Annotated[int, Field(ge=1, le=256)] = 20
    """Fewer requests have no rate."""
    window_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How far the rate looks back. A breaker that opens again within it rests twice as long as before."""
    open_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """First rest, before one request is let through."""
    max_open_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest rest."""


def _parsed_breaker(value: object) -> object:
    """Takes an option, "NAME=VALUE,NAME=VALUE", for what a file says as a mapping."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("it is written NAME=VALUE,..., for example enabled=false")
    return {name: given for name, _, given in pairs}


CircuitBreaker = Annotated[CircuitBreakerConfig, BeforeValidator(_parsed_breaker)]
