"""What a request is to be served with: the targets of the settings, by its class."""

from __future__ import annotations

from coordinator.request.state import RequestState
from splitserve.config.coordinator import AdmissionConfig
from splitserve.v1 import generation_pb2

_MAX_LEFT_MS = 86_400e3


def targets_of(
    settings: AdmissionConfig, state: RequestState, now: float
) -> generation_pb2.ServiceTargets | None:
    """The targets of a request for its next attempt, at `now` on its clock; None without any.

    Batch requests have none for their first token, nor have those that have sent it.
    """
    request = state.request
    begun = bool(state.token_ids)
    ttft_s = None if begun or request.caller.priority_class == "batch" else settings.ttft_slo_s
    if ttft_s is None and settings.tpot_slo_s is None:
        return None
    targets = generation_pb2.ServiceTargets(tpot_ms=(settings.tpot_slo_s or 0.0) * 1e3)
    if ttft_s is not None:
        targets.ttft_ms = ttft_s * 1e3
        targets.ttft_left_ms = max((request.received_s + ttft_s - now) * 1e3, -_MAX_LEFT_MS)
    return targets
