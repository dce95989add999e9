"""Pairs of neutral workers: who computes a prompt, and where its answer is decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.routing.pair_choice import FULL_SHARE, MARGIN, ROOM_SHARE, StreamPlace, choose_stream
from coordinator.routing.prompt_book import BookedPrompt, PromptBook
from coordinator.routing.prompt_placement import PromptPlacement
from coordinator.routing.router import Pair, RoutingRequest
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from splitserve.v1 import registry_pb2

MODEL = Model("m", "m", 100_000, 100)
NAMES = ("w0", "w1", "w2", "w3")
TPOT_S = 0.05
FULL = 30
"""Streams of a worker whose step has no room for one more: 20 ms and 1 ms each."""


def worker(name: str, pool: PoolName, streams: int = 0, neutral: bool = True, **load: Any) -> Worker:
    report = registry_pb2.WorkerLoad(
        total_blocks=1000,
        free_blocks=1000,
        running_requests=load.pop("running_requests", streams),
        streams=streams,
        prompt_fit=registry_pb2.PromptFit(token_ms=1.0),
        step_fit=registry_pb2.DecodeStepFit(base_ms=20, sequence_ms=1),
        **load,
    )
    return Worker(
        worker_id=name,
        epoch=1,
        pool=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="memory",
        block_size_tokens=16,
        max_running_requests=64,
        load=report,
        reported=True,
        output_open=True,
        paces_prompts=True,
        neutral=neutral,
        connected_agents=frozenset(f"agent-{peer}" for peer in NAMES if peer != name),
    )


def placed(
    *workers: Worker,
    pair: tuple[int, int] = (0, 1),
    book: PromptBook | None = None,
    tpot_s: float | None = TPOT_S,
    now: float = 1000.0,
) -> tuple[str, str, int | None]:
    """With 100 ms of prompt that is due in a second."""
    placement = PromptPlacement(LoadLedger.of(workers), book or PromptBook())
    chosen = Pair(workers[pair[0]], workers[pair[1]], 0.0)
    request = RoutingRequest("m", 100)
    found = placement.placed(chosen, request, PoolSnapshot(workers), now + 1, tpot_s, now)
    assert found.decode is not None
    return found.prefill.worker_id, found.decode.worker_id, found.local_tokens


def test_an_answer_is_decoded_by_the_side_that_leans_to_it_while_that_has_room() -> None:
    assert placed(worker("w0", "prefill"), worker("w1", "decode", 10)) == ("w0", "w1", 0)


def test_that_side_is_filled_before_streams_take_time_from_prompts() -> None:
    """A first stream takes a step's price from all prompts there, one more a thirtieth of that."""
    most = int((FULL_SHARE * MARGIN * TPOT_S - 0.02) / 0.001)
    assert placed(worker("w0", "prefill"), worker("w1", "decode", most - 1)) == ("w0", "w1", 0)
    assert placed(worker("w0", "prefill"), worker("w1", "decode", most)) == ("w0", "w0", NO_LIMIT)
    assert FULL_SHARE * MARGIN < 1, "its streams are still to be in time"


def test_else_by_another_one_of_that_side() -> None:
    workers = (worker("w0", "prefill"), worker("w1", "decode", FULL), worker("w2", "decode", 15))
    assert placed(*workers, worker("w3", "decode", 12)) == ("w0", "w3", 0)


def test_else_where_it_was_computed_if_that_has_room() -> None:
    workers = (worker("w0", "prefill", 3), worker("w1", "decode", FULL))
    assert placed(*workers) == ("w0", "w0", NO_LIMIT)
    assert placed(*workers, tpot_s=None) == ("w0", "w1", 0), "without a target nothing is in danger"


def test_else_by_whoever_has_room_whatever_it_leans_to() -> None:
    workers = (worker("w0", "prefill", 9), worker("w1", "decode", FULL), worker("w2", "prefill", 2))
    assert placed(*workers) == ("w2", "w2", NO_LIMIT), "it is ready first, too"
    book = PromptBook()
    book.place("a", ("w2", 1), BookedPrompt(150, 0, 1000.9, 0), 1000.0)
    assert placed(*workers, book=book) == ("w0", "w2", 0)


def test_where_nobody_has_room_the_clock_of_who_computes_it_holds_prompts_back() -> None:
    assert placed(worker("w0", "prefill", FULL - 12), worker("w1", "decode", FULL)) == ("w0", "w0", NO_LIMIT)


def test_pinned_workers_are_paired_as_before() -> None:
    pinned = (worker("w0", "prefill", neutral=False), worker("w1", "decode", FULL, neutral=False))
    assert placed(*pinned) == ("w0", "w1", 0)
    idle = worker("w2", "decode", neutral=False)
    assert placed(*pinned, idle) == ("w0", "w1", 0)
    mixed = (pinned[0], pinned[1], worker("w2", "decode"), worker("w3", "prefill"))
    assert placed(*mixed[:3]) == ("w0", "w1", 0), "no neutral worker is part of that pair"


def test_streams_of_a_neutral_worker_that_computes_prompts_delay_them() -> None:
    """The router does not see them: another worker of the side is ready first."""
    workers = (worker("w0", "prefill", 20), worker("w1", "decode"), worker("w2", "prefill"))
    assert placed(*workers)[0] == "w2"


def test_prompts_in_its_batch_are_no_streams() -> None:
    busy = worker("w0", "prefill", 2, running_requests=40)
    assert placed(busy, worker("w1", "decode", FULL)) == ("w0", "w0", NO_LIMIT)


def test_streams_that_are_promised_count_before_they_are_reported() -> None:
    workers = (worker("w0", "prefill", 3), worker("w1", "decode", 15))
    assert placed(*workers) == ("w0", "w1", 0)
    book = PromptBook()
    for number in range(12):
        book.place(str(number), ("w0", 1), BookedPrompt(1, 0, 1000.9, 0, ("w1", 1)), 1000.0)
    assert placed(*workers, book=book) == ("w0", "w0", NO_LIMIT)
    assert placed(*workers, book=book, now=1000.95) == ("w0", "w1", 0), "they are late, and come later"
    for number in range(12):
        book.remove(str(number), 1000.0)
    assert book.promised(("w1", 1)) == 0
    assert placed(*workers, book=book) == ("w0", "w1", 0)


def test_an_engine_that_does_not_pace_prompts_decodes_nothing_beside_them() -> None:
    unpaced = replace(worker("w0", "prefill"), paces_prompts=False)
    assert placed(unpaced, worker("w1", "decode", FULL)) == ("w0", "w1", 0)


places = st.builds(StreamPlace, st.one_of(st.none(), st.floats(0.001, 0.2)), st.booleans(), st.just(TPOT_S))


@given(st.lists(places, min_size=1, max_size=6))
def test_a_stream_goes_where_there_is_room_and_first_to_where_it_belongs(found: list[StreamPlace]) -> None:
    chosen = choose_stream(found)
    if chosen is None:
        assert not any(place.has_room for place in found)
        return
    place = found[chosen]
    assert place.has_room
    limit_s = (FULL_SHARE if place.leans_here else ROOM_SHARE) * MARGIN * TPOT_S
    assert place.step_s is None or place.step_s <= limit_s
    if chosen and not place.leans_here:
        assert not any(other.leans_here and other.has_room for other in found)
    assert choose_stream([replace(place, tpot_s=None) for place in found]) == 0


@pytest.mark.parametrize("pair", [(0, 0), (1, 1)])
def test_a_worker_that_is_a_pair_with_itself_stays_one(pair: tuple[int, int]) -> None:
    chosen = placed(worker("w0", "decode"), worker("w1", "decode"), pair=pair)
    assert chosen == (NAMES[pair[0]], NAMES[pair[0]], None)
