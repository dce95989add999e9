"""A process that has imported all of splitserve and forks: a service then starts in milliseconds, not seconds.

Run as `python -m tests.support.cluster.fork_server FD IMPORTS`; `tests.support.cluster.forked` holds the other end
of the socket. A request is one JSON line (`arguments`, `environment`, `log`); the answer is `{"pid": …}`, and later
`{"ended": pid, "code": …}`. When the other end is closed, children that still run are killed and the exit code is 1.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from typing import Any


def serve(control: socket.socket) -> list[str] | None:
    """Forks a child for each request. In a child: the arguments of its command line; in the server None, at the end."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    children: dict[int, int] = {}  # pid by pidfd
    lines = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                _tell_end(control, children.pop(key.fd))
                selector.unregister(key.fd)
                os.close(key.fd)
                continue
            received = control.recv(2**16)
            if not received:
                _end(children.values())
                return None
            *requests, lines = (lines + received).split(b"\n")
            for request in requests:
                pid = os.fork()
                if not pid:
                    selector.close()
                    control.close()
                    for pidfd in children:
                        os.close(pidfd)
                    return _become(json.loads(request))
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                _tell(control, {"pid": pid})


def _become(request: Mapping[str, Any]) -> list[str]:
    """Makes this child what a program started by a shell would be: a session, environment and output of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    return [str(argument) for argument in request["arguments"]]


def _end(pids: Collection[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if pids:
        sys.exit(f"processes left behind: {len(pids)}")


def _import_services() -> None:
    from autoscaler.service import serve as serve_autoscaler
    from coordinator.entrypoints.openai.app import make_app
    from coordinator.service import serve
    from decode_worker.service import serve as serve_decode
    from prefill_worker.service import serve as serve_prefill
    from splitserve.cli.main import main
    from splitserve.cli.services import register
    from splitserve.config.command_line import command

    del make_app, serve, serve_autoscaler, serve_decode, serve_prefill, main, register, command


def _import_torch() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    from engine.runner.torch_runner import build_torch_runner

    del AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, build_torch_runner


def _import_vllm() -> None:
    from engine.vllm.boot import prepare_environment

    prepare_environment(1)  # vLLM reads some of it when it is loaded
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker import cpu_worker

    from engine.vllm import adapters, connector, kv_memory, prefix_events, sampling_processor, vllm_engine
    from engine.vllm.command_line import option_parser

    del LLMEngine, cpu_worker, option_parser
    del adapters, connector, kv_memory, prefix_events, sampling_processor, vllm_engine


def _tell_end(control: socket.socket, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(control: socket.socket, message: Mapping[str, int]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def main() -> int:
    """The server's exit code, and in a child that of the command."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as splitserve's own program does before it imports gRPC
    # To the whole group they end the tests, and that ends this process: it must live to end its children.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_services()
    if sys.argv[2] == "torch":
        _import_torch()
    elif sys.argv[2] == "vllm":
        _import_vllm()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a thread would be missing in the children"
    gc.freeze()
    arguments = serve(control)
    if arguments is None:
        return 0
    from splitserve.cli.main import main as splitserve

    sys.argv[:] = ["splitserve", *arguments]
    return splitserve(arguments)


if __name__ == "__main__":
    sys.exit(main())
