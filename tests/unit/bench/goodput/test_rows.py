"""From what clients saw to rows: what attains, what is in the denominator, what is told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.simulation.scenario import Slo
from bench.goodput.outcome import Ending, SentRequest, attained_share, figures
from bench.goodput.rows import cells_of, differences, goodput_of, row_of
from bench.goodput.systems import SYSTEMS, OwnSystem, ServingOptions, own_settings
from bench.goodput.tables import tables
from bench.goodput.turns import FinishedTurn, TurnKey
from splitserve.config.cluster import ClusterConfig

SLO = Slo(1.0, 0.05)


def sent(
    ttft_s: float = 0.2,
    tpot_s: float = 0.02,
    *,
    at_s: float = 10.0,
    prompt: int = 100,
    ending: Ending = "complete",
) -> SentRequest:
    times = tuple(at_s + ttft_s + n * tpot_s for n in range(11))
    kind = "long" if prompt >= 512 else "short"
    if ending != "complete":
        return SentRequest(kind, prompt, 11, at_s, at_s, times[:3], ending=ending)
    return SentRequest(kind, prompt, 11, at_s, at_s, times, tokens=11)


def turn(system: str, requests: list[SentRequest], rate: float = 1.0, seed: int = 0) -> FinishedTurn:
    key = TurnKey("measured", rate, seed, len(requests), system, "model")
    return FinishedTurn(key, tuple(requests), 0.001, 0.1, 0.02, (1000.0, 1200.0))


def test_the_first_token_counts_from_the_scheduled_time() -> None:
    late = replace(sent(ttft_s=0.9), sent_s=10.8)
    assert late.ttft_s == pytest.approx(0.9)
    assert late.attains(SLO)
    assert not sent(ttft_s=1.1).attains(SLO)


def test_time_per_token_is_the_mean_after_the_first() -> None:
    assert sent(tpot_s=0.04).tpot_s == pytest.approx(0.04)
    assert not sent(tpot_s=0.06).attains(SLO)
    # Events may carry several tokens: it is the tokens that count.
    merged = SentRequest("short", 10, 11, 0.0, 0.0, (0.1, 0.6), tokens=11)
    assert merged.tpot_s == pytest.approx(0.05)
    assert merged.max_gap_s == pytest.approx(0.5)


@pytest.mark.parametrize("ending", ["refused", "failed", "timed out"])
def test_what_was_not_served_is_in_the_denominator(ending: Ending) -> None:
    requests = [sent(), sent(), sent(ending=ending), SentRequest("short", 9, 11, 0.0, 0.0, ending=ending)]
    assert attained_share(requests, SLO) == 0.5
    row = row_of(cells_of([turn("default", requests)])[0], SLO)
    assert row["attained"] == 0.5
    assert row["requests"] == 4
    assert row["complete"] == 2
    assert row[ending.replace(" ", "_")] == 2


def test_an_answer_that_is_too_short_does_not_attain() -> None:
    assert not replace(sent(), tokens=10).attains(SLO)


def test_long_and_short_apart_and_by_tokens() -> None:
    requests = [sent(), sent(), sent(ttft_s=2.0, prompt=889)]
    found = figures(requests, SLO)
    assert (found["attained_short"], found["attained_long"]) == (1.0, 0.0)
    assert found["by_class"] == {"short": 1.0, "long": 0.0}
    assert found["token_weighted"] == pytest.approx(222 / 1122, abs=1e-4)
    assert found["tpot_attained"] == 1.0
    assert found["lateness_max_s"] == pytest.approx(1.0)


def test_lateness_is_that_of_complete_misses() -> None:
    assert sent().lateness_s(SLO) is None
    assert sent(ending="timed out").lateness_s(SLO) is None
    assert sent(ttft_s=1.5).lateness_s(SLO) == pytest.approx(0.5)
    assert sent(tpot_s=0.15).lateness_s(SLO) == pytest.approx(1.0)


def test_nothing_answered_at_all() -> None:
    requests = [SentRequest("short", 9, 11, 0.0, 0.0, ending="timed out")]
    row = row_of(cells_of([turn("vllm", requests)])[0], SLO)
    assert (row["attained"], row["ttft_p50_s"], row["tpot_attained"], row["attained_long"]) == (
        0,
        None,
        None,
        None,
    )


def test_a_late_generator_is_marked() -> None:
    late = replace(turn("default", [sent()]), lateness_p99_s=0.2)
    row = row_of(cells_of([turn("default", [sent()]), replace(late, key=replace(late.key, seed=1))])[0], SLO)
    assert row["late_generator"]
    assert not row_of(cells_of([turn("default", [sent()])])[0], SLO)["late_generator"]


def test_a_busy_machine_is_marked() -> None:
    busy = replace(turn("default", [sent()]), other_load=0.4)
    row = row_of(cells_of([busy])[0], SLO)
    assert row["busy_machine"]
    quiet = row_of(cells_of([turn("default", [sent()])])[0], SLO)
    assert not quiet["busy_machine"]
    cells = list(tables({"rows": [row, quiet], "differences": [], "goodput": {}})[0].columns[2].cells)
    assert cells == ["default!", "default"]


def test_report_of_several_systems() -> None:
    good, bad = [sent()] * 10, [sent()] * 6 + [sent(ttft_s=3.0)] * 4
    turns = [
        turn(system, requests, rate, seed)
        for seed in (0, 1)
        for rate, by_system in (
            (1.0, {"default": good, "split": bad, "colocated": good}),
            (2.0, {"default": bad, "split": bad, "colocated": bad}),
        )
        for system, requests in by_system.items()
    ]
    cells = cells_of(turns)
    rows = [row_of(cell, SLO) for cell in cells]
    assert [(row["rate"], row["system"], row["attained"]) for row in rows] == [
        *((1.0, "default", 1.0), (1.0, "split", 0.6), (1.0, "colocated", 1.0)),
        *((2.0, system, 0.6) for system in ("default", "split", "colocated")),
    ]
    assert all((row["low"], row["high"]) == (row["attained"],) * 2 for row in rows)
    found = {(one["rate"], one["against"]): one["difference"] for one in differences(cells, SLO)}
    assert found[1.0, "split"] == 0.4
    assert found[1.0, "best fixed"] == found[1.0, "colocated"] == found[2.0, "best fixed"] == 0
    rates = goodput_of(cells, SLO)["measured"]
    assert rates["default"] == {"rate": 1.25, "tried": 1.0, "bound": "between"}
    assert rates["split"] == {"rate": 1.0, "tried": 0.0, "bound": "below"}
    report = {"rows": rows, "differences": differences(cells, SLO), "goodput": goodput_of(cells, SLO)}
    assert [table.row_count for table in tables(report)] == [6, 6, 3]


def test_differences_are_over_the_seeds_of_both() -> None:
    turns = [turn("default", [sent()], seed=0), turn("default", [sent(ttft_s=2.0)], seed=1)]
    (only,) = differences(cells_of([*turns, turn("vllm", [sent(ttft_s=2.0)], seed=0)]), SLO)
    assert (only["against"], only["seeds"], only["difference"], only["low"]) == ("vllm", 1, 1.0, None)


def test_own_systems_are_settings_that_a_cluster_takes(tmp_path: Path) -> None:
    options = ServingOptions("simulated", SLO, tmp_path, tmp_path)
    found = {
        name: ClusterConfig.model_validate(own_settings(system, options, 2))
        for name, system in SYSTEMS.items()
        if isinstance(system, OwnSystem)
    }
    assert found["default"].coordinator.local_prefill == "auto"
    assert found["split"].coordinator.local_prefill == "never"
    assert found["colocated"].coordinator.admission.mode == "off"
    assert found["colocated"].engine.threads == 2
    assert not found["colocated"].pin_cores
    assert found["colocated-plain"].coordinator.admission.tpot_slo_s is None
    targeted = [config for name, config in found.items() if name != "colocated-plain"]
    assert all(config.coordinator.admission.tpot_slo_s == SLO.tpot_s for config in targeted)
    # Requests name that themselves.
    assert all(config.coordinator.admission.ttft_slo_s is None for config in found.values())
