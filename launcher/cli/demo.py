"""`splitserve demo`: a local cluster, one streamed answer with its phase times, a clean exit."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import IO

from splitserve.errors import SplitserveError, UnavailableError
from splitserve.extras import require_worker
from splitserve.runtime.child_launch import PROGRAM, launcher

MODEL = "smollm2-135m-instruct"
QUESTION, ANSWER = "What is the name of the capital of France?", "Paris"
START_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def demo() -> None:
    """Start a local cluster, stream one answer, show who served it, and stop. The first time it fetches the model.

    Raises MissingExtraError without engine torch, UnavailableError if the cluster does not start or stop well,
    SplitserveError for a wrong answer.
    """
    from launcher.cli.model import fetch_with_progress
    from launcher.cli.output import write

    require_worker("torch", "nixl")
    fetch_with_progress(MODEL)
    ports = ("--grpc-port", "0", "--http-port", "0")
    command = (
        *PROGRAM,
        "up",
        "--model",
        MODEL,
        "--engine",
        "torch",
        "--prefill",
        "1",
        "--decode",
        "1",
        *ports,
    )
    # In a session of its own: Ctrl-C reaches this process alone, which then lets the cluster drain.
    cluster = subprocess.Popen(
        [*launcher(), *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    watchdog = threading.Timer(START_TIMEOUT_S, cluster.terminate)
    watchdog.start()
    try:
        assert cluster.stdout is not None
        target = _target(cluster.stdout)
        watchdog.cancel()
        write(f"\n> {QUESTION}\n")
        answer = _shown("generate", QUESTION, "--target", target, "--max-tokens", "32", "--timings")
        _shown("status", "--target", target)
    finally:
        watchdog.cancel()
        cluster.send_signal(signal.SIGINT)
        try:
            code = cluster.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            cluster.kill()
            raise UnavailableError(f"the cluster did not end within {STOP_TIMEOUT_S} s") from None
    if code:
        raise UnavailableError(f"the cluster ended with exit code {code}")
    if ANSWER not in answer:
        raise SplitserveError(f"the answer is wrong: {ANSWER} is not in it")
    write("\ndemo: ok. Now your own: splitserve up, and splitserve generate from another terminal\n")


def _target(output: IO[str]) -> str:
    """Shows the cluster's output until its ready line; the address that it names."""
    from launcher.cli.output import write

    for line in output:
        write(line)
        if line.startswith("splitserve ready on "):
            return line.split()[3]
    raise UnavailableError("the cluster ended before it was ready; its own message is above")


def _shown(*words: str) -> str:
    """Runs a command of splitserve, shows its standard output as it comes, and returns it."""
    from launcher.cli.output import write

    command = subprocess.Popen((*PROGRAM, *words), stdout=subprocess.PIPE, text=True, bufsize=1)
    watchdog = threading.Timer(ANSWER_TIMEOUT_S, command.kill)
    watchdog.start()
    try:
        assert command.stdout is not None
        shown = ""
        while piece := command.stdout.read(1):
            write(piece)
            shown += piece
        code = command.wait()
    finally:
        watchdog.cancel()
        command.kill()  # does nothing where it has ended
    if code:
        raise UnavailableError(f"splitserve {words[0]} ended with exit code {code}")
    return shown
