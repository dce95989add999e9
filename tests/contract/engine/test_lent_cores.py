"""A prompt that is computed with a neighbour's cores: the same logits, whenever the neighbour wants them back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.cpu import forward
from engine.backends.cpu.core_exchange import BorrowedCores, CoreExchange
from engine.backends.cpu.forward import MIN_LENT_TOKENS, CpuForward
from engine.backends.cpu.kernels import CpuKernels
from engine.runner.torch_runner import TorchRunner
from tests.support.engine.cpu_kernels import kernels_or_skip
from tests.support.engine.runner_driver import Sequence_, make_sequences, prompt_of, runner_of

kernels_or_skip()
MINE, THEIRS = 1000, 1001
"""Names of cores; where threads really run does not matter here."""
PROMPT = 100


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads are not moved, since a machine may have one core; the system's refusal has a test of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2048)

    def use(kernels: CpuKernels, borrowed: BorrowedCores) -> bool:
        kernels._placed = borrowed.cores
        return placed(kernels, borrowed)

    placed = CpuKernels.use
    monkeypatch.setattr(CpuKernels, "use", use)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runner(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[TorchRunner]:
    folder = tmp_path_factory.getbasetemp() / "tiny"
    made = runner_of(folder, "wide_llama", "bfloat16")
    assert isinstance(made._forward, CpuForward)
    made._forward._exchange = CoreExchange(tmp_path / "cores", (MINE,))
    step(made, 40)
    step(made, 1, decode=True)  # a graph of decode steps: from now on prompts are captured
    step(made, PROMPT)
    yield made
    made.close()


@pytest.fixture
def neighbour(tmp_path: Path, runner: TorchRunner) -> Iterator[CoreExchange]:
    exchange = CoreExchange(tmp_path / "cores", (THEIRS,))
    yield exchange
    exchange.close()


def step(runner: TorchRunner, tokens: int, decode: bool = False) -> torch.Tensor:
    """Logits of the last token of a prompt, or of a decode step after one of 20."""
    sequence: Sequence_ = make_sequences([prompt_of(20 + tokens if decode else tokens)], 0, 1)[0]
    if decode:
        sequence.prompt_tokens = 20
        with torch.inference_mode():
            runner._forward.logits([sequence.scheduled(20)])
        sequence.computed = 20
    with torch.inference_mode():
        return runner._forward.logits([sequence.scheduled(tokens)]).values.clone()


def test_a_resting_neighbour_changes_no_logit(runner: TorchRunner, neighbour: CoreExchange) -> None:
    alone = step(runner, PROMPT)
    assert runner.speedup == 1
    neighbour.rest()
    assert torch.equal(step(runner, PROMPT), alone)
    assert runner.speedup == 2
    neighbour.work()
    assert torch.equal(step(runner, PROMPT), alone)
    assert runner.speedup == 1


def test_short_chunks_and_decode_steps_stay_at_home(runner: TorchRunner, neighbour: CoreExchange) -> None:
    neighbour.rest()
    step(runner, MIN_LENT_TOKENS - 1)
    step(runner, MIN_LENT_TOKENS - 1)
    assert runner.speedup == 1
    step(runner, 1, decode=True)
    assert runner.speedup == 1


class TakenBack(CpuKernels):
    """Wants the cores back before the operation with this number."""

    neighbour: CoreExchange
    at: int

    def run(self, ops: Any) -> None:
        if self._borrowed is None or len(ops) <= self.at:
            super().run(ops)
            return
        super().run(ops[: self.at])
        self.neighbour.work()
        super().run(ops[self.at :])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 12])
def test_cores_that_are_wanted_back_in_the_middle_change_no_logit(
    runner: TorchRunner, neighbour: CoreExchange, at: int
) -> None:
    alone = step(runner, PROMPT)
    assert isinstance(runner._forward, CpuForward)
    kernels: Any = runner._forward._kernels
    kernels.__class__, kernels.neighbour, kernels.at = TakenBack, neighbour, at
    for _ in range(3):
        neighbour.rest()
        assert torch.equal(step(runner, PROMPT), alone)
        assert 1 <= runner.speedup < 2
    kernels.__class__ = CpuKernels


def test_where_the_system_does_not_let_it_nothing_is_borrowed_again(
    runner: TorchRunner, neighbour: CoreExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(forward, "log_event", lambda event, **fields: logged.append(event))
    monkeypatch.setattr(CpuKernels, "use", lambda kernels, borrowed: False)
    alone = step(runner, PROMPT)
    neighbour.rest()
    for _ in range(2):
        assert torch.equal(step(runner, PROMPT), alone)
    assert logged == ["engine.core_exchange_off"]
