"""Engine vllm on a CUDA device, in under ten minutes: `python -m dev.gpu_vllm [--out FOLDER]`.

Run it with the Python of an environment with vLLM and splitserve's tests. All workers share the first device. Parts:

* runner: which of vLLM's model runners and schedulers the engine gets.
* pair: the tokens of a prefill and a decode worker are those of `transformers`, also after a kill.
* families: sliding windows and sinks, KV of eight bits; the tokens are those of vLLM alone.
* roles, speculation: workers of role both, n-gram speculation.
* bench.vllm: TPOT beside `vllm serve` at 64 and 256 streams, the handoff of 2,048 and 7,500 tokens beside vLLM's own
  pair.

Exit code 0: all parts passed; 1: not all; 2: no CUDA device. `report.md` in FOLDER is what to send to us.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev.gpu_check import PYTHON, CheckPart, json_in, run_script
from dev.gpu_report import Outcome, read_tests

OUT = Path("build/gpu-vllm")
NEEDS = ("vllm", "nixl-cu13", "transformers", "pytest")
TESTS = "tests/integration/vllm"
MODEL = "smollm2-135m-instruct"
_RUNNER = f"""
import json
from splitserve.models.sources import resolve_model
from vllm.engine.arg_utils import EngineArgs
import vllm
config = EngineArgs(resolve_model("{MODEL}").path).create_engine_config()
print(json.dumps({{"vllm": vllm.__version__, "second_runner": config.use_v2_model_runner,
    "async_scheduling": bool(config.scheduler_config.async_scheduling)}}))
"""


def parts() -> list[CheckPart]:
    """What is run, in this order."""
    pytest = [PYTHON, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "-m", "vllm and not slow"]
    suites = {
        "pair": (120, [f"{TESTS}/test_vllm_pair.py"]),
        "families": (120, [f"{TESTS}/test_vllm_families.py"]),
        "roles and speculation": (150, [f"{TESTS}/test_vllm_roles.py", f"{TESTS}/test_vllm_speculation.py"]),
    }
    bench = [PYTHON, "-m", "bench.vllm", "--gpu", "--models", MODEL, "--parts", "decode,handoff", "--json"]
    bench += ["--streams", "64", "256", "--temperatures", "0", "--lengths", "2048", "7500", "--repeats", "2"]
    return [
        CheckPart("runner", [PYTHON, "-c", _RUNNER], 60, NEEDS, read_runner),
        *(
            CheckPart(name, [*pytest, *files], limit_s, NEEDS, read_tests)
            for name, (limit_s, files) in suites.items()
        ),
        CheckPart("bench.vllm", bench, 240, (*NEEDS, "rich"), read_bench),
    ]


def read_runner(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    """Reads what `runner` prints."""
    settings = json_in(output)
    runner = "second" if settings["second_runner"] else "first"
    scheduling = "asynchronous" if settings["async_scheduling"] else "synchronous"
    return "passed", f"vLLM {settings['vllm']}: {runner} model runner, {scheduling} scheduling", settings


def read_bench(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    """Reads the output of `bench.vllm --json`."""
    content = json_in(output)
    shown = [f"{row['streams']} streams: TPOT {row['ratio_tpot']:.2f} of vLLM's" for row in content["rows"]]
    shown += [
        f"handoff of {row['prompt_tokens']} tokens: {row['ratio_second_token']:.2f} of vLLM's"
        for row in content["handoff"]
    ]
    return ("passed" if shown else "failed"), "; ".join(shown), content


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the first CUDA device. Returns the exit code of the process."""
    return run_script("gpu_vllm", __doc__, OUT, lambda device: parts(), arguments)


if __name__ == "__main__":
    sys.exit(main())
