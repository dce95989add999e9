"""The engine of `--engine vllm` without a worker: reservations, prompts for peers, and what ends them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.engine import EngineRequest, FinishReason, ReservedBlocks, StopParams
from engine.core.model_runner import SamplingParams
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import generation_pb2
from tests.support.clients.text import sentences
from tests.support.engine.reference import Reference, assert_prompt_logprobs
from tests.support.engine.vllm_rig import POLL_S, VllmRig
from tests.support.waiting import PATIENCE_S

BLOCK, CHUNK, MAX_TOKENS = 32, 64, 6
GREEDY = SamplingParams(temperature=0.0)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig(smollm2: str) -> Iterator[VllmRig]:
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
    rig = VllmRig.of(smollm2, engine)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(120, seed=3))


def asked(name: str, prompt: list[int], **fields: Any) -> EngineRequest:
    return replace(EngineRequest(name, tuple(prompt), GREEDY, StopParams(MAX_TOKENS)), **fields)


def reserved_by(rig: VllmRig, request: EngineRequest, number: int) -> ReservedBlocks:
    """Asks until vLLM has given the blocks, as the decode worker does."""
    blocks: list[ReservedBlocks | None] = [None]

    def granted() -> bool:
        blocks[0] = rig.core.reserve(request, number)
        return blocks[0] is not None

    rig.until(granted, "no blocks")
    assert blocks[0] is not None
    return blocks[0]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 97])
def test_a_prompt_for_a_peer_is_kept_whole(
    rig: VllmRig, reference: Reference, text_tokens: list[int], length: int
) -> None:
    prompt, name = text_tokens[length : 2 * length], f"prefill {length}"
    rig.core.add_request(asked(name, prompt, prefill_only=True))
    rig.run()
    assert rig.tokens(name) == reference.greedy(prompt, 1)
    progress = rig.progress[name][-1]
    assert (progress.end, progress.group_blocks) == (length, (-(-length // BLOCK),))
    assert len(progress.block_ids) == -(-length // BLOCK)
    assert 0 not in progress.block_ids
    assert rig.core.release_held(name)
    assert not rig.core.release_held(name)
    rig.assert_empty()


def test_prefix_hits(rig: VllmRig, text_tokens: list[int]) -> None:
    base = text_tokens[300:400]
    rig.core.add_request(asked("base", base))
    rig.run()
    for name, prompt, cached in (
        ("full", base, 96),
        ("partial", base[: BLOCK + 1] + text_tokens[:40], BLOCK),
        ("none", text_tokens[:70], 0),
        ("other tenant", base, 0),
    ):
        request = asked(name, prompt, cache_salt=b"other" if name == "other tenant" else b"")
        rig.until(lambda: rig.core.cached_tokens(request) == cached, name)  # noqa: B023 (called at once)
        blocks = reserved_by(rig, request, 7)
        assert blocks.cached_tokens == cached
        assert blocks.group_blocks == (-(-len(prompt) // BLOCK) - cached // BLOCK,)
        rig.core.abort(name)
        rig.core.release_writer(7)
    rig.assert_empty()


def test_blocks_of_an_aborted_reservation_wait_for_their_writer(rig: VllmRig, text_tokens: list[int]) -> None:
    core = rig.core
    blocks = reserved_by(rig, asked("left", text_tokens[:100]), 11)
    assert core.abort("left")
    load = core.load()
    assert (load.reserved_blocks, load.quarantined_blocks) == (0, len(blocks.block_ids))
    others = [
        reserved_by(rig, asked(str(n), text_tokens[n : n + 200], cache_salt=b"%d" % n), n)
        for n in range(100, 105)
    ]
    assert not {block for other in others for block in other.block_ids} & set(blocks.block_ids)
    assert core.release_writer(11)
    assert not core.release_writer(11)
    for number in range(100, 105):
        core.abort(str(number))
        core.release_writer(number)
    rig.assert_empty()


def test_each_order_of_end_and_writer_frees_once(rig: VllmRig, text_tokens: list[int]) -> None:
    core = rig.core
    for number, (first, then) in enumerate(
        (("abort", "writer"), ("writer", "abort"), ("writer", "admit")), start=20
    ):
        reserved_by(rig, asked(f"r{number}", text_tokens[:40]), number)
        for action in (first, then):
            if action == "abort":
                assert core.abort(f"r{number}")
            elif action == "writer":
                assert core.release_writer(number)
            else:
                assert core.admit(number, 5) is None
                core.abort(f"r{number}")
        with pytest.raises(NotFoundError):
            core.admit(number, 5)
        rig.assert_empty()


def test_a_reservation_that_is_given_up_before_it_is_granted(rig: VllmRig, text_tokens: list[int]) -> None:
    for number in range(30, 40):
        assert rig.core.reserve(asked(f"early {number}", text_tokens[:40]), number) is None
        assert rig.core.abort(f"early {number}")
    rig.assert_empty()


def test_a_prompt_that_is_left_frees_its_blocks(rig: VllmRig, text_tokens: list[int]) -> None:
    core = rig.core
    core.add_request(asked("left early", text_tokens[:200], prefill_only=True))
    assert core.abort("left early")
    assert not core.release_held("left early")
    core.add_request(asked("left at its end", text_tokens[:100], prefill_only=True))
    rig.run()
    assert core.release_held("left at its end")
    rig.assert_empty()
    core.add_request(asked("left with its output unread", text_tokens[:40], prefill_only=True))
    # vLLM's scheduler says that it has ended, and its output comes: two calls for the engine thread.
    deadline_s = time.monotonic() + PATIENCE_S
    while rig.posted.qsize() < 2 and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    rig.parts.transport.poll()
    assert core.abort("left with its output unread")
    rig.assert_empty()


def test_seeds_penalties_and_logprobs(rig: VllmRig, text_tokens: list[int]) -> None:
    sampling = SamplingParams(
        temperature=0.9, seed=2**64 - 1, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2
    )
    for name in ("once", "twice"):
        rig.core.add_request(asked(name, text_tokens[:70], sampling=sampling))
        rig.run()
    assert rig.tokens("once") == rig.tokens("twice")
    assert len(rig.tokens("once")) == MAX_TOKENS
    logprobs = [entry for output in rig.outputs["once"] for entry in output.logprobs]
    assert [entry.token_id for entry in logprobs] == rig.tokens("once")
    assert all(len(entry.top) == 2 for entry in logprobs)
    rig.assert_empty()


@pytest.mark.parametrize("length", [1, 2, CHUNK, 97])
def test_log_probabilities_of_a_prompt(
    rig: VllmRig, reference: Reference, text_tokens: list[int], length: int
) -> None:
    """Also of a prompt that is in the prefix cache."""
    prompt, sampling = text_tokens[400 : 400 + length], replace(GREEDY, prompt_logprobs=3)
    for name in ("first", "again"):
        rig.core.add_request(asked(f"{name} {length}", prompt, sampling=sampling))
        rig.run()
        first, *others = rig.outputs[f"{name} {length}"]
        assert_prompt_logprobs(first.prompt_logprobs, prompt, reference.logprobs(prompt), top=3)
        assert not any(output.prompt_logprobs for output in others)
    assert rig.core.cached_tokens(asked("third", prompt, sampling=sampling)) == 0
    rig.assert_empty()


async def test_grammar_goes_on_after_a_resume(rig: VllmRig, text_tokens: list[int]) -> None:
    message = generation_pb2.SamplingParams(grammar=generation_pb2.Grammar(regex="(red|blue){4}!"))
    grammar = await rig.parts.grammars.compiled(message)
    fields = {"grammar": grammar, "stop": StopParams(40, rig.parts.facts.eos_token_ids)}
    rig.core.add_request(asked("grammar", text_tokens[:20], **fields))
    rig.run()
    tokens, text = rig.tokens("grammar"), rig.text("grammar")
    assert re.fullmatch("(red|blue){4}!", text)
    prompt = text_tokens[:20] + tokens[:2]
    rig.core.add_request(asked("resumed", prompt, prior_output_tokens=2, **fields))
    rig.run()
    assert rig.tokens("resumed") == tokens[2:]
    rig.assert_empty()


async def test_a_tag_is_one_token_to_a_grammar(rig: VllmRig, smollm2: str) -> None:
    lark = '%llguidance {}\nstart: "<file_sep>" /(red|blue)/ "<gh_stars>"'
    message = generation_pb2.SamplingParams(grammar=generation_pb2.Grammar(lark=lark))
    grammar, tokenizer = await rig.parts.grammars.compiled(message), load_tokenizer(smollm2)
    stop = StopParams(40, rig.parts.facts.eos_token_ids)
    rig.core.add_request(asked("tags", tokenizer.encode("Hi"), grammar=grammar, stop=stop))
    rig.run()
    first, *_, last = [token for token in rig.tokens("tags") if token not in stop.eos_token_ids]
    assert [first, last] == tokenizer.encode("<file_sep><gh_stars>")
    rig.assert_empty()


def test_stops(rig: VllmRig, text_tokens: list[int], reference: Reference) -> None:
    prompt = text_tokens[:40]
    expected = reference.greedy(prompt, MAX_TOKENS)
    rig.core.add_request(
        asked("stop token", prompt, stop=StopParams(MAX_TOKENS, stop_token_ids=frozenset({expected[2]})))
    )
    rig.run()
    assert rig.tokens("stop token") == expected[: expected.index(expected[2]) + 1]
    assert rig.outputs["stop token"][-1].finish_reason is FinishReason.STOP
    rig.assert_empty()


def test_preempted_requests_still_give_the_same_tokens(
    rig: VllmRig, text_tokens: list[int], reference: Reference
) -> None:
    """More requests than the pool can hold to their ends."""
    names = {f"crowd {n}": text_tokens[n * 70 : n * 70 + 190] for n in range(6)}
    stop = StopParams(36)
    for name, prompt in names.items():
        rig.core.add_request(asked(name, prompt, stop=stop))
    rig.run()
    for name, prompt in names.items():
        assert rig.tokens(name) == reference.greedy(prompt, 36), name
    rig.assert_empty()


def test_what_never_fits_is_refused(rig: VllmRig, text_tokens: list[int]) -> None:
    core = rig.core
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
    rig.assert_empty()


@pytest.mark.slow
def test_vllm_starts_where_its_worker_is_process_1(smollm2: str) -> None:
    """As in a container: vLLM's processes end with their parent, and one that is lost is replaced by process 1."""
    code = (
        "import os, sys\n"
        "from splitserve.config.engine import EngineConfig\n"
        "from tests.support.engine.vllm_rig import VllmRig\n"
        "if __name__ == '__main__':\n"
        "    assert os.getpid() == 1\n"
        "    engine = EngineConfig(kind='vllm', context_tokens=64, num_blocks=4, threads=1)\n"
        "    VllmRig.of(sys.argv[1], engine).close()\n"
    )
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*namespace, sys.executable, "-c", code, smollm2]
    started = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert started.returncode == 0, started.stderr[-2000:]
