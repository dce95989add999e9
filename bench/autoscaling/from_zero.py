"""`python -m bench.autoscaling.from_zero`: the first token of a request that finds no workers, beside their cold start.

`splitserve up --autoscale` goes to zero after two idle seconds; then one request is sent. What it waits for is the
start of both workers: from the first process until both are connected and in rotation. The rest of its time is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from bench.option_values import positive_number, positive_whole
from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.rpc.credentials import cluster_credentials
from splitserve.v1 import scaling_pb2

START_S = 300.0
POLL_S = 0.02
PROMPT = "The capital of France is"
POOL = {"kind": "schedule", "min_replicas": 0, "max_replicas": 1, "gpus_per_replica": 0}
BAR = 1.1
"""The first token from zero comes within this multiple of the cold start."""


@dataclass(frozen=True, slots=True)
class Round:
    """One request from zero. Seconds."""

    ttft_s: float
    cold_start_s: float
    """From the first worker's process until both are in rotation."""
    order_s: float
    """From the request until that process is there."""
    rest_s: float
    """From both in rotation until the first token."""

    @property
    def ratio(self) -> float:
        """The time to the first token over the cold start."""
        return self.ttft_s / self.cold_start_s


@contextmanager
def cluster(model: str, interval_s: float, token: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A cluster that goes to zero: its address, and the supervisor."""
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch) / "policy.yaml"
        rules = {"interval_s": interval_s, "idle_s": 2, "prefill": POOL, "decode": POOL}
        policy.write_text(json.dumps(rules))
        command = [sys.executable, "-m", "launcher", "up", "--model", model, "--autoscale", str(policy)]
        command += ["--cluster-token-file", str(token), "--grpc-port", "0", "--http-port", "off"]
        if model == "simulated":
            command += ["--engine", "simulated"]
        with Path(scratch, "up.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                assert process.stdout is not None
                ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
                yield ready.split()[3], psutil.Process(process.pid)
            finally:
                process.terminate()
                process.wait(START_S)


def workers(supervisor: psutil.Process) -> list[psutil.Process]:
    """The processes of workers."""
    processes = []
    for child in supervisor.children():
        try:
            if "--worker-id" in child.cmdline():
                processes.append(child)
        except psutil.Error:  # it has just ended
            continue
    return processes


async def one_round(client: AsyncClient, scaling: ScalingClient, supervisor: psutil.Process) -> Round:
    """Waits for zero, and sends a request."""
    deadline = time.monotonic() + START_S
    while workers(supervisor):
        assert time.monotonic() < deadline, "not at zero"
        await asyncio.sleep(POLL_S)
    began_s = time.time()
    answer = await client.generate(PROMPT, max_tokens=4, ignore_eos=True, timeout_s=START_S)
    ttft_s = answer.timings.ttft_ms / 1e3
    first_s = min(child.create_time() for child in workers(supervisor))
    (model,) = (await scaling.signals()).models
    now_s = time.time()
    ready = [worker for worker in model.workers if worker.state == scaling_pb2.WORKER_STATE_READY]
    ready_s = max(now_s - worker.state_seconds for worker in ready)
    return Round(ttft_s, ready_s - first_s, first_s - began_s, began_s + ttft_s - ready_s)


async def measure(model: str, rounds: int, interval_s: float) -> list[Round]:
    """So many rounds on one cluster."""
    with tempfile.TemporaryDirectory() as scratch:
        token = Path(scratch) / "token"
        token.write_text(secrets.token_hex(16))
        token.chmod(0o600)
        security = cluster_credentials("autoscaler", None, token)
        with cluster(model, interval_s, token) as (target, supervisor):
            async with AsyncClient(target) as client, ScalingClient(target, security=security) as scaling:
                return [await one_round(client, scaling, supervisor) for _ in range(rounds)]


def main() -> int:
    """0 if the median is within the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=positive_whole, default=5)
    parser.add_argument("--interval", type=positive_number, default=5.0, help="seconds between decisions")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rounds = asyncio.run(measure(given.model, given.rounds, given.interval))
    ratio = median(measured.ratio for measured in rounds)
    if given.json:
        print(
            json.dumps(
                {"rounds": [asdict(measured) for measured in rounds], "ratio": round(ratio, 4), "bar": BAR}
            )
        )
    else:
        print("ttft s  cold start s  order s  rest s  ratio")
        for measured in rounds:
            print(
                f"{measured.ttft_s:6.2f}  {measured.cold_start_s:12.2f}  {measured.order_s:7.3f}  "
                f"{measured.rest_s:6.3f}  {measured.ratio:5.3f}"
            )
        print(f"median ratio {ratio:.3f}, bar {BAR}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
