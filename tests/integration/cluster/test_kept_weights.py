"""Workers that are forked from a process that has their model compute what a worker that loads it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.models.sources import resolve_model
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.waiting import PATIENCE_S

FORKED = """
import os, sys
from engine.core.model_runner import warm_up
from engine.runner.torch_runner import build_torch_runner
from engine.runner.weights import keep_weights
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model
from engine.core.types import SamplingParams, ScheduledSequence

config = EngineConfig(kv_memory_bytes=20_000_000, device="cpu", dtype="float32", threads=int(sys.argv[2]))
def answer():
    runner = build_torch_runner(config, resolve_model(sys.argv[1]), lambda fraction: None)
    warm_up(runner, None)
    tokens, computed = list(range(40, 90)), 0
    for _ in range(12):
        row = ScheduledSequence(
            "one", tokens, 50, computed, len(tokens) - computed, list(range(8)), True, SamplingParams(temperature=0.0)
        )
        computed = len(tokens)
        tokens.append(runner.execute([row])[0].token_id)
    return tokens

keep_weights(config, sys.argv[1])
assert len(os.listdir("/proc/self/task")) == 1
sys.stdout.flush()
for _ in range(2):
    if not os.fork():
        print(answer(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
from engine.runner import weights
weights._kept.clear()
print(answer())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "threads"), [("llama", 2), (None, 1)], ids=["tiny", "real"])
def test_a_forked_worker_gives_the_same_tokens(family: str | None, threads: int, tmp_path: Path) -> None:
    folder = (
        resolve_model("smollm2-135m-instruct").path if family is None else make_tiny_model(family, tmp_path)
    )
    command = [sys.executable, "-c", FORKED, str(folder), str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    first, second, alone = done.stdout.splitlines()
    assert first == second == alone


VOCABULARY = """
import os, sys
from engine.core.types import ModelFacts
from engine.worker import kept_vocabulary
from splitserve.models.sources import resolve_model
from splitserve.v1.generation_pb2 import Grammar

source = resolve_model(sys.argv[1])
facts = ModelFacts(8192, 49152, frozenset({2}))
def answer():
    tokenizer, grammars = kept_vocabulary.load_vocabulary(source.tokenizer_source, facts)
    prepared, before = grammars._tokenizer is not None, len(os.listdir("/proc/self/task"))
    grammars.prepare()
    matcher = grammars.compile(Grammar(regex="(yes|no|[a-f]{3,})!")).matcher()
    prompt = tokenizer.encode("Hello world, " * 400)
    matcher.advance(ids := tokenizer.encode("no"), 0)
    import numpy as np
    mask = np.zeros(49152 // 32, np.int32)
    matcher.fill(mask)
    return prepared, [hash(tuple(prompt)), ids, hash(mask.tobytes())]

kept_vocabulary.keep_vocabulary(sys.argv[1], facts)
assert len(os.listdir("/proc/self/task")) == 1
for _ in range(2):
    if not os.fork():
        prepared, found = answer()
        assert prepared
        print(found, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
kept_vocabulary._kept.clear()
prepared, found = answer()
assert not prepared
print(found)
"""


@pytest.mark.timeout(120)
def test_a_forked_worker_has_the_same_vocabulary() -> None:
    command = [sys.executable, "-c", VOCABULARY, "smollm2-135m-instruct"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, alone = done.stdout.splitlines()
    assert first == second == alone
