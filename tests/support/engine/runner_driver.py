"""Drives a model runner step by step, without a scheduler: any chunking, block tables in no order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.core.model_runner import (
    ModelRunner,
    PromptLogprobs,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
)
from engine.runner.sampler import NanLogitsError
from engine.runner.torch_runner import TorchRunner, build_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import checked_model
from tests.support.engine.reference import Reference, assert_prompt_logprobs
from tests.support.engine.tiny_models import CONTEXT, EOS, make_tiny_model

BLOCK = 8
NUM_BLOCKS = 256
GREEDY = SamplingParams(temperature=0.0)


def runner_of(folder: Path, family: str, dtype: str = "float32", **settings: int | str) -> TorchRunner:
    source = checked_model(str(make_tiny_model(family, folder)))
    given = {"device": "cpu", "threads": 1, "block_size_tokens": BLOCK, "num_blocks": NUM_BLOCKS} | settings
    config = EngineConfig.model_validate({"dtype": dtype, **given})
    return build_torch_runner(config, source)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    pick = random.Random(1000 * seed + length)
    return [pick.randrange(EOS) for _ in range(length)]


def reference(folder: Path, family: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """What `transformers` generates with its eager attention, end-of-sequence ignored."""
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(family, folder), dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids))  # the prompt may hold the pad token
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@dataclass
class Sequence_:
    """One sequence of the driver, with a block table in no order."""

    name: str
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    starts_at: int
    sampling: SamplingParams
    computed: int = 0
    banned: frozenset[int] = field(default_factory=frozenset)
    table_id: int = field(default_factory=count(1).__next__)
    prompt_logprobs: PromptLogprobs | None = None

    def scheduled(self, chunk: int) -> ScheduledSequence:
        new = min(chunk, len(self.tokens) - self.computed)
        sample = self.computed + new == len(self.tokens)
        return ScheduledSequence(
            self.name,
            self.tokens,
            self.prompt_tokens,
            self.computed,
            new,
            self.blocks,
            sample,
            self.sampling,
            self.banned,
            table_id=self.table_id,
            prompt_logprobs=self.prompt_logprobs,
        )


def make_sequences(
    prompts: Sequence[list[int]], max_tokens: int, stagger: int = 1, sampling: SamplingParams = GREEDY
) -> list[Sequence_]:
    free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = []
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + max_tokens) // BLOCK)
        blocks = [free.pop() for _ in range(count)]
        sequences.append(Sequence_(str(index), list(prompt), len(prompt), blocks, stagger * index, sampling))
    return sequences


def drive(
    runner: ModelRunner, sequences: Sequence[Sequence_], max_tokens: int, chunk: int
) -> list[list[SampledToken]]:
    """Runs all to `max_tokens`; each joins at its step, so that chunks and single tokens mix in batches."""
    answers: dict[str, list[SampledToken]] = {sequence.name: [] for sequence in sequences}
    step = 0
    while any(len(answer) < max_tokens for answer in answers.values()):
        live = [s for s in sequences if s.starts_at <= step and len(answers[s.name]) < max_tokens]
        batch = [sequence.scheduled(chunk) for sequence in live]
        for sequence, item, token in zip(live, batch, runner.execute(batch), strict=True):
            sequence.computed += item.num_new
            assert (token is not None) == item.sample
            if token is not None:
                sequence.tokens.append(token.token_id)
                answers[sequence.name].append(token)
        step += 1
    return list(answers.values())


def check_prompt_logprobs(
    runner: ModelRunner,
    folder: Path,
    family: str,
    chunks: Sequence[int],
    tolerance: float = 1e-3,
    lengths: Sequence[int] = (1, 2, 2 * BLOCK, 40, 150),
) -> None:
    """Some sequences of a batch want them: in any chunks the values are those of `transformers`, and all tokens
    those of a run without them."""
    top, prompts = 3, [prompt_of(length) for length in lengths]
    expected = tokens_of(drive(runner, make_sequences(prompts, 4), 4, CONTEXT))
    reference = Reference(str(make_tiny_model(family, folder)))
    for chunk in chunks:
        sequences = make_sequences(prompts, 4, sampling=replace(GREEDY, prompt_logprobs=top))
        for sequence in sequences[0::2]:
            sequence.prompt_logprobs = PromptLogprobs(sequence.tokens[:])
        assert tokens_of(drive(runner, sequences, 4, chunk)) == expected
        for prompt, sequence in zip(prompts[0::2], sequences[0::2], strict=True):
            values = reference.logprobs(prompt)
            assert_prompt_logprobs(sequence.prompt_logprobs, prompt, values, top, tolerance)


def tokens_of(answers: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in answer] for answer in answers]


def check_broken_kv_fails_alone(runner: TorchRunner, folder: Path, family: str) -> None:
    """Of three sequences one has a NaN in its KV: it alone fails, and the others go on as they would have."""
    prompts = [prompt_of(20), prompt_of(21), prompt_of(22)]
    expected = reference(folder, family, prompts, 2)
    sequences = make_sequences(prompts, 4, stagger=0)
    drive(runner, sequences, 1, CONTEXT)
    runner._pool.tensor[sequences[1].blocks[0]] = float("nan")
    batch = [sequence.scheduled(1) for sequence in sequences]
    with pytest.raises(NanLogitsError) as failure:
        runner.execute(batch)
    assert failure.value.rows == (1,)
    assert failure.value.reason == "NAN_LOGITS"
    again = runner.execute([batch[0], batch[2]])
    assert [token.token_id for token in again if token] == [expected[0][1], expected[2][1]]


def check_halves(runner: ModelRunner) -> None:
    """A step that was begun is not changed by what becomes of its sequences meanwhile."""
    sampling = SamplingParams(temperature=0.8, seed=5, logprobs=2, repetition_penalty=1.3)
    sequences = make_sequences([prompt_of(13), prompt_of(6), prompt_of(9)], 3, stagger=0)
    sequences[2].sampling = sampling
    drive(runner, sequences[:2], 1, CONTEXT)
    batch = [sequence.scheduled(CONTEXT) for sequence in sequences]
    expected = runner.execute(batch)
    finish = runner.begin(batch)
    for sequence in sequences:
        sequence.blocks.clear()
    assert finish() == expected
    assert [token is not None and token.logprob is not None for token in expected] == [False, False, True]
