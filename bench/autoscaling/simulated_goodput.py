"""`python -m bench.autoscaling.simulated_goodput`: what neutral workers attain, a fixed split, and colocated ones.

In simulation, step by step, with the coordinator's own policies.

`cpu`: two cores, one worker each (or one worker on both), the mixes of `bench.goodput`; `default` and `neutral` lend
each other cores, as `splitserve up` does there, `unlent` is the default without. `gpu`: four replicas as `h100-8b`;
`shift` is prefill-heavy and decode-heavy for 40 s each in turn. No prefix caches, no admission, no failures.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from autoscaler.simulation.evaluation.baselines import static_replicas
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.sizing.engine_model import EngineModel, preset
from autoscaler.snapshot import PoolName
from bench.goodput.mixes import planned
from bench.goodput.statistics import difference
from bench.option_values import positive_number, positive_whole, whole_number

CPU = EngineModel(
    prefill_token_s=1.33e-3,
    step_s=13.75e-3,
    sequence_s=1.1e-3,
    prefill_step_s=4.4e-3,
    max_step_tokens=512,
    request_s=1e-4,
    max_running_requests=512,
)
"""SmolLM2-135M on one core, as measured on 2026-11-23. Steps mix prompts and decodes, as with kernels since
2026-11-26."""
TWO_THREADS = CPU.lent_time
"""What the same takes on two cores."""
GPU_LENGTHS = {"balanced": (1200, 250), "prefill-heavy": (3360, 94), "decode-heavy": (318, 527)}
"""Mean tokens of prompt and answer, each drawn evenly from half to one and a half of that."""
SHIFT_S = 40.0
SYSTEMS = ("split", "unlent", "default", "neutral", "colocated")
FIXED = ("split", "colocated")
"""What the default must be no worse than."""


@dataclass(frozen=True)
class Case:
    """One machine, its targets, and the rates of each mix. `lends`: its workers lend each other cores."""

    engine: EngineModel
    colocated: EngineModel
    slo: Slo
    workers: int
    rates: Mapping[str, Sequence[float]]
    lends: bool = False


CASES = {
    "cpu": Case(
        CPU,
        replace(
            CPU,
            prefill_token_s=CPU.prefill_token_s * TWO_THREADS,
            step_s=CPU.step_s * TWO_THREADS,
            sequence_s=CPU.sequence_s * TWO_THREADS,
            prefill_step_s=4.4e-3 * TWO_THREADS,
        ),
        Slo(1.0, 0.05),
        2,
        dict.fromkeys(("measured", "prefill-heavy", "decode-heavy", "bursty"), (1.0, 2.0, 3.0, 4.0)),
        lends=True,
    ),
    "gpu": Case(
        preset("h100-8b"),
        preset("h100-8b"),
        Slo(0.5, 0.025),
        4,
        {
            "balanced": (20, 30, 40),
            "prefill-heavy": (4, 6, 8),
            "decode-heavy": (80, 110, 140),
            "bursty": (15, 25, 35),
            "shift": (6, 9, 12),
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one row for each machine, mix and rate: attained, and TTFT and TPOT alone, of each system."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling.simulated_goodput")
    parser.add_argument("--machines", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--mixes", nargs="+", help="Default: all of each machine.")
    parser.add_argument("--rates", nargs="+", type=positive_number, help="Default: those of each mix.")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seeds", type=positive_whole, default=5)
    parser.add_argument("--first-seed", type=whole_number, default=0)
    parser.add_argument("--requests", type=positive_whole, default=300)
    chosen = parser.parse_args(arguments)
    against = [name for name in FIXED if name in chosen.systems] if "default" in chosen.systems else []
    heads = [
        *chosen.systems,
        *([f"default less the better of {' and '.join(against)}, points"] if against else []),
    ]
    print("| machine, mix | rate |", " | ".join(heads), "|")
    print("|" + "---|" * (2 + len(heads)))
    for machine in chosen.machines:
        for mix, rates in CASES[machine].rates.items():
            if chosen.mixes and mix not in chosen.mixes:
                continue
            for rate in chosen.rates or rates:
                seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
                outcomes = {
                    name: [run(machine, mix, rate, name, seed, chosen.requests) for seed in seeds]
                    for name in chosen.systems
                }
                cells = [cell(found) for found in outcomes.values()]
                if against:
                    cells.append(gap(outcomes["default"], [outcomes[name] for name in against]))
                print(f"| {machine}, {mix} | {rate:g} |", " | ".join(cells), "|", flush=True)
    return 0


def gap(own: Sequence[Outcome], others: Sequence[Sequence[Outcome]]) -> str:
    """Attainment of one system less the best of others, by their means over the seeds, with its 95% interval."""
    found = difference([one.attainment for one in own], [[one.attainment for one in each] for each in others])
    if found.low is None or found.high is None:
        return f"{found.value * 100:+.1f}"
    return f"{found.value * 100:+.1f} ({found.low * 100:+.1f} to {found.high * 100:+.1f})"


def cell(outcomes: Sequence[Outcome]) -> str:
    """Means over the seeds."""
    attained, ttft, tpot = (
        fmean(getattr(each, name) for each in outcomes)
        for name in ("attainment", "attainment_ttft", "attainment_tpot")
    )
    return f"{attained:.3f} ({ttft:.2f}, {tpot:.2f})"


def run(machine: str, mix: str, rate: float, system: str, seed: int, requests: int) -> Outcome:
    """One system under one load."""
    case = CASES[machine]
    trace = Trace(
        mix, list(_cpu_load(mix, rate, seed, requests) if machine == "cpu" else _gpu_load(mix, rate, seed))
    )
    prefills = case.workers // 2
    counts: dict[PoolName, int] = {"prefill": prefills, "decode": case.workers - prefills}
    engine, colocated = case.engine, system == "colocated"
    if colocated:
        # The prefill replica computes only prompts whose answers have one token.
        engine, counts = (
            case.colocated,
            {"prefill": 1, "decode": case.workers // 2 if machine == "cpu" else case.workers},
        )
    scenario = Scenario(
        trace,
        engine,
        case.slo,
        initial=counts,
        prefix_cache="off",
        steps=True,
        colocated=colocated,
        hybrid=system in ("unlent", "default", "neutral"),
        lent_cores=case.lends and system in ("default", "neutral"),
        neutral=system == "neutral",
    )
    return Simulation(scenario, static_replicas(counts), acts=system != "neutral").run()


def _cpu_load(mix: str, rate: float, seed: int, requests: int) -> Iterator[TraceRequest]:
    for each in planned(mix, rate, requests, seed):
        yield TraceRequest(each.at_s, len(each.prompt), each.output_tokens)


def _gpu_load(mix: str, rate: float, seed: int) -> Iterator[TraceRequest]:
    chance, at_s = random.Random(f"{mix} {rate:g} {seed}"), 0.0
    seconds = 4 * SHIFT_S if mix == "shift" else max(15.0, 600 / rate)
    shape = 3.0**-2 if mix == "bursty" else 1.0
    while (at_s := at_s + chance.gammavariate(shape, 1 / (shape * rate))) < seconds:
        kind = "balanced" if mix == "bursty" else mix
        if mix == "shift":
            kind = "decode-heavy" if int(at_s // SHIFT_S) % 2 else "prefill-heavy"
        prompt, answer = (chance.randint(mean // 2, 3 * mean // 2) for mean in GPU_LENGTHS[kind])
        yield TraceRequest(at_s, prompt, answer)


if __name__ == "__main__":
    sys.exit(main())
