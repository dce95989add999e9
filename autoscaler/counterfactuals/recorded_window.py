"""The traffic of a window as the autoscaler recorded it, as a scenario for the simulator. Pure.

The autoscaler knows arrivals by bucket, not by request. So requests of a bucket arrive at random moments of it, with
the bucket's mean lengths, and a replica is as fast as the workers report at the end of the window.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoscaler.sharing.claims.shares import Uses
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import POOLS, ArrivalBucket, PoolName, Snapshot
from splitserve.errors import FailedPreconditionError

MOST_REQUESTS = 200_000
"""Of a window. More would take the replay too long."""


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """Everything that a replay needs beside the policy. Times in seconds."""

    arrivals: tuple[ArrivalBucket, ...]
    engine: EngineModel
    slo: Slo
    initial: Mapping[PoolName, int]
    """Replicas in rotation when it began."""
    cold_start_s: float
    window_s: float
    """Of the histograms in snapshots."""
    limits: Uses = field(default_factory=dict)
    """What the model may have at most, where it shares an inventory with others."""
    seed: int = 0

    @property
    def length_s(self) -> float:
        """From the first arrival bucket's begin to the last one's end."""
        return self.arrivals[-1].start_s + self.arrivals[-1].length_s - self.arrivals[0].start_s

    def scenario(self) -> Scenario:
        """What the simulator replays."""
        return Scenario(
            Trace("recorded", list(self._requests())),
            self.engine,
            self.slo,
            self.cold_start_s,
            initial=self.initial,
            window_s=self.window_s,
            prefix_cache="off",  # what the caches saved is in the engine's rate already
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RecordedWindow:
        """The window that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["arrivals"] = tuple(ArrivalBucket(**bucket) for bucket in data["arrivals"])
        data["engine"], data["slo"] = EngineModel(**data["engine"]), Slo(**data["slo"])
        return cls(**data)

    def _requests(self) -> Iterator[TraceRequest]:
        chance, first_s = random.Random(self.seed), self.arrivals[0].start_s
        room = min(self.engine.kv_capacity_tokens, self.engine.context_tokens)
        for bucket in self.arrivals:
            if not bucket.requests:
                continue
            output = min(max(1, round(bucket.output_tokens / bucket.requests)), room - 1)
            prompt = min(max(1, round(bucket.prompt_tokens / bucket.requests)), room - output)
            begin_s = bucket.start_s - first_s
            for offset_s in sorted(chance.uniform(0, bucket.length_s) for _ in range(bucket.requests)):
                yield TraceRequest(begin_s + offset_s, prompt, output)


def recorded_window(
    snapshot: Snapshot, length_s: float, slo: Slo, initial: Mapping[PoolName, int], cold_start_s: float
) -> RecordedWindow:
    """The last `length_s` seconds. Raises FailedPreconditionError (NOTHING_RECORDED) naming what is not known."""
    begin_s = snapshot.now_s - length_s
    arrivals = tuple(bucket for bucket in snapshot.arrivals if bucket.start_s >= begin_s - 1e-6)
    prefill, decode, link = snapshot.prefill, snapshot.decode, snapshot.link
    count = sum(bucket.requests for bucket in arrivals)
    prompts = sum(bucket.prompt_tokens for bucket in arrivals)
    if not count or not prompts:
        raise _unknown("no request arrived")
    if count > MOST_REQUESTS:
        raise _unknown(f"more than {MOST_REQUESTS} requests arrived")
    if not prefill.tokens_per_s or decode.step is None or not decode.kv_capacity_tokens:
        raise _unknown("prefill rate, decode step or KV capacity are not measured")
    if not all(initial.get(pool) for pool in POOLS):
        raise _unknown("a pool had no replica at its begin")
    known = EngineModel()
    uncached = sum(bucket.uncached_tokens for bucket in arrivals) / prompts
    engine = EngineModel(
        prefill_token_s=uncached / prefill.tokens_per_s,
        prefill_step_s=0.0,
        step_s=decode.step.base_s,
        sequence_s=decode.step.per_sequence_s,
        context_token_s=decode.step.per_context_token_s,
        max_running_requests=decode.max_running_requests or known.max_running_requests,
        kv_capacity_tokens=decode.kv_capacity_tokens,
        kv_bytes_per_token=link.kv_bytes_per_token or known.kv_bytes_per_token,
        link_gb_per_s=link.gb_per_s or known.link_gb_per_s,
    )
    return RecordedWindow(arrivals, engine, slo, dict(initial), cold_start_s, snapshot.window_s)


def _unknown(what: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"nothing to replay: {what}", reason="NOTHING_RECORDED")
