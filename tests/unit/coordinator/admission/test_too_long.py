"""Prompts that nobody could compute in time are refused before they are started, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.too_long import TRY_EVERY_S
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, worker

FIT = registry_pb2.PromptFit(base_ms=5, token_ms=0.1, pair_ms=1e-5)
FAST = registry_pb2.PromptFit(base_ms=5, token_ms=0.05)
LONG = 12_000
"""Tokens: 1.9 s by the fit; the target is a second."""


def model(
    prefill: registry_pb2.PromptFit | None = FIT, decode: registry_pb2.PromptFit | None = FIT
) -> ModelAdmission:
    """One that has let its last one in just before 0."""
    made = admission(
        (worker("p0", "prefill", prompt_fit=prefill), worker("d0", "decode", 100, prompt_fit=decode))
    )
    made._too_long._tried_s = 0.0
    return made


def asked(prompt: int = LONG, **changes: Any) -> Any:
    return entry(prompt, 2, **({"due_s": 1.0, "ttft_slo_s": 1.0, "held_tokens": 0} | changes))


def test_a_prompt_that_nobody_can_compute_in_time_is_refused_and_not_started() -> None:
    made = model()
    arrival = made.arrive(asked(), 0.0)
    assert (arrival.started, arrival.refused is not None) == (False, True)
    assert arrival.refused is not None
    assert arrival.refused.reason == "WOULD_MISS_SLO"
    assert "takes at least 1.54 s to compute; at most 1 s are allowed" in arrival.refused.message
    assert made.queue.requests == 0
    assert all(not load.requests for load in made.prefill.workers.values()), "no worker has heard of it"


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft_slo_s": None},
        {"resumed": True},
        {"held_tokens": None},
        {"held_tokens": 8_000},
        {"prompt": 7_000},
    ],
    ids=[
        "served late",
        "a stream that goes on",
        "caches unknown",
        "somebody has most of it",
        "may be in time",
    ],
)
def test_who_might_be_in_time_or_may_be_late_is_started(changes: dict[str, Any]) -> None:
    assert model().arrive(asked(**changes), 0.0).started


@pytest.mark.parametrize(("prefill", "decode"), [(None, FIT), (FAST, FIT), (FIT, FAST)])
def test_the_fastest_worker_counts_and_nothing_is_refused_before_prefill_is_measured(
    prefill: registry_pb2.PromptFit | None, decode: registry_pb2.PromptFit | None
) -> None:
    assert model(prefill, decode).arrive(asked(), 0.0).started


def test_decode_workers_that_have_computed_no_prompts_hold_nobody_back_from_being_refused() -> None:
    assert model(decode=None).arrive(asked(), 0.0).refused is not None


def test_cores_that_are_lent_count() -> None:
    parts = (
        worker("p0", "prefill", prompt_fit=FIT, lent_speedup=2.0),
        worker("d0", "decode", 100, prompt_fit=FIT),
    )
    made = admission(parts)
    made._too_long._tried_s = 0.0
    assert made.arrive(asked(), 0.0).started


def test_one_in_a_while_is_let_in_because_fits_come_from_what_is_computed() -> None:
    made = model()
    found = [made.arrive(asked(), at_s).refused is None for at_s in (1.0, TRY_EVERY_S, TRY_EVERY_S + 1.0)]
    assert found == [False, True, False]
