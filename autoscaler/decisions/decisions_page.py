"""The decisions as a page of JSON beside the metrics, which `splitserve autoscaler explain` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from autoscaler.decisions.decision import ScalingDecision

DECISIONS_PATH = "/decisions"


def decisions_document(
    decisions: Sequence[ScalingDecision], replays: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The page: the latest decision first; `replays` say what the policies would have made of the last window."""
    return {"decisions": [_document(one) for one in reversed(decisions)], "replays": [*replays]}


def shared_document(
    decisions: Mapping[str, Sequence[ScalingDecision]],
    limits: Mapping[str, float],
    used: Mapping[str, Any],
    replays: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The page of several models that share `limits`; `used` says what each has of them, `replays` by model what its
    policies would have made of the last window."""
    found = [(one.wall_s, one.number, model, one) for model, made in decisions.items() for one in made]
    latest = sorted(found, key=lambda entry: entry[:3], reverse=True)
    documents = [{"model": model, **_document(one)} for _, _, model, one in latest]
    told = [{"model": model, **one} for model, found_of in replays.items() for one in found_of]
    return {"decisions": documents, "replays": told, "shared": {"limits": {**limits}, "used": {**used}}}


def _document(decision: ScalingDecision) -> dict[str, Any]:
    return {
        "number": decision.number,
        "time": datetime.fromtimestamp(decision.wall_s, UTC).isoformat(timespec="milliseconds"),
        "window_s": decision.window_s,
        "acted": decision.acted,
        "complete": decision.complete,
        "pools": {name: asdict(pool) for name, pool in decision.pools.items()},
    }
