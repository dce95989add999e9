"""An engine whose block tables stay on the device answers as the one in plain torch.

Requests come, share prefixes, are preempted, resumed, aborted, and end; their rows go from one to the next.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import PendingStep, SamplingParams, ScheduledSequence
from engine.runner.torch_runner import TorchRunner
from splitserve.config.engine import EngineConfig
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.runner_driver import BLOCK, runner_of
from tests.support.engine.tiny_models import EOS
from tests.support.engine.triton_interpreter import triton_interpreter

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SETTINGS: dict[str, Any] = {
    "device": str(DEVICE),
    "num_blocks": 9,
    "max_running_requests": 4,
    "max_step_tokens": 24,
    "context_tokens": 80,
}
REQUESTS = 7


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with nullcontext() if DEVICE.type == "cuda" else triton_interpreter():
        yield
    torch.set_num_threads(threads)


class Served:
    """One engine over all requests, and what was seen of it."""

    def __init__(self, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: dict[str, set[int]] = defaultdict(set)
        self.cached = self.chunks_beside_tokens = 0
        self.answers: dict[str, list[int]] = defaultdict(list)
        self._begin = runner.begin
        monkeypatch.setattr(runner, "begin", self.begin)
        config = EngineConfig.model_validate({**SETTINGS, "block_size_tokens": BLOCK})
        self.core = EngineCore(runner, config, ByteTokenizer())

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        for item in batch:
            if item.table_id not in self.tables[item.request_id]:
                self.cached += item.num_computed > 0
                self.tables[item.request_id].add(item.table_id)
        self.chunks_beside_tokens += len({item.num_new == 1 for item in batch}) == 2
        return self._begin(batch)

    def run(self) -> None:
        pick = random.Random(1)
        requests = [made(index, pick) for index in range(REQUESTS)]
        step = 0
        while requests or self.core.has_work():
            if requests and step % 3 == 0:
                self.core.add_request(requests.pop(0))
            if step == 16:
                self.core.abort("r4")
            for output in self.core.step().outputs:
                assert output.failure is None
                self.answers[output.request_id] += output.token_ids
            step += 1


def made(index: int, pick: random.Random) -> EngineRequest:
    shared = [7] * 20 if index % 2 else [9] * 17
    prompt = (*shared, *(pick.randrange(EOS) for _ in range(pick.randrange(1, 12))))
    stop = StopParams(pick.randrange(7, 13), ignore_eos=True)
    return EngineRequest(f"r{index}", prompt, SamplingParams(temperature=0.0), stop)


def test_answers_are_those_of_the_engine_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, list[int]]] = []
    for backend in ("torch", "triton"):
        runner = runner_of(tmp_path, "mistral", attention_backend=backend, cuda_graphs="auto", **SETTINGS)
        runner._pool.tensor.fill_(float("nan"))
        served = Served(runner, monkeypatch)
        served.run()
        found.append({name: answer for name, answer in served.answers.items() if name != "r4"})
        assert max(map(len, served.tables.values())) > 1, "some are preempted, and resume in other blocks"
        assert served.cached, "some begin with cached blocks"
        assert served.chunks_beside_tokens
        assert served.core.pool.free == runner.num_blocks
    assert len(found[0]) == REQUESTS - 1
    assert found[0] == found[1]
