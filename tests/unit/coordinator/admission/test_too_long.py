"""Prompts that nobody could compute in time are refused before they are started, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.admission.forecast import MOST_RETRY_S
from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.too_long import MOST_TRIED, TRY_EVERY_S
from coordinator.workers.snapshot import PoolSnapshot, Worker
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, worker

FIT = registry_pb2.PromptFit(base_ms=5, token_ms=0.1, pair_ms=1e-5)
FAST = registry_pb2.PromptFit(base_ms=5, token_ms=0.05)
LONG = 12_000
"""Tokens: 1.93 s by the fit; the target is a second."""
LONG_S = 1.93


def model(
    prefill: registry_pb2.PromptFit | None = FIT, decode: registry_pb2.PromptFit | None = FIT
) -> ModelAdmission:
    """One that has let in one of each power of two at 0."""
    return tried(worker("p0", "prefill", prompt_fit=prefill), worker("d0", "decode", 100, prompt_fit=decode))


def tried(*workers: Worker) -> ModelAdmission:
    made = admission(workers)
    made._too_long._let_in_s = dict.fromkeys(range(24), 0.0)
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
    assert arrival.refused.retry_after_s == MOST_RETRY_S, "it takes as long later"
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
    made = tried(
        worker("p0", "prefill", prompt_fit=FIT, lent_speedup=2.0),
        worker("d0", "decode", 100, prompt_fit=FIT),
    )
    assert made.arrive(asked(), 0.0).started


@pytest.mark.parametrize("sharing", ["p0", "d0"])
def test_a_store_that_workers_share_may_hold_what_nobody_has_told(sharing: str) -> None:
    shared = {"disk_tier": registry_pb2.TierReads(gb_per_second=1, shared_id=7)}
    made = tried(
        worker("p0", "prefill", prompt_fit=FIT, **(shared if sharing == "p0" else {})),
        worker("d0", "decode", 100, prompt_fit=FIT, **(shared if sharing == "d0" else {})),
    )
    assert made.arrive(asked(), 0.0).started


def test_who_waits_for_workers_that_are_started_is_not_judged_by_those_that_there_are() -> None:
    made, slow = model(), worker("d0", "decode", 100, prompt_fit=FIT)
    made.set_workers(PoolSnapshot((slow,)), slow.model.name, on_demand=True)
    arrival = made.arrive(asked(), 0.0)
    assert (arrival.started, arrival.refused) == (False, None)
    assert made.queue.requests == 1


def let_in(made: ModelAdmission, prompt: int, at_s: float, **changes: Any) -> bool:
    """Whether it is; then it is over at once."""
    one = asked(prompt, **({"arrived_s": at_s, "due_s": at_s + 1.0} | changes))
    found = made.arrive(one, at_s).refused is None
    made.ended(one)
    return found


def test_one_in_a_while_is_let_in_because_fits_come_from_what_is_computed() -> None:
    made, every_s = model(), LONG_S / MOST_TRIED
    assert every_s > TRY_EVERY_S
    found = [let_in(made, LONG, at_s) for at_s in (TRY_EVERY_S, every_s - 0.1, every_s + 0.1, 2 * every_s)]
    assert found == [False, False, True, False]


def test_short_ones_are_let_in_no_more_often_than_every_ten_seconds() -> None:
    made = model()
    at_s = (TRY_EVERY_S - 0.1, TRY_EVERY_S + 0.1, 2 * TRY_EVERY_S)
    assert [let_in(made, 4_000, each, ttft_slo_s=0.2) for each in at_s] == [False, True, False]


def test_a_prompt_that_is_repeated_takes_no_place_of_shorter_ones() -> None:
    made = model()
    assert [let_in(made, 60_000, 1_000.0), let_in(made, 60_000, 1_000.1)] == [True, False]
    assert let_in(made, LONG, 1_000.2)
    assert not let_in(made, 60_000, 1_000.3, held_tokens=60_000 - LONG), "what is computed counts"


def test_what_is_refused_for_another_reason_is_no_try() -> None:
    made = model()
    for _ in range(4):
        assert made.arrive(asked(5_000, ttft_slo_s=None), 1_000.0).refused is None
    assert not let_in(made, LONG, 1_000.0, deadline_s=1_000.1), "it would miss its deadline"
    assert made._too_long._let_in_s[LONG.bit_length()] == 0.0
