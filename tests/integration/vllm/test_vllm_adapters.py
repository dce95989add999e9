"""LoRA adapters with `--engine vllm`: an engine in this process, and workers that hand requests over.

The expected tokens are those of `transformers` with the adapter's matrices merged into the base model's weights.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.core.engine import EngineRequest, ReservedBlocks, StopParams
from engine.core.model_runner import SamplingParams
from engine.kv_cache.block_pool import KvEventReader
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, FailedPreconditionError, NotFoundError
from splitserve.generation.kv_blocks import block_keys, chain_salt, keys_of
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, decoding_worker
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.engine.vllm_rig import VllmRig
from tests.support.lora import make_adapter, merged

BLOCK, CHUNK, MAX_TOKENS, ROOM = 32, 64, 12, 2
NAMES = ("red", "blue", "green")
BASE = ""
GREEDY = SamplingParams(temperature=0.0)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@dataclass
class Models:
    """The base model, its adapters' folders, and what each answers."""

    base: Path
    adapters: dict[str, Path]
    references: dict[str, Reference]

    def greedy(self, name: str, prompt: Sequence[int], count: int = MAX_TOKENS) -> list[int]:
        return self.references[name].greedy(prompt, count)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_model("llama_4_heads", folder / "base")
    adapters = {
        name: make_adapter(base, folder / name, seed, rank=4 * seed) for seed, name in enumerate(NAMES, 1)
    }
    references = {
        name: Reference(str(merged(base, adapters[name], folder / f"merged-{name}"))) for name in NAMES
    }
    return Models(base, adapters, {BASE: Reference(str(base)), **references})


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    """Of 70 tokens: two blocks, more than a chunk."""
    tokens = load_tokenizer(str(models.base)).encode(sentences(80, seed=3))
    return [tokens[start : start + 70] for start in range(0, 700, 70)]


class Engine(VllmRig):
    """With room for two adapters."""

    def ask(
        self, request_id: str, name: str, prompt: Sequence[int], count: int = MAX_TOKENS
    ) -> EngineRequest:
        adapter = self.parts.facts.adapters[name] if name else None
        stop = StopParams(count, self.parts.facts.eos_token_ids)
        request = EngineRequest(request_id, tuple(prompt), GREEDY, stop, adapter=adapter)
        return replace(request, cache_salt=chain_salt(b"tenant", adapter))

    def add(self, request_id: str, name: str, prompt: Sequence[int], count: int = MAX_TOKENS) -> None:
        self.core.add_request(self.ask(request_id, name, prompt, count))

    def reserved(self, request: EngineRequest, number: int) -> ReservedBlocks:
        granted: list[ReservedBlocks] = []

        def ask() -> bool:
            if (blocks := self.core.reserve(request, number)) is not None:
                granted.append(blocks)
            return bool(granted)

        self.until(ask, "no blocks")
        return granted[0]


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    settings = EngineConfig(
        kind="vllm",
        dtype="float32",
        kv_memory_bytes=30_000_000,
        context_tokens=512,
        max_step_tokens=CHUNK,
        max_running_requests=8,
        threads=1,
        adapters=models.adapters,
        engine_args=f"--max-loras {ROOM}",
    )
    rig = VllmRig.of(str(models.base), settings)
    yield Engine(rig.parts, rig.posted)
    rig.close()


def test_base_and_adapters_in_one_batch(engine: Engine, models: Models, prompts: list[list[int]]) -> None:
    """Each alone in float32 equals the merged model; the second round finds each its own blocks in the cache."""
    order = (BASE, "red", "blue", BASE, "blue", "red")
    for turn in range(2):
        for number, name in enumerate(order):
            engine.add(f"{turn}-{number}", name, prompts[number % 2])
        engine.run()
        for number, name in enumerate(order):
            prompt = prompts[number % 2]
            assert engine.tokens(f"{turn}-{number}") == models.greedy(name, prompt), (turn, number, name)
    engine.assert_empty()


def test_no_block_is_shared_between_base_and_adapters(
    engine: Engine, models: Models, prompts: list[list[int]]
) -> None:
    """And the coordinator knows each block under the name that it looks for."""
    core, prompt = engine.core, prompts[2]
    for number, name in enumerate((BASE, "red", "blue"), start=1):
        request = engine.ask(f"reserved-{name}", name, prompt)
        reserved = engine.reserved(request, number)
        assert reserved.cached_tokens == 0, name
        core.abort(request.request_id)
        core.release_writer(number)
        engine.add(f"cached-{name}", name, prompt)
        engine.run()
        assert engine.tokens(f"cached-{name}") == models.greedy(name, prompt)
        again = engine.reserved(engine.ask(f"again-{name}", name, prompt), number + 10)
        assert again.cached_tokens == 2 * BLOCK, name
        core.abort(f"again-{name}")
        core.release_writer(number + 10)
        events = KvEventReader(core.kv_events).next_events()
        assert events is not None
        assert set(block_keys(prompt, BLOCK, request.cache_salt, 2)) <= set(keys_of(events.stored))
    engine.assert_empty()


def test_an_adapter_without_room_waits(engine: Engine, models: Models, prompts: list[list[int]]) -> None:
    core = engine.core
    engine.add("long-red", "red", prompts[3], 40)
    engine.add("long-blue", "blue", prompts[3], 20)
    engine.add("green", "green", prompts[3])
    engine.add("left", "green", prompts[4])
    engine.until(lambda: "long-red" in engine.outputs, "it does not begin")
    assert core.load().waiting_requests >= 2
    assert core.reserve(engine.ask("early", "green", prompts[5]), 50) is None
    assert core.abort("early")
    assert core.abort("left")
    engine.run()
    for request_id, count in (("long-red", 40), ("long-blue", 20), ("green", MAX_TOKENS)):
        name = request_id.removeprefix("long-")
        assert engine.tokens(request_id) == models.greedy(name, prompts[3], count), name
    assert "left" not in engine.outputs
    engine.reserved(engine.ask("reserved", "green", prompts[5]), 50)
    core.abort("reserved")
    core.release_writer(50)
    engine.assert_empty()


def test_a_stream_of_requests_for_loaded_adapters_does_not_keep_another_one_out(
    engine: Engine, models: Models, prompts: list[list[int]]
) -> None:
    """Each answer brings the next request, so that both loaded adapters are always in use."""
    for name in ("red", "blue"):
        engine.add(f"stream-{name}-0", name, prompts[7])
    engine.add("kept-waiting", "green", prompts[7])
    asked = dict.fromkeys(("red", "blue"), 0)
    while "kept-waiting" not in engine.outputs:
        assert max(asked.values()) < 40
        for name, number in asked.items():
            request_id = f"stream-{name}-{number}"
            outputs = engine.outputs.get(request_id)
            if number == 0 or (outputs and len(engine.tokens(request_id)) > MAX_TOKENS // 2):
                asked[name] += 1
                engine.add(f"stream-{name}-{number + 1}", name, prompts[7])
        engine.step()
    engine.run()
    assert engine.tokens("kept-waiting") == models.greedy("green", prompts[7])
    engine.assert_empty()


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_alone(
    engine: Engine, models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Its files are another adapter's now; at the time of the request, and when room for it is found later."""
    core, folder = engine.core, models.adapters["green"]
    for name in ("red", "blue"):  # unloads it
        engine.add(f"loads-{name}", name, prompts[6])
    engine.run()
    shutil.copytree(folder, tmp_path / "kept")
    try:
        shutil.copytree(models.adapters["red"], folder, dirs_exist_ok=True)
        with pytest.raises(FailedPreconditionError) as caught:
            engine.add("fails", "green", prompts[6])
        assert (caught.value.reason, caught.value.field) == ("ADAPTER_FAILED", "adapter")
        with pytest.raises(FailedPreconditionError):
            core.reserve(engine.ask("fails", "green", prompts[6]), 60)
        for name in ("red", "blue"):
            engine.add(f"busy-{name}", name, prompts[6])
        engine.add("fails-later", "green", prompts[6])
        engine.run()
        failure = engine.outputs["fails-later"][-1].failure
        assert failure is not None
        assert failure[0] == "ADAPTER_FAILED"
    finally:
        shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True)
    for name in ("red", "blue"):
        assert engine.tokens(f"busy-{name}") == models.greedy(name, prompts[6])
    engine.add("works-again", "green", prompts[6])
    engine.run()
    assert engine.tokens("works-again") == models.greedy("green", prompts[6])
    engine.assert_empty()


def test_kinds_that_vllm_does_not_compute_are_refused(models: Models, tmp_path: Path) -> None:
    from engine.model.adapter import read_adapter
    from engine.vllm.adapters import check_supported

    check_supported(read_adapter("red", models.adapters["red"]), 16)
    large = read_adapter("large", make_adapter(models.base, tmp_path / "large", 1, rank=17))
    dora = read_adapter("dora", make_adapter(models.base, tmp_path / "dora", 1, use_dora=True))
    for files, named in ((large, "rank 17 is greater than max_lora_rank 16"), (dora, "DoRA")):
        with pytest.raises(ConfigError, match=named) as caught:
            check_supported(files, 16)
        assert caught.value.field == f"engine.adapters.{files.adapter.name}"


TWO_RANKS = "--engine-args=--tensor-parallel-size 2"


@pytest.fixture(
    params=[(), pytest.param((TWO_RANKS,), marks=pytest.mark.slow)], ids=["one rank", "two ranks"]
)
async def cluster(models: Models, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Both adapters on the prefill worker and on `decode-0`, one of them on `decode-1`; `decode-0` has the ranks."""
    options = ["--dtype", "float32", "--context-tokens", "512", "--max-step-tokens", str(CHUNK)]
    options += [
        "--served-model-name",
        "words",
        "--kv-memory-bytes",
        "30000000",
        "--heartbeat",
        "0.1",
        "--lease",
        "5",
    ]
    setup = Cluster(
        tmp_path, model=str(models.base), engine="vllm", prefill=0, decode=0, worker_options=options
    )
    async with running(setup) as cluster:
        red, blue = (["--adapter", f"{name}={models.adapters[name]}"] for name in ("red", "blue"))
        cluster.add_worker("prefill", "prefill-0", *red, *blue)
        cluster.add_worker("decode", "decode-0", *red, *blue, *request.param)
        cluster.add_worker("decode", "decode-1", *red)
        await cluster.wait_ready(prefill=1, decode=2)
        yield cluster


async def test_handed_over_and_resumed_with_an_adapter(
    cluster: Cluster, models: Models, prompts: list[list[int]]
) -> None:
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        assert {model.name: model.parent for model in await client.models()} == {
            "words": "",
            "red": "words",
            "blue": "words",
        }
        for _ in range(2):  # once more with what both sides have cached
            for name in (BASE, "red", "blue"):
                for prompt in prompts[:3]:
                    answer = await client.generate(
                        prompt, model=name or "words", temperature=0.0, max_tokens=MAX_TOKENS
                    )
                    assert list(answer.token_ids) == models.greedy(name, prompt), name
                    assert answer.timings.transfer_bytes > 0
                    if name == "blue":
                        assert answer.served_by.decode_worker == "decode-0"
        assert answer.usage.cached_prompt_tokens == 2 * BLOCK
        with pytest.raises(NotFoundError):
            await client.generate(prompts[0], model="green", max_tokens=1)
        await cluster.assert_no_leaks()
        options = {"model": "red", "temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
        undisturbed = await client.generate(prompts[3], **options)  # type: ignore[arg-type]
        first = models.greedy("red", prompts[3])
        assert list(undisturbed.token_ids[: len(first)]) == first
        await cluster.assert_no_leaks()
        reading = Reading(client, prompts[3], **options)
        await reading.got(5)
        busy = await decoding_worker(cluster)
        cluster.members[busy].kill()
        resumed = await reading.task
        assert resumed.token_ids == undisturbed.token_ids
        assert resumed.served_by.attempts > 1
        await cluster.assert_no_leaks()
