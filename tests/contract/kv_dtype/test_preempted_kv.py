"""Real weights in a pool that is too small: a preempted sequence goes on behind the KV that a tier kept of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, SamplingParams, StopParams
from engine.runner.torch_runner import build_torch_runner
from engine.tiers.build import make_tiers
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.pool_copier import PoolCopier
from kv_transfer.layout import INT8, SAME
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]
BLOCK, LENGTH, STEPS, ROOM, TOO_LITTLE = 4, 40, 20, 64, 36
STARTS = {"a": 0, "b": 200, "c": 400}
"""Of the prompts in the text."""
EXACT: dict[str, Any] = {"dtype": "float32"}
ROUNDED: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": INT8}
FORMS = {"float32": EXACT, "int8": ROUNDED}


class CheckingCopier(PoolCopier):
    """Keeps what is saved, and what has come into the pool that was not."""

    def __init__(self, copier: PoolCopier) -> None:
        self._copier = copier
        self.saved: set[bytes] = set()
        self.loaded = 0
        self.strange: list[int] = []

    def host_memory(self, num_bytes: int) -> memoryview:
        return self._copier.host_memory(num_bytes)

    def save(self, block: int, into: memoryview) -> None:
        self._copier.save(block, into)
        self.saved.add(bytes(into))

    def load(self, block: int, source: memoryview) -> None:
        self._copier.load(block, source)
        found = bytearray(len(source))
        self._copier.save(block, memoryview(found))
        self.loaded += 1
        if bytes(found) not in self.saved:
            self.strange.append(block)


def answers(
    source: ModelSource, text: list[int], num_blocks: int, **settings: Any
) -> tuple[list[list[int]], KvTiers | None, CheckingCopier | None]:
    """Of the prompts, asked at the same time; and the tiers that were there, and who copied for them."""
    values = {"device": "cpu", "threads": 1, "block_size_tokens": BLOCK, "num_blocks": num_blocks, **settings}
    config, woken = EngineConfig.model_validate(values), threading.Event()
    runner = build_torch_runner(config, source, lambda _: None)
    tiers, copier = make_tiers(config, runner.pool_memory, SAME), None
    core = EngineCore(runner, config, load_tokenizer(source.tokenizer_source), tiers=tiers)
    found: dict[str, list[int]] = {name: [] for name in STARTS}
    stop = StopParams(max_tokens=STEPS, ignore_eos=True)
    asked = [
        EngineRequest(name, tuple(text[start : start + LENGTH]), SamplingParams(temperature=0.0), stop)
        for name, start in STARTS.items()
    ]
    if tiers is not None:
        tiers.wake = woken.set
        tiers._copier = tiers.copies._copier = copier = CheckingCopier(tiers._copier)
    while asked or core.has_work():
        if asked:  # a step each, as few blocks may be copied at a time
            core.add_request(asked.pop())
        if core.has_work():
            for output in core.step().outputs:
                found[output.request_id].extend(output.token_ids)
        while tiers is not None and tiers.busy:  # so that every run is the same
            woken.wait(0.05)
            woken.clear()
            tiers.collect()
    assert core.load().free_blocks == num_blocks
    core.close()
    return list(found.values()), tiers, copier


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_was_preempted_is_read_back(smollm2: ModelSource, text: list[int], form: str) -> None:
    found, tiers, copier = answers(smollm2, text, TOO_LITTLE, **FORMS[form], kv_host_tier_bytes=2**26)
    assert tiers is not None
    assert copier is not None
    assert tiers.host.stats.hit_tokens >= 4 * BLOCK
    assert copier.loaded >= 4
    assert copier.strange == []
    assert [len(answer) for answer in found] == [STEPS] * len(STARTS)
    if form == "float32":  # rounded values depend on what else is computed at the same time
        assert found == answers(smollm2, text, ROOM, **FORMS[form])[0]
