"""Everything to run on a machine with a CUDA device, in under ten minutes: `python -m dev.gpu_check [--out FOLDER]`.

Runs the self-test of the device, the tests that need a GPU, the contract suites of the Triton kernels and a short
`bench.engine`, and writes a report (Markdown and JSON) to keep. Each part is a process with a time limit and an
outcome of its own; one that fails does not stop the others. Packages that are missing or older than asked for are
printed, and a part that needs a missing one is not run. Imports the standard library only, so that it can say so.

Exit code 0: all parts passed; 1: not all; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dev.gpu_report import (
    Outcome,
    PackageState,
    PartResult,
    all_passed,
    as_document,
    as_markdown,
    normalized,
    package_states,
    read_tests,
    tail,
)

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("build/gpu-check")
TOTAL_S = 570.0
"""All parts together; the last ones get what is left of it."""
EXIT_FAILED, EXIT_NO_DEVICE = 1, 2
LARGE_DEVICE_BYTES = 24 * 2**30
"""From here on the bench takes the shapes of an 8B model."""
PYTHON = sys.executable

ENGINE = [
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pydantic",
    "pyyaml",
    "psutil",
    "protobuf",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "cbor2",
    "jinja2",
    "safetensors",
    "accelerate",
    "tokenizers",
]
TESTS = [*ENGINE, "pytest", "pytest-timeout", "hypothesis"]

Read = Callable[[str], tuple[Outcome, str, dict[str, Any]]]
"""From a part's output to outcome, summary and details. Raises ValueError where the output does not say."""


@dataclass(frozen=True)
class CheckPart:
    """A command with a time limit. `needs`: distributions without which it is not run."""

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str]
    read: Read


def parts(device: Mapping[str, Any]) -> list[CheckPart]:
    """What is run, in this order, on a device as `find_device` describes it."""
    pytest = [PYTHON, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider"]
    contract = [
        f"tests/contract/engine/{name}"
        for name in ("test_triton_attention.py", "test_triton_compiles.py", "cuda")
    ]
    shapes = "llama-3.1-8b" if device["memory_bytes"] >= LARGE_DEVICE_BYTES else "smollm2-135m"
    bench = [PYTHON, "-m", "bench.engine", "--device", "cuda", "--random-weights", shapes, "--json"]
    bench += ["--context", "1024", "2048", "--batch", "1", "32", "--logs", str(OUT / "bench-logs")]
    self_test = [PYTHON, "-m", "dev.gpu_self_test", "--device", "cuda", "--json"]
    return [
        CheckPart("self-test", self_test, 90, [*ENGINE, "nixl-cu13"], read_self_test),
        CheckPart("tests/gpu", [*pytest, "tests/gpu"], 200, TESTS, read_tests),
        CheckPart("contract suites", [*pytest, *contract], 150, TESTS, read_tests),
        CheckPart("bench.engine", bench, 150, [*ENGINE, "rich"], read_bench),
    ]


def read_self_test(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    """Reads the output of `dev.gpu_self_test --json`."""
    content = json_in(output)
    failed = [check["name"] for check in content["checks"] if not check["passed"]]
    summary = f"{len(content['checks'])} checks" + (f", failed: {', '.join(failed)}" if failed else "")
    return "failed" if failed else "passed", summary, content


def read_bench(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    """Reads the output of `bench.engine --json`."""
    content = json_in(output)
    shown = [
        f"{row['phase']} {row['batch']}x{row['context_tokens']}: {row['share_of_limit']:.0%} of the limit"
        for row in content["rows"]
    ]
    return ("passed" if shown else "failed"), "; ".join(shown), content


def json_in(output: str) -> dict[str, Any]:
    """The JSON object that an output ends with; log lines before it are skipped."""
    for begin in range(len(output)):
        if output[begin] == "{" and (begin == 0 or output[begin - 1] == "\n"):
            with suppress(json.JSONDecodeError):
                content = json.loads(output[begin:])
                if isinstance(content, dict):
                    return content
    raise ValueError("no JSON object in its output")


def run_part(part: CheckPart, limit_s: float, missing: frozenset[str], folder: Path) -> PartResult:
    """Runs one part for `limit_s` seconds at most. Its output goes to files in `folder`."""
    lacking = [name for name in part.needs if normalized(name) in missing]
    if lacking:
        return PartResult(part.name, "not run", 0.0, f"missing: {', '.join(lacking)}")
    if limit_s <= 0:
        return PartResult(part.name, "not run", 0.0, "no time was left")
    log = folder / f"{normalized(part.name).replace('/', '-').replace(' ', '-')}.log"
    began = time.monotonic()
    try:
        code = _run(part.command, log, limit_s)
    except OSError as error:
        return PartResult(part.name, "failed", 0.0, f"cannot be started: {error.strerror}")
    seconds = time.monotonic() - began
    output = log.read_text(errors="replace")
    errors = log.with_suffix(".err").read_text(errors="replace")
    outcome: Outcome
    try:
        outcome, summary, details = part.read(output)
    except (ValueError, KeyError, TypeError) as error:
        outcome, summary, details = "failed", f"its result cannot be read: {error}", {}
    if code is None:
        outcome, summary = "timed out", f"after {limit_s:.0f} s; {summary}"
    elif code != 0 and outcome == "passed":
        outcome, summary = "failed", f"exit code {code}; {summary}"
    shown = () if outcome == "passed" else tail(output + errors)
    return PartResult(part.name, outcome, round(seconds, 1), summary, details, shown)


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """The exit code; None if the process group had to be killed."""
    # What the caller has on its path stays on it: packages may be installed there.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with log.open("w") as out, log.with_suffix(".err").open("w") as err:
        process = subprocess.Popen(
            list(command),
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also ends what the part itself has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_DEVICE = """
import json, torch
if not torch.cuda.is_available():
    built = torch.version.cuda
    why = f"torch {torch.__version__} finds none" if built else f"torch {torch.__version__} was built without CUDA"
    print(json.dumps({"why": why}))
else:
    facts = torch.cuda.get_device_properties(0)
    print(json.dumps({"name": facts.name, "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory, "multiprocessors": facts.multi_processor_count,
        "devices": torch.cuda.device_count(), "torch": torch.__version__, "cuda": torch.version.cuda}))
"""


def find_device(command: Sequence[str] = (PYTHON, "-c", _DEVICE)) -> dict[str, Any]:
    """The first CUDA device; only `why` where there is none. Another process asks torch, so that this one holds no GPU
    memory."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        device: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"why": "torch did not answer in 60 s"}
    except (ValueError, IndexError):
        lines = asked.stderr.strip().splitlines()
        return {"why": lines[-1] if lines else "torch did not answer"}
    return device


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _packages(needed: Iterable[str]) -> list[PackageState]:
    """The state of splitserve's dependencies and of what the parts need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions: dict[str, str] = {}
    # In the order of the path: the first one of a name is what is imported.
    for distribution in metadata.distributions():
        versions.setdefault(normalized(distribution.metadata["Name"]), distribution.version)
    wanted = set(map(normalized, needed))
    of_tests = [line for line in project["optional-dependencies"]["dev"] if _is_one_of(line, wanted)]
    return package_states([*project["dependencies"], *of_tests], versions, wanted)


def _is_one_of(requirement: str, names: set[str]) -> bool:
    (state,) = package_states([requirement], {})
    return state.name in names


def check(
    device: Mapping[str, Any], run: Sequence[CheckPart], folder: Path, total_s: float = TOTAL_S
) -> bool:
    """Runs the parts, prints a line for each, writes `report.md` and `report.json`; whether all passed."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = _packages(name for part in run for name in part.needs)
    for package in packages:
        if package.remark:
            print(f"{package.name}: {package.remark} ({package.wanted or 'any version'})", flush=True)
    missing = frozenset(package.name for package in packages if package.installed is None)
    deadline, results = time.monotonic() + total_s, []
    for part in run:
        left = min(part.limit_s, deadline - time.monotonic())
        result = run_part(part, left, missing, folder)
        print(f"{part.name}: {result.outcome} in {result.seconds:.0f} s: {result.summary}", flush=True)
        results.append(result)
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    document = as_document(date, _commit(), device, packages, results)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "report.md").write_text(as_markdown(document))
    print(f"report: {folder / 'report.md'}")
    return all_passed(results)


def run_script(
    name: str,
    description: str,
    out: Path,
    parts_on: Callable[[Mapping[str, Any]], Sequence[CheckPart]],
    arguments: Sequence[str] | None,
) -> int:
    """Runs the parts of the script `dev.NAME` on the first CUDA device and writes the report, by default to `out`.
    Returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog=f"python -m dev.{name}", description=description.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"default: {out}")
    folder = parser.parse_args(arguments).out.resolve()
    device = find_device()
    if "why" in device:
        print(f"{name}: no CUDA device: {device['why']}", file=sys.stderr)
        return EXIT_NO_DEVICE
    device["driver"] = _driver()
    return 0 if check(device, parts_on(device), folder) else EXIT_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the first CUDA device. Returns the exit code of the process."""
    return run_script("gpu_check", __doc__, OUT, parts, arguments)


if __name__ == "__main__":
    sys.exit(main())
