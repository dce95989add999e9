"""Engine processes of the engine benchmark: questions, answers, and the error when one ends."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig

from bench.engine.processes.engine_process import (
    GIB,
    MOST_KV_GIB,
    EngineCommand,
    engine_command,
    engine_process,
    kv_gib,
)
from bench.engine.processes.questions import SPARE_STEPS, WARM_UP_STEPS, decode_steps, decode_tokens
from bench.engine.rows import EngineCase
from bench.engine.throughput import LOGS, MODELS, cases, work_of
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = GIB // 4


class PromptsFirst:
    """An engine that computes one prompt in `steps_per_prompt` steps while earlier ones decode."""

    def __init__(self, names: Sequence[str], steps_per_prompt: int) -> None:
        self.names, self.steps_per_prompt, self.steps = names, steps_per_prompt, 0

    def step(self) -> Collection[str]:
        self.steps += 1
        return self.names[: self.steps // self.steps_per_prompt]


@pytest.mark.parametrize(("batch", "context", "a_step"), [(1, 10, 10), (8, 1024, 448), (64, 128, 448)])
def test_only_steps_are_timed_in_which_all_decode(batch: int, context: int, a_step: int) -> None:
    names = [str(number) for number in range(batch)]
    engine = PromptsFirst(names, -(-context // a_step))
    timed_at = [engine.steps for _ in decode_steps(engine.step, names, 12)]
    prompts = batch * engine.steps_per_prompt
    assert timed_at == list(range(prompts + WARM_UP_STEPS + 1, prompts + WARM_UP_STEPS + 13))
    assert engine.steps <= decode_tokens(batch, context, 12, a_step)


def scripted(script: Iterator[str]) -> Callable[[], Collection[str]]:
    return lambda: next(script)


def test_a_step_that_misses_a_sequence_is_not_timed() -> None:
    script = ["a", "ab", *["ab"] * WARM_UP_STEPS, "ab", "b", "ab", "ab"]
    assert len(list(decode_steps(scripted(iter(script)), "ab", 3))) == 3


def test_too_many_such_steps_are_an_error() -> None:
    script = itertools.chain("ab", itertools.repeat("a"))
    with pytest.raises(RuntimeError, match="in 0 steps only; 3"):
        list(decode_steps(scripted(script), "ab", 3))
    assert SPARE_STEPS > 0


@pytest.mark.parametrize(
    ("free", "needed", "engines", "kv"),
    [(100.0, 1.5, 1, 8), (24.0, 1.5, 2, 8), (12.0, 1.5, 2, 4), (7.2, 1.5, 2, 2), (2.6, 0.1, 1, 1)],
)
def test_kv_gets_eight_gib_or_a_share_of_what_is_free(
    free: float, needed: float, engines: int, kv: int
) -> None:
    assert kv_gib(int(free * GIB), int(needed * GIB), WEIGHTS, engines) == kv <= MOST_KV_GIB


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(
        UnavailableError, match=r"2 engine\(s\) need 7.0 GiB of memory, 2 GiB .* 6.5 GiB are"
    ) as raised:
        kv_gib(int(6.5 * GIB), int(1.5 * GIB), WEIGHTS, 2)
    assert "--batch and --context" in raised.value.message


def test_vllm_gets_its_share() -> None:
    assert engine_command("vllm", "folder", 1, (), 3).environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def a_command(code: str) -> EngineCommand:
    return EngineCommand("peer", [sys.executable, "-c", code], {}, engine_command("peer", "", 1).cores)


def test_an_engine_that_ends_shows_its_log(tmp_path: Path) -> None:
    log = tmp_path / "not" / "there" / "peer.log"
    code = "import sys; print(*range(100), sep='\\n', file=sys.stderr); sys.exit(3)"
    with (
        pytest.raises(UnavailableError, match=r"peer ended with 3(.|\n)*80\n(.|\n)*99") as raised,
        engine_process(a_command(code), log),
    ):
        pass
    assert "\n79\n" not in raised.value.message
    assert str(log) in raised.value.message


def test_one_that_ends_later_shows_it_too(tmp_path: Path) -> None:
    code = "import sys; print('{}', flush=True); sys.stdin.readline(); sys.exit('out of memory')"
    with engine_process(a_command(code), tmp_path / "peer.log") as engine:
        for _ in range(2):  # before and after its end is known
            with pytest.raises(UnavailableError, match=r"peer ended with 1(.|\n)*out of memory"):
                engine.ask({"phase": "decode"})


@pytest.mark.parametrize("folder", sorted(MODELS.iterdir()), ids=lambda folder: folder.name)
def test_made_up_models_have_a_configuration(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert config.vocab_size > 40_000
    assert cases(config.max_position_embeddings, 2**16)
    work = work_of(str(folder))
    assert work.kv_needed(EngineCase("decode", 8, 1024, 12)) >= 8 * 1024 * work.kv_bytes


def test_the_shapes_are_those_of_the_names() -> None:
    assert (MODELS / "llama-3.1-8b").is_dir()  # docs/internals/engine.md names it
    parameters = work_of(str(MODELS / "llama-3.1-8b"))
    assert round((parameters.weights + parameters.output) / 1e9, 1) == 7.5  # of 8.0, embeddings apart
    small = work_of(str(MODELS / "smollm2-135m"))
    assert round((small.weights + small.output) / 1e6) == 134


def git(*arguments: str) -> str:
    try:
        ran = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        pytest.skip("no git")
    if ran.returncode == 128:
        pytest.skip(f"no repository: {ran.stderr}")
    return ran.stdout


def test_no_tracked_file_is_one_that_git_ignores() -> None:
    """Otherwise files created beside it later would never be committed."""
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == ""


def test_logs_go_where_git_ignores_them() -> None:
    assert git("check-ignore", "--no-index", str(LOGS / "splitserve-1.log")) != ""
