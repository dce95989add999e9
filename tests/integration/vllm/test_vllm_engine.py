"""The engine of `--engine vllm` in this process, which hands requests over to itself: blocks are copied by hand."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.core.engine import (
    ChunkProgress,
    Engine,
    EngineRequest,
    FinishReason,
    RequestOutput,
    ReservedBlocks,
    StopParams,
)
from engine.core.model_runner import SamplingParams
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import generation_pb2
from tests.support.clients.text import sentences
from tests.support.engine.reference import Reference
from worker.build import EngineParts, build_engine

BLOCK, CHUNK, MAX_TOKENS = 32, 64, 6
GREEDY = SamplingParams(temperature=0.0)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@dataclass
class Stepper:
    """An engine that is stepped until it has nothing to do."""

    parts: EngineParts
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    progress: dict[str, list[ChunkProgress]] = field(default_factory=dict)

    @property
    def core(self) -> Engine:
        return self.parts.core

    def step(self) -> None:
        self.core.begin_step()
        self.core.finish_step()
        self.take()

    def take(self) -> None:
        result = self.core.take_result()
        if result is None:
            return
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        for progress in result.progress:
            self.progress.setdefault(progress.request_id, []).append(progress)

    def run(self) -> None:
        self.take()
        while self.core.has_work():
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.outputs[name])

    def copy(self, source: list[int], target: tuple[int, ...]) -> None:
        memory = self.parts.kv_memory.region
        for row in memory.rows:
            for here, there in zip(source, target, strict=True):
                size = memory.piece_bytes
                ctypes.memmove(row + there * size, row + here * size, size)

    def assert_empty(self) -> None:
        self.run()
        load = self.core.load()
        assert load.free_blocks == load.total_blocks, load
        assert (load.reserved_blocks, load.quarantined_blocks, load.referenced_blocks) == (0, 0, 0)
        assert (load.running_requests, load.waiting_requests) == (0, 0)


@pytest.fixture(scope="module")
def stepper(smollm2: str) -> Iterator[Stepper]:
    engine = EngineConfig(
        kind="vllm",
        dtype="float32",
        kv_memory_bytes=60_000_000,
        context_tokens=512,
        max_step_tokens=CHUNK,
        max_running_requests=8,
        max_waiting_requests=6,
        threads=1,
    )
    parts = build_engine(WorkerConfig(worker_id="w", model=smollm2, engine=engine))
    yield Stepper(parts)
    parts.transport.close()
    parts.core.close()


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(120, seed=3))


def asked(name: str, prompt: list[int], **fields: Any) -> EngineRequest:
    return replace(EngineRequest(name, tuple(prompt), GREEDY, StopParams(MAX_TOKENS)), **fields)


def handed_over(
    stepper: Stepper, name: str, prompt: list[int], **fields: Any
) -> tuple[list[int], ReservedBlocks]:
    """Reserves, computes the prompt as a prefill worker does, copies the blocks, decodes; the tokens and the blocks."""
    core, first, number = stepper.core, f"{name}-prefill", abs(hash(name)) + 1
    # A salt of its own: otherwise the prompt would be computed from blocks that are still to be written.
    reserved = core.reserve(asked(name, prompt, **fields), number)
    assert reserved is not None
    core.add_request(asked(first, prompt, prefill_only=True, cache_salt=b"p", **fields))
    stepper.run()
    table = stepper.progress[first][-1].block_ids
    assert stepper.progress[first][-1].end == len(prompt)
    stepper.copy(table[reserved.cached_tokens // BLOCK :], reserved.block_ids)
    assert core.release_held(first)
    assert core.release_writer(number)
    begun = stepper.tokens(first)
    last = core.admit(number, begun[0])
    stepper.run()
    if last is not None:
        return begun, reserved
    assert stepper.outputs[name][0].first_position == fields.get("prior_output_tokens", 0) + 1
    return begun + stepper.tokens(name), reserved


def test_the_model_runner_that_takes_our_sampler_is_asked_for(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is Triton, vLLM's default is another one."""
    from engine.vllm.vllm_engine import VllmEngine

    core = stepper.core
    assert isinstance(core, VllmEngine)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    assert core._vllm.engine.vllm_config.use_v2_model_runner is False


@pytest.mark.parametrize(
    "length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 97, 2 * CHUNK]
)
def test_handed_over_tokens_equal_transformers(
    stepper: Stepper, reference: Reference, text_tokens: list[int], length: int
) -> None:
    prompt = text_tokens[length : 2 * length]
    tokens, reserved = handed_over(stepper, f"length {length}", prompt)
    assert len(reserved.block_ids) == -(-length // BLOCK) - reserved.cached_tokens // BLOCK
    assert 0 not in reserved.block_ids
    assert tokens == reference.greedy(prompt, MAX_TOKENS)
    stepper.assert_empty()


def test_prefix_hits(stepper: Stepper, reference: Reference, text_tokens: list[int]) -> None:
    base = text_tokens[300:400]
    handed_over(stepper, "base", base)
    for name, prompt, cached in (
        ("full", base, 96),
        ("partial", base[: BLOCK + 1] + text_tokens[:40], BLOCK),
        ("none", text_tokens[:70], 0),
        ("other tenant", base, 0),
    ):
        salt = {"cache_salt": b"other"} if name == "other tenant" else {}
        reserved = stepper.core.reserve(asked(name, prompt, **salt), 7)
        assert reserved is not None
        assert reserved.cached_tokens == cached
        stepper.core.abort(name)
        stepper.core.release_writer(7)
    tokens, reserved = handed_over(stepper, "again", base)
    assert reserved.cached_tokens == 96
    assert tokens == reference.greedy(base, MAX_TOKENS)
    stepper.assert_empty()


def test_blocks_of_an_aborted_reservation_wait_for_their_writer(
    stepper: Stepper, text_tokens: list[int]
) -> None:
    core = stepper.core
    reserved = core.reserve(asked("left", text_tokens[:100]), 11)
    assert reserved is not None
    assert core.abort("left")
    stepper.run()
    load = core.load()
    assert (load.reserved_blocks, load.quarantined_blocks) == (0, len(reserved.block_ids))
    others: set[int] = set()
    for number in range(100, 200):  # others take all that is free
        taken = core.reserve(
            asked(str(number), text_tokens[number : number + 200], cache_salt=b"%d" % number), number
        )
        if taken is None:
            break
        others |= set(taken.block_ids)
    assert others
    assert not others & set(reserved.block_ids)
    assert core.release_writer(11)
    assert not core.release_writer(11)
    for number in range(100, 200):
        core.abort(str(number))
        core.release_writer(number)
    stepper.assert_empty()


def test_each_order_of_end_and_writer_frees_once(stepper: Stepper, text_tokens: list[int]) -> None:
    core = stepper.core
    for number, (first, then) in enumerate(
        (("abort", "writer"), ("writer", "abort"), ("writer", "admit")), start=20
    ):
        assert core.reserve(asked(f"r{number}", text_tokens[:40]), number) is not None
        for action in (first, then):
            if action == "abort":
                assert core.abort(f"r{number}")
            elif action == "writer":
                assert core.release_writer(number)
            else:
                assert core.admit(number, 5) is None
                core.abort(f"r{number}")
            stepper.run()
        with pytest.raises(NotFoundError):
            core.admit(number, 5)
        stepper.assert_empty()


def test_a_prompt_that_is_left_holds_its_blocks_until_released(
    stepper: Stepper, text_tokens: list[int]
) -> None:
    core = stepper.core
    core.add_request(asked("left early", text_tokens[:200], prefill_only=True))
    stepper.step()
    assert core.abort("left early")
    stepper.run()
    assert core.load().referenced_blocks > 0
    assert core.release_held("left early")
    assert not core.release_held("left early")
    core.add_request(asked("never scheduled", text_tokens[:200], prefill_only=True))
    assert core.abort("never scheduled")
    assert core.release_held("never scheduled")
    stepper.assert_empty()


def test_seeds_penalties_and_logprobs_go_on_after_a_resume(stepper: Stepper, text_tokens: list[int]) -> None:
    sampling = SamplingParams(
        temperature=0.9, seed=5, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2
    )
    whole = asked("whole", text_tokens[:70], sampling=sampling)
    stepper.core.add_request(whole)
    stepper.run()
    tokens = stepper.tokens("whole")
    assert len(tokens) == MAX_TOKENS
    logprobs = [entry for output in stepper.outputs["whole"] for entry in output.logprobs]
    assert [entry.token_id for entry in logprobs] == tokens
    assert all(len(entry.top) == 2 for entry in logprobs)
    rest, _ = handed_over(
        stepper, "resumed", text_tokens[:70] + tokens[:3], sampling=sampling, prior_output_tokens=3
    )
    assert rest == tokens[3:]
    stepper.assert_empty()


async def test_grammar_goes_on_after_a_resume(stepper: Stepper, text_tokens: list[int]) -> None:
    message = generation_pb2.SamplingParams(grammar=generation_pb2.Grammar(regex="(red|blue){4}!"))
    grammar = await stepper.parts.grammars.compiled(message)
    fields = {"grammar": grammar, "stop": StopParams(40, stepper.parts.facts.eos_token_ids)}
    stepper.core.add_request(asked("grammar", text_tokens[:20], **fields))
    stepper.run()
    tokens, text = stepper.tokens("grammar"), stepper.text("grammar")
    assert re.fullmatch("(red|blue){4}!", text)
    rest, _ = handed_over(
        stepper, "grammar resumed", text_tokens[:20] + tokens[:2], prior_output_tokens=2, **fields
    )
    assert rest == tokens[2:]


def test_stops(stepper: Stepper, text_tokens: list[int], reference: Reference) -> None:
    prompt = text_tokens[:40]
    expected = reference.greedy(prompt, MAX_TOKENS)
    stepper.core.add_request(
        asked("stop token", prompt, stop=StopParams(MAX_TOKENS, stop_token_ids=frozenset({expected[2]})))
    )
    stepper.run()
    assert stepper.tokens("stop token") == expected[: expected.index(expected[2]) + 1]
    assert stepper.outputs["stop token"][-1].finish_reason is FinishReason.STOP
    stepper.assert_empty()


def test_preempted_requests_still_give_the_same_tokens(
    stepper: Stepper, text_tokens: list[int], reference: Reference
) -> None:
    """More requests than the pool can hold to their ends."""
    names = {f"crowd {n}": text_tokens[n * 70 : n * 70 + 190] for n in range(5)}
    stop = StopParams(70)
    for name, prompt in names.items():
        stepper.core.add_request(asked(name, prompt, stop=stop))
    stepper.run()
    for name, prompt in names.items():
        assert stepper.tokens(name) == reference.greedy(prompt, 70), name
    stepper.assert_empty()


def test_what_never_fits_is_refused(stepper: Stepper, text_tokens: list[int]) -> None:
    core = stepper.core
    with pytest.raises(InvalidArgumentError, match="context of 512"):
        core.add_request(asked("long", text_tokens[:1] * 600))
    core.add_request(asked("twice", text_tokens[:40]))
    with pytest.raises(InvalidArgumentError, match="in progress"):
        core.add_request(asked("twice", text_tokens[:40]))
    for number in range(5):
        core.add_request(asked(f"more {number}", text_tokens[:40]))
    with pytest.raises(ResourceExhaustedError, match="waiting already"):
        core.add_request(asked("one too many", text_tokens[:40]))
    for name in ("twice", *(f"more {number}" for number in range(5))):
        assert core.abort(name)
    stepper.assert_empty()
