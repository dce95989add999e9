"""Model routes as one word of text, for command lines: "NAME=MODEL:WEIGHT,MODEL:WEIGHT"."""

from __future__ import annotations

from collections.abc import Mapping


def parse_route(text: str) -> tuple[str, dict[str, float]]:
    """Name and weights. Raises ValueError saying what the form is."""
    name, equals, shares = text.partition("=")
    if not name or not equals:
        raise ValueError(f"a route is written NAME=MODEL:WEIGHT,..., not {text!r}")
    return name, parse_weights([share.rpartition(":")[::2] for share in shares.split(",") if share])


def parse_weights(shares: list[tuple[str, str]]) -> dict[str, float]:
    """Weights by model, from pairs of texts. Raises ValueError for what is no number or comes twice."""
    weights: dict[str, float] = {}
    for model, weight in shares:
        if not model or model in weights:
            raise ValueError(f"each share needs a model of its own, and a weight: {model!r}")
        weights[model] = float(weight)
    return weights


def format_route(name: str, weights: Mapping[str, float]) -> str:
    """The text that `parse_route` reads."""
    return f"{name}=" + ",".join(f"{model}:{weight:g}" for model, weight in weights.items())
