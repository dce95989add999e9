"""Parts `decode` and `cpu`: both systems in turns, with the same prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from bench.asking import random_prompt
from bench.machine import OtherLoad
from bench.peers.vllm_server import Layout
from bench.vllm.models import MeasuredModel
from bench.vllm.rows import DecodeCase, TurnPair
from bench.vllm.streams import PROMPT_TOKENS, DecodeTurn, run_turn, wake
from bench.vllm.systems import System, both_systems


@dataclass(frozen=True)
class DecodePlan:
    """How much is measured."""

    streams: Sequence[int]
    temperatures: Sequence[float]
    repeats: int
    output_tokens: int
    seed: int


def cases(model: MeasuredModel, plan: DecodePlan) -> list[DecodeCase]:
    """Every number of streams with every temperature."""
    return [
        DecodeCase(model.name, model.vocabulary, streams, temperature)
        for streams in plan.streams
        for temperature in plan.temperatures
    ]


async def decode_turns(
    model: MeasuredModel, layout: Layout, plan: DecodePlan, tell: Console
) -> Mapping[DecodeCase, Sequence[TurnPair]]:
    """Runs both systems with this model; the first one of a pair of turns changes from repeat to repeat."""
    asked = cases(model, plan)
    found: dict[DecodeCase, list[TurnPair]] = {case: [] for case in asked}
    numbers = random.Random(plan.seed)
    async with both_systems(layout) as systems:
        for system in systems:  # first steps take longer
            for case in asked:
                if case.streams == max(plan.streams):
                    await _turn(system, case, plan.output_tokens, numbers, plan.seed)
        for repeat in range(plan.repeats):
            order = systems if repeat % 2 else tuple(reversed(systems))
            for case in asked:
                prompts_seed = numbers.getrandbits(32)
                load = OtherLoad()
                turns = {
                    system.name: await _turn(system, case, plan.output_tokens, numbers, prompts_seed)
                    for system in order
                }
                own, vllm = (turns[system.name] for system in systems)
                found[case].append(TurnPair(own, vllm, load.share()))
                tell.print(case, found[case][-1])
    return found


async def _turn(
    system: System, case: DecodeCase, output_tokens: int, numbers: random.Random, prompts_seed: int
) -> DecodeTurn:
    prompt_numbers = random.Random(prompts_seed)
    prompts = [random_prompt(prompt_numbers, PROMPT_TOKENS) for _ in range(case.streams)]
    try:
        await wake(system, numbers)
        return await run_turn(system, prompts, output_tokens, case.temperature)
    finally:
        system.server.pause()
