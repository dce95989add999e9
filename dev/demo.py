"""What `make demo` runs: a real cluster, one streamed answer with its phase times, a clean exit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import IO

QUESTION = "What is the name of the capital of France?"
START_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
SPLITSERVE = [sys.executable, "-m", "launcher"]


def address_from(stdout: IO[str]) -> str:
    """Echoes the cluster's output until its ready line and returns the address named there."""
    for line in stdout:
        print(line, end="", flush=True)
        if line.startswith("splitserve ready on "):
            return line.split()[3]
    raise SystemExit("demo: the cluster ended before it was ready")


def ask(target: str) -> dict[str, object]:
    """Streams the answer to the terminal, then repeats the request for the figures as JSON."""
    command = [*SPLITSERVE, "generate", QUESTION, "--target", target, "--max-tokens", "32"]
    print(f"\n> {QUESTION}", flush=True)
    subprocess.run([*command, "--timings"], check=True, timeout=ANSWER_TIMEOUT_S)
    facts = subprocess.run([*command, "--json"], check=True, timeout=ANSWER_TIMEOUT_S, capture_output=True)
    answer: dict[str, object] = json.loads(facts.stdout)
    return answer


def main() -> int:
    """Exit code 0 only if the answer is right and everything stopped cleanly."""
    command = [*SPLITSERVE, "up", "--prefill", "1", "--decode", "1", "--grpc-port", "0"]
    command += ["--http-port", "0"]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_TIMEOUT_S, cluster.terminate)
    watchdog.start()
    try:
        assert cluster.stdout is not None
        target = address_from(cluster.stdout)
        watchdog.cancel()
        answer = ask(target)
        subprocess.run([*SPLITSERVE, "status", "--target", target], check=True, timeout=ANSWER_TIMEOUT_S)
    finally:
        watchdog.cancel()
        cluster.send_signal(signal.SIGINT)
        code = cluster.wait(STOP_TIMEOUT_S)
    print(f"served by {answer['served_by']}")
    right = "Paris" in str(answer["text"])
    print(f"demo: {'ok' if right and code == 0 else 'FAILED'} (cluster exit code {code})")
    return 0 if right and code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
