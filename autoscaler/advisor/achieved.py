"""A prediction that was saved, against what the cluster achieved once it was applied."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.advisor.advice import Advice, Prediction, predicted
from autoscaler.advisor.candidates import ClusterShape, replay
from autoscaler.advisor.recorded_traffic import RecordedTraffic
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import Trace
from autoscaler.sizing.engine_model import EngineModel
from splitserve.errors import InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedAdvice:
    """What an advice predicted for its best candidate, and from what."""

    candidate: ClusterShape
    attainment: float
    engine: EngineModel
    slo: Slo
    traffic: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AchievedAdvice:
    """The prediction, the same for the traffic that came, and what was measured of it. Shares 0..1."""

    saved: SavedAdvice
    now: Prediction
    attainment: float
    traffic: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """One sentence on where the difference comes from."""
        model = self.attainment - self.now.attainment
        traffic = self.now.attainment - self.saved.attainment
        if abs(self.attainment - self.saved.attainment) <= 0.05:
            return "The cluster achieves what was predicted, within 5 points."
        if abs(model) >= abs(traffic):
            side = "more" if model > 0 else "less"
            return (
                f"The cluster achieves {side} than its model says of this traffic: record and advise again."
            )
        return "The traffic has changed: advise again on this recording."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "candidate": self.saved.candidate.name,
            "predicted": self.saved.attainment,
            "predicted_for_this_traffic": self.now.attainment,
            "achieved": self.attainment,
            "traffic_predicted": dict(self.saved.traffic),
            "traffic_achieved": dict(self.traffic),
            "verdict": self.verdict,
        }


def traffic_figures(trace: Trace) -> dict[str, float]:
    """Rate and mean lengths."""
    count = max(1, len(trace.requests))
    return {
        "requests_per_second": round(len(trace.requests) / max(trace.duration_s, 1e-3), 4),
        "mean_prompt_tokens": round(sum(one.prompt_tokens for one in trace.requests) / count, 2),
        "mean_output_tokens": round(sum(one.output_tokens for one in trace.requests) / count, 2),
    }


def save_advice(path: Path, advice: Advice, scenario: Scenario) -> None:
    """Writes what `load_advice` reads. Raises InvalidArgumentError if it cannot."""
    content = {
        "advice": FORMAT,
        "candidate": dataclasses.asdict(advice.best.candidate),
        "attainment": advice.best.attainment,
        "engine": dataclasses.asdict(scenario.engine),
        "slo": dataclasses.asdict(scenario.slo),
        "traffic": traffic_figures(scenario.trace),
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"save: cannot write {path}: {error.strerror}"
        raise InvalidArgumentError(message, field="save") from None


def load_advice(path: Path) -> SavedAdvice:
    """Raises InvalidArgumentError."""
    text = read_named_text(path, "check")
    try:
        data = json.loads(text)
        if data["advice"] != FORMAT:
            raise ValueError(data["advice"])
        saved = SavedAdvice(
            ClusterShape(**data["candidate"]),
            float(data["attainment"]),
            EngineModel(**data["engine"]),
            Slo(**data["slo"]),
            {str(name): float(value) for name, value in data["traffic"].items()},
        )
        counts = (saved.candidate.prefill, saved.candidate.decode, saved.candidate.budget)
        if not all(isinstance(count, int) and 0 <= count <= 1024 for count in counts):
            raise ValueError(counts)
        if not all(math.isfinite(target) and target > 0 for target in (saved.slo.ttft_s, saved.slo.tpot_s)):
            raise ValueError(saved.slo)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"check: {path} was not written by `splitserve advise --save`"
        raise InvalidArgumentError(message, field="check") from None
    return saved


def achieved(saved: SavedAdvice, traffic: RecordedTraffic, scenario: Scenario) -> AchievedAdvice:
    """Compares a saved prediction with a recording made since. `scenario`: the new trace, the saved model and targets.

    Raises InvalidArgumentError for a trace without measured times.
    """
    if not traffic.requests:
        message = "trace: only a recording of `splitserve record` says what was achieved"
        raise InvalidArgumentError(message, field="trace")
    return AchievedAdvice(
        saved,
        predicted(saved.candidate, replay(saved.candidate, scenario)),
        traffic.attainment(saved.slo),
        traffic_figures(scenario.trace),
    )
