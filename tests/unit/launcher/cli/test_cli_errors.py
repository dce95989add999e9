"""Everything wrong on the command line: one line on stderr, no traceback, the documented exit code."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from launcher.cli import up
from launcher.cli.main import exit_code_of, main
from splitserve import __version__
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ResourceExhaustedError, SplitserveError, TransferError, UnsupportedModelError
from splitserve.runtime import bounded_file

NOBODY = "127.0.0.1:1"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line of stderr."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return code, captured.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate"], "'prompt'"),
        (["generate", "x", "--nope"], "--nope"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--temperature", "-1"], "temperature must be 0..100, not -1"),
        (["generate", "x", "--temperature", "nan"], "temperature must be 0..100"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be 1.."),
        (["generate", "x", "--top-p", "1.5"], "top_p must be 0..1, not 1.5"),
        (["generate", "x", "--seed", "-1"], "seed must be 0.."),
        (["generate", "x", "--timeout", "0"], "timeout"),
        (["generate", "x", "--target", "nowhere"], "target must be"),
        (["status", "--target", "host:99999"], "1..65535"),
        (["up", "--prefill", "0"], "prefill: Input should be greater than or equal to 1"),
        (["up", "--grpc-port", "70000"], "grpc_port"),
        (["up", "--engine", "magic"], "engine.kind"),
        (["up", "--config", "/no/such/file"], "cannot read /no/such/file"),
        (["prefill-worker"], "model: Field required"),
        (["prefill-worker", "--model", "m", "--cpus", "x"], "cpus must look like"),
        (["prefill-worker", "--model", "m", "--worker-id", "a b"], "worker_id"),
        (["decode-worker", "--model", "m", "--coordinator", "host"], "coordinator must be"),
        (["decode-worker", "--model", "m", "--lease", "0"], "lease_s"),
        (["coordinator", "--drain", "-1"], "drain_s"),
        (["certs", "/dev/null"], "directory: cannot write /dev/null"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    code, line = failure(capsys, *arguments)
    assert code == 2
    assert part in line


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["status", "--json"]])
def test_nobody_listens(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, line = failure(capsys, *command, "--target", NOBODY)
    assert code == 1
    expected = f"cannot reach a splitserve coordinator at {NOBODY} (Connection refused): is it running? (splitserve up)"
    assert line == f"error: {expected}\n"


def test_the_target_can_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_TARGET", "127.0.0.1:2")
    assert "127.0.0.1:2" in failure(capsys, "status")[1]


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = failure(
            capsys, "up", "--grpc-port", str(port), "--model", "simulated", "--engine", "simulated"
        )
    assert code == 1
    assert f"port {port} on 127.0.0.1 is already in use" in line


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            ("--grpc-port", "65535", "--coordinators", "2"),
            "coordinators: grpc_port of coordinator 1 would be 65536",
        ),
        (
            ("--grpc-port", "21160", "--http-port", "21160"),
            "coordinator.http_port: port 21160 is that of grpc_port",
        ),
        (
            ("--grpc-port", "21160", "--http-port", "21161", "--coordinators", "2"),
            "port 21161 is that of http_port of coordinator 0 and of grpc_port of coordinator 1",
        ),
        (
            ("--grpc-port", "65535", "--tls", "certificates"),
            "coordinator.cluster_port: cluster_port of coordinator 0 would be 65536",
        ),
    ],
)
def test_ports_that_are_none_or_doubled(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], part: str
) -> None:
    code, line = failure(capsys, "up", *options, "--model", "simulated", "--engine", "simulated")
    assert code == 2
    assert part in line


def test_free_ports_that_overlap_are_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([21160, 21161, 21162, 21164])  # the second coordinator has the next ones

    def claim(host: str, port: int, setting: str = "grpc_port") -> int:
        return port or next(free)

    monkeypatch.setattr(up, "claim_port", claim)
    front = {"grpc_port": 0, "http_port": 0}
    config = ClusterConfig.model_validate({"coordinators": 2, "coordinator": front})
    chosen = up._claim_ports(config).coordinator
    assert (chosen.grpc_port, chosen.http_port) == (21162, 21164)


@pytest.mark.parametrize("model", ["a" * 5000, "~nobody-of-this-name/model"])
def test_a_model_that_no_path_can_name(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, line = failure(capsys, "up", "--grpc-port", "0", "--http-port", "off", "--model", model)
    assert code == 2
    assert "cannot be looked up" in line
    assert len(line) < 300


@pytest.mark.parametrize("kind", ["folder", "itself", "pipe", "bytes"])
@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("simulate --trace", "trace"),
        ("simulate --trace constant --policy", "policy"),
        ("plan --engine-preset simulated --trace", "trace"),
        ("plan --rate 1 --gpu H100 --model", "model"),
        ("up --grpc-port 0 --http-port off --model", "model"),
        ("up --config", "config"),
        ("up --grpc-port 0 --http-port off --tls", "tls"),
        ("generate hi --tls", "tls"),
    ],
)
def test_a_file_that_is_none(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    field: str,
    kind: str,
) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 0.01)
    path = tmp_path / "a"
    match kind:
        case "folder":
            path.mkdir()
        case "itself":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "bytes":
            path.write_bytes(b"\xff\x00")
    code, line = failure(capsys, *command.split(), str(path))
    assert code == 2, line
    assert line.startswith(f"error: {field}"), line
    assert str(path) in line


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    ports = ("--grpc-port", "0", "--http-port", "off")
    code, line = failure(capsys, "up", *ports, "--model", "./no/such/folder")
    assert code == 2
    assert "no such folder" in line
    code, line = failure(capsys, "model", "fetch", "gpt-17")
    assert code == 1
    assert "smollm2-135m-instruct" in line


def test_a_bad_settings_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("engine:\n  block_size_tokens: 0\n")
    code, line = failure(capsys, "up", "--config", str(path))
    assert code == 2
    assert "engine.block_size_tokens" in line


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SplitserveError("two\nlines"), 1, "error: two lines\n"),
        (ResourceExhaustedError("full", retry_after_s=1.5), 1, "error: full (try again in 1.5 s)\n"),
        (UnsupportedModelError("no MLA"), 2, "error: no MLA\n"),
        (ExceptionGroup("tasks", [TransferError("peer gone")]), 1, "error: peer gone\n"),
        (ZeroDivisionError("oops"), 1, "error: unexpected ZeroDivisionError: oops\n"),
        (SplitserveError("x" * 10**6), 1, f"error: {'x' * 2000}…\n"),
    ],
)
def test_errors_become_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    def fail() -> None:
        raise error

    assert exit_code_of(fail) == code
    assert capsys.readouterr().err == line


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"splitserve {__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Exit codes" in text
    for command in ("up", "generate", "status", "model", "coordinator", "prefill-worker", "decode-worker"):
        assert command in text
    assert main([]) == 2
    assert capsys.readouterr().err == ""
