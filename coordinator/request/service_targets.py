"""What a request is to be served with: its own targets, else its tenant's, else those of the settings."""

from __future__ import annotations

from coordinator.request.caller import Caller, RequestTargets
from coordinator.request.state import RequestState
from splitserve.config.coordinator import AdmissionConfig
from splitserve.generation.bounds import LEAST_TARGET_MS, MAX_TPOT_MS, MAX_TTFT_MS, between, fail
from splitserve.v1 import generation_pb2, inference_pb2


def resolved_targets(
    request: inference_pb2.GenerateRequest, caller: Caller, settings: AdmissionConfig
) -> tuple[RequestTargets, float | None]:
    """The targets of a request, and the time to the first token beyond which admission refuses it; None: never.

    Late ones are refused only where tenant or settings say so (`on_late`), and not for what only the request asks for.
    Batch tenants have no target for the first token unless they or the request name one, and are not refused.
    Raises InvalidArgumentError for one that is out of range, or below that of the tenant or
    the settings, or is named by a tenant where these have none: it would put the request before others.
    """
    own = caller.targets or RequestTargets()
    batch = caller.priority_class == "batch"
    least_ttft_s = own.ttft_s or settings.ttft_slo_s
    ttft_s = own.ttft_s if batch else least_ttft_s
    tpot_s = own.tpot_s or settings.tpot_slo_s
    refused = not batch and (caller.on_late or settings.on_late) == "refuse"
    slo_ttft_s = ttft_s if refused else None
    if request.HasField("ttft_ms"):
        ttft_s = _asked_s("ttft_ms", request.ttft_ms, MAX_TTFT_MS, least_ttft_s, caller)
        slo_ttft_s = None if slo_ttft_s is None else ttft_s
    if request.HasField("tpot_ms"):
        tpot_s = _asked_s("tpot_ms", request.tpot_ms, MAX_TPOT_MS, tpot_s, caller)
    return RequestTargets(ttft_s, tpot_s), slo_ttft_s


def _asked_s(name: str, value_ms: float, most_ms: int, least_s: float | None, caller: Caller) -> float:
    between(name, value_ms, LEAST_TARGET_MS, most_ms)
    if least_s is None and not caller.any_target:
        fail(name, "left out: this tenant has no such target here that could be exceeded")
    if least_s is not None and value_ms / 1e3 < least_s:
        fail(name, f"at least {least_s * 1e3:g}, the target here, not {value_ms:g}")
    return value_ms / 1e3


def targets_of(state: RequestState, now: float) -> generation_pb2.ServiceTargets | None:
    """The targets of a request for its next attempt, at `now` on its clock; None without any.

    The first token is due so long after the request came. An answer that goes on is due so long after now: before the
    requests of others it has no right to be, since any client may say that it resumes one.
    """
    targets, received_s = state.request.targets, state.request.received_s
    if targets is None or (targets.ttft_s is None and targets.tpot_s is None):
        return None
    told = generation_pb2.ServiceTargets(tpot_ms=(targets.tpot_s or 0.0) * 1e3)
    if targets.ttft_s is not None:
        due_s = (now if state.token_ids else received_s) + targets.ttft_s
        told.ttft_ms = targets.ttft_s * 1e3
        told.ttft_left_ms = max((due_s - now) * 1e3, -MAX_TTFT_MS)
    return told
