"""docs/guides/troubleshooting.md quotes what the product says: each text happens here or in a test that is named."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.cli.main import main
from splitserve.security.api_keys import key_hash, new_key
from splitserve.security.certificates import write_certificates
from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/guides/troubleshooting.md"
_TABLE = re.compile(r"^\| it says \| do \|\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| `([^`\n]+)` \| (.+) \|$", re.MULTILINE)
QUOTED = {
    text: advice
    for rows in _TABLE.findall(PAGE.read_text(encoding="utf-8"))
    for text, advice in _ROW.findall(rows)
}
"""What to do, by the text that stands before it."""

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)


def says(text: str, output: str) -> bool:
    """Whether output has a quoted text; `…` stands for anything within a line."""
    return re.search(".*?".join(map(re.escape, text.split("…"))), output) is not None


def cli(*arguments: str) -> str:
    """What a command that fails writes."""
    with redirect_stderr(io.StringIO()) as written:
        assert main(arguments) in (1, 2)
    assert written.getvalue().startswith("error: ")
    assert written.getvalue().count("\n") == 1
    return written.getvalue()


UP = ("up", "--grpc-port", "0", "--http-port", "off")
ASK = ("generate", "hi", "--max-tokens", "2", "--target")


def port_taken(folder: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        return cli("up", "--engine", "simulated", "--model", "simulated", "--grpc-port", port)


def unknown_setting(folder: Path) -> str:
    (folder / "cluster.yaml").write_text("engine: {blok_size_tokens: 16}\n")
    return cli("up", "--config", str(folder / "cluster.yaml"))


def without_weights(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    return cli(*UP, "--model", str(folder))


def nobody_answers(folder: Path) -> str:
    """As behind a firewall that drops what is sent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        return cli(*ASK, f"127.0.0.1:{silent.getsockname()[1]}")


def other_platform(folder: Path) -> str:
    wheel = folder / "splitserve-0.2.0-cp311-cp311-manylinux_2_28_s390x.whl"
    wheel.touch()
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--dry-run", str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stderr


@contextmanager
def coordinator(folder: Path, *options: str) -> Iterator[str]:
    """The address of a coordinator without workers."""
    command = ("coordinator", "--grpc-port", "0", "--http-port", "off", "--no-worker-wait", "0", *options)
    process = ServiceProcess("coordinator", command, folder)
    process.start()
    try:
        yield f"127.0.0.1:{process.wait_event('coordinator.ready')['port']}"
    finally:
        process.terminate()


def plain_where_tls_is_wanted(folder: Path) -> str:
    write_certificates(folder, ["127.0.0.1"], 30)
    with coordinator(folder, "--tls", str(folder), "--cluster-port", "0") as target:
        return cli(*ASK, target)


def tls_where_none_is_wanted(folder: Path) -> str:
    write_certificates(folder, ["127.0.0.1"], 30)
    with coordinator(folder) as target:
        return cli(*ASK, target, "--tls", str(folder / "ca.pem"))


def with_key(folder: Path, *, key: str) -> str:
    tenants = folder / "tenants.yaml"
    tenants.write_text(f'tenants: [{{name: ops, key_hashes: ["{key_hash(new_key())}"]}}]')
    options = ("--api-key", key) if key else ()
    with coordinator(folder, "--tenants", str(tenants)) as target:
        return cli(*ASK, target, *options)


def without_workers(folder: Path) -> str:
    with coordinator(folder) as target:
        return cli(*ASK, target)


def logged(folder: Path, event: str, *command: str) -> str:
    """What a service logs until this event; then it is told to end."""
    process = ServiceProcess("service", command, folder)
    process.start()
    try:
        process.wait_event(event)
    finally:
        process.terminate()
    return process.log_tail()


def without_coordinator(folder: Path) -> str:
    simulated = ("--engine", "simulated", "--model", "simulated")
    return logged(folder, "registry.lost", "decode-worker", *simulated, "--coordinator", "127.0.0.1:1")


def few_files(folder: Path) -> str:
    many = ("--max-connections", "1000000")
    return logged(folder, "connections.limited", "coordinator", "--grpc-port", "0", "--http-port", "0", *many)


def in_a_process(*command: str, **environment: str) -> str:
    """What a command writes that fails in a process of its own, where libraries read other variables."""
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | environment,
    )
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    return run.stderr


SPLITSERVE = (sys.executable, "-m", "launcher")


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """A stand-in for Hugging Face that refuses every model; its address."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def planned(folder: Path, address: str) -> str:
    """`splitserve plan` reads a model's configuration from the hub, without torch."""
    command = (*SPLITSERVE, "plan", "--model", "some/model", "--gpu", "H100", "--rate", "1")
    direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return in_a_process(*command, HF_ENDPOINT=address, HF_HOME=str(folder), HF_HUB_OFFLINE="0", **direct)


def refused_by_hub(folder: Path, *, status: int, code: str) -> str:
    with hub(status, code) as address:
        return planned(folder, address)


def full_disk(folder: Path) -> str:
    """On a disk that takes no further file, in a mount namespace of its own."""
    mount = 'mount -t tmpfs -o nr_inodes=1 tmpfs "$0" && exec "$@"'
    command = ("unshare", "--mount", "bash", "-c", mount, str(folder))
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here")
    fetch = (*SPLITSERVE, "model", "fetch", "smollm2-135m-instruct")
    return in_a_process(*command, *fetch, SPLITSERVE_HOME=str(folder))


HERE: Mapping[str, Callable[[Path], str]] = {
    "… is not a supported wheel on this platform": other_platform,
    "port … on … is already in use": port_taken,
    "cannot read …": lambda folder: cli("up", "--config", str(folder / "nothing.yaml")),
    "…: there is no such setting": unknown_setting,
    "No such option: …": lambda folder: cli("up", "--blok-size", "16"),
    "engine.dtype: Input should be 'auto', 'float32' or 'bfloat16'": lambda folder: cli(
        "up", "--dtype", "float16"
    ),
    "connections.limited": few_files,
    "Hugging Face cannot be reached": partial(planned, address="http://127.0.0.1:1"),
    "model … is gated: accept its terms at Hugging Face and set HF_TOKEN to your token": partial(
        refused_by_hub, status=403, code="GatedRepo"
    ),
    "not on Hugging Face, or it is private and HF_TOKEN is not set": partial(
        refused_by_hub, status=404, code="RepoNotFound"
    ),
    "No space left on device": full_disk,
    "… has no weights: it has no safetensors file": without_weights,
    "the folder … has no config.json": lambda folder: cli(*UP, "--model", str(folder)),
    "registry.lost": without_coordinator,
    "cannot reach a splitserve coordinator at … (…): is it running?": lambda folder: cli(*ASK, "127.0.0.1:1"),
    "connection attempt timed out": nobody_answers,
    "hung up: does it want TLS?": plain_where_tls_is_wanted,
    "its certificate or ours was not accepted, or it has no TLS": tls_where_none_is_wanted,
    "an API key is needed": partial(with_key, key=""),
    "the API key is not known": partial(with_key, key="wrong"),
    "serves no model yet": without_workers,
}
"""What makes a text appear: given an empty folder, it returns the output."""


class Elsewhere(NamedTuple):
    """The test that makes a text appear, and what it looks for: a part of the text or of the advice."""

    test: str
    part: str


UNIT, INTEGRATION = "tests/unit/", "tests/integration/"
DEVICE = UNIT + "engine/runner/test_device.py::test_why_cuda_cannot_be_used"
CHAINS = INTEGRATION + "security/test_chains.py::test_up_names_the_certificate"
ELSEWHERE = {
    text: Elsewhere(test, part)
    for text, test, part in (
        (
            "engine.cpu_kernels_off",
            UNIT + "engine/backends/cpu/test_kernel_build.py::test_a_processor_that_lacks_something",
            "engine.cpu_kernels_off",
        ),
        (
            "needs more than is installed: pip install 'splitserve[…]'",
            UNIT + "splitserve/test_extras.py::test_a_command_says_what_to_install",
            "pip install 'splitserve[",
        ),
        ("torch … was built without CUDA", DEVICE, "was built without CUDA"),
        ("there is no NVIDIA driver", DEVICE, "there is no NVIDIA driver"),
        ("the NVIDIA driver supports …; update the driver", DEVICE, "; update the driver"),
        (
            "could not select device driver",
            UNIT + "autoscaler/actuators/hosts/test_hosts_actuator.py"
            "::test_a_host_that_refuses_orders_does_not_take_all_of_them",
            "could not select device driver",
        ),
        (
            "vLLM … is not supported",
            UNIT + "engine/vllm/test_options.py::test_another_version_of_vllm_is_refused",
            "is not supported",
        ),
        (
            "KV blocks take … bytes, and … bytes of memory are free",
            UNIT + "engine/kv_cache/test_free_memory.py::test_kv_that_does_not_fit_is_refused",
            "bytes of memory are free",
        ),
        (
            "was killed by SIGKILL (out of memory?)",
            INTEGRATION + "cluster/test_supervisor.py::test_a_killed_worker_is_started_again",
            "was killed by SIGKILL (out of memory?)",
        ),
        (
            "transport.shared_memory_small",
            INTEGRATION + "transfer/test_shared_memory.py"
            "::test_a_worker_starts_and_says_what_there_is_and_what_is_needed",
            "shared_memory_small",
        ),
        ("… expired on …", CHAINS, " expired on "),
        ("… is not valid before …", CHAINS, " is not valid before "),
        (
            "the cluster was not ready within … s",
            INTEGRATION + "cluster/test_supervisor.py::test_a_cluster_that_never_gets_ready",
            "not ready within ",
        ),
        (
            "engine.context_tokens: … is more than the model's own …",
            "tests/contract/engine/test_torch_runner.py::test_settings_that_do_not_fit_the_model",
            "is more than the model's own",
        ),
        (
            "has no usable tokenizer: it has no tokenizer files",
            UNIT + "splitserve/models/test_hf_tokenizer.py::test_a_folder_without_tokenizer_is_reported",
            "no tokenizer files",
        ),
        (
            "this model has no chat template; send text or token ids",
            UNIT + "splitserve/models/test_hf_tokenizer.py::test_a_tokenizer_without_template_says_so",
            "no chat template",
        ),
        (
            "the call carries no or a wrong cluster token",
            INTEGRATION
            + "security/test_secure_cluster.py::test_a_worker_without_the_token_ends_with_one_line",
            "no or a wrong cluster token",
        ),
        (
            "TLS_FAILED",
            INTEGRATION
            + "security/test_secure_cluster.py::test_clients_that_trust_nobody_or_another_authority",
            "TLS_FAILED",
        ),
        (
            "WORKER_REPLACED",
            INTEGRATION + "failures/test_two_of_one_id.py"
            "::test_streams_move_to_the_later_one_and_back_when_it_is_killed_while_it_reserves",
            "WORKER_REPLACED",
        ),
        (
            "LAYOUT_MISMATCH",
            INTEGRATION
            + "cluster/test_coordinator_membership.py::test_a_worker_with_another_layout_is_refused",
            "LAYOUT_MISMATCH",
        ),
        (
            "lane.slow",
            INTEGRATION + "transfer/test_lanes.py::test_tcp_where_shared_memory_is_expected_raises_an_alarm",
            "lane.slow",
        ),
        (
            "worker of model … is ready",
            UNIT + "coordinator/routing/test_prefix_router.py::test_what_is_missing_is_named",
            "NO_WORKER",
        ),
        (
            "the context of … must also hold the answer",
            UNIT + "coordinator/request/test_inference_request.py::test_prompt_forms",
            "PROMPT_TOO_LONG",
        ),
        (
            "the KV pool holds …",
            UNIT + "engine/core/test_engine_handoff.py"
            "::test_reserve_waits_for_free_blocks_and_refuses_what_never_fits",
            "KV_POOL_TOO_SMALL",
        ),
        (
            "QUEUE_FULL",
            INTEGRATION + "scaling/test_admission.py::test_a_full_queue_is_a_typed_refusal_with_a_hint",
            "QUEUE_FULL",
        ),
        (
            "connections are open, which is the limit",
            INTEGRATION
            + "entrypoints/test_connections.py::test_http_connections_beyond_the_limit_are_refused",
            "too_many_connections",
        ),
    )
}


def test_the_page_and_the_tests_have_the_same_texts() -> None:
    assert sorted(QUOTED) == sorted([*HERE, *ELSEWHERE])


@pytest.mark.parametrize("text", HERE)
def test_the_product_says_so(text: str, tmp_path: Path) -> None:
    output = HERE[text](tmp_path)
    assert says(text, output), output


@pytest.mark.parametrize(("text", "elsewhere"), ELSEWHERE.items())
def test_another_test_makes_it_happen(text: str, elsewhere: Elsewhere) -> None:
    path, _, name = elsewhere.test.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name}(" in source
    assert elsewhere.part in source
    assert elsewhere.part in f"{text} {QUOTED[text]}"
