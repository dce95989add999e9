"""A clean clone of this repository with its own environment, in which the commands of the docs are run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from splitserve.addresses import claim_port
from splitserve.errors import FailedPreconditionError
from splitserve.security.api_keys import key_hash, new_key

ROOT = Path(__file__).resolve().parents[2]
READY = ("splitserve ready on ", '"coordinator.ready"', '"worker.ready"', '"autoscaler.ready"')
START_S = 300.0
STOP_S = 120.0
POLL_S = 0.1
LOG_LINES = 40
PROGRAM = "import sys\nfrom launcher.cli.main import main\nsys.exit(main())\n"


class CheckError(Exception):
    """A command of the docs failed; the message shows the end of its output."""


class CleanClone:
    """A clone of the committed files. Packages come from this environment, splitserve itself from the clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers = 0
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        self._make_environment(folder / ".venv")
        self._http_port = _free_ports(1)
        self._grpc_port = _free_ports(2)
        key = new_key()
        self._write_files(key_hash(key))
        self._environment = os.environ | {
            "SPLITSERVE_TARGET": f"127.0.0.1:{self._grpc_port}",
            "SPLITSERVE_API_KEY": key,
            "PYTHONUNBUFFERED": "1",
        }

    def localized(self, command: str) -> str:
        """The command with free ports for the default ones, and this host for an example's."""
        changes = {
            "50051": str(self._grpc_port),
            "50052": str(self._grpc_port + 1),
            "127.0.0.1:8000": f"127.0.0.1:{self._http_port}",
            "--http-port 8000": f"--http-port {self._http_port}",
            "front.example": "localhost",
            "0.0.0.0": "127.0.0.1",
            " ... ": " ",
        }
        for old, new in changes.items():
            command = command.replace(old, new)
        return command

    def run(self, command: str, limit_s: float) -> str:
        """The command's output. Raises CheckError on failure or timeout."""
        process = self._start(command, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise CheckError(f"not within {limit_s:.0f} s\n{_end_of(output)}") from None
        if process.returncode:
            raise CheckError(f"exit code {process.returncode}\n{_end_of(output)}")
        return output

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Starts a server and waits until it is ready; ends it after use. Raises CheckError when any of it fails."""
        # A file of its own: others that run would write over what this one says.
        self._servers += 1
        path = self.folder / f"server-{self._servers}.log"
        with path.open("w") as log:
            process = self._start(f"exec {command}", log.fileno())
        try:
            deadline = time.monotonic() + START_S
            while not any(word in path.read_text(errors="replace") for word in READY):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CheckError(f"exit code {process.poll()} before ready\n{_end_of(path.read_text())}")
                time.sleep(POLL_S)  # only its log tells
            yield
            process.send_signal(signal.SIGINT)
            if code := process.wait(STOP_S):
                raise CheckError(f"exit code {code} at the end\n{_end_of(path.read_text())}")
        except subprocess.TimeoutExpired:
            raise CheckError(f"it did not end within {STOP_S:.0f} s\n{_end_of(path.read_text())}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, command: str, output: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; source .venv/bin/activate; {command}"],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _make_environment(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        theirs = sysconfig.get_path("purelib")
        (packages / "clone.pth").write_text(f"{self.folder}\n{theirs}\n")
        program = folder / "bin" / "splitserve"
        program.write_text(f"#!{folder / 'bin' / 'python'}\n{PROGRAM}")
        program.chmod(0o755)
        for plugin in Path(sysconfig.get_path("scripts")).glob("protoc-gen-*"):  # for `make proto`
            (folder / "bin" / plugin.name).symlink_to(plugin)
        (folder / ".setup-stamp").touch()

    def _write_files(self, tenant_hash: str) -> None:
        """Writes the files that examples name: a policy, tenants, a schema and a few requests of each kind of trace."""
        shutil.copy(self.folder / "compose" / "policy.yaml", self.folder / "policy.yaml")
        tenants = {"tenants": [{"name": "docs", "key_hashes": [tenant_hash], "admin": True}]}
        (self.folder / "tenants.yaml").write_text(yaml.safe_dump(tenants))
        schema = {
            "type": "object",
            "properties": {"age": {"type": "integer", "maximum": 20}},
            "required": ["age"],
        }
        (self.folder / "cat.json").write_text(json.dumps(schema | {"additionalProperties": False}))
        azure = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        mooncake = []
        for second in range(60):
            azure.append(f"2023-11-16 18:15:{second:02}.0000000,{64 + second},{4 + second % 5}")
            hashes = [second % 4, 100 + second]
            mooncake.append(
                {"timestamp": 1000 * second, "input_length": 1000, "output_length": 20, "hash_ids": hashes}
            )
        (self.folder / "azure_2023_conv.csv").write_text("\n".join(azure) + "\n")
        lines = "".join(json.dumps(request) + "\n" for request in mooncake)
        (self.folder / "mooncake_conversation.jsonl").write_text(lines)


def _end_of(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.splitlines()[-LOG_LINES:])


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports. No outgoing connection takes it by chance."""
    while True:
        port = claim_port("127.0.0.1", 0)
        with suppress(FailedPreconditionError):
            for following in range(port + 1, port + count):
                claim_port("127.0.0.1", following)
            return port


def uncommitted() -> str:
    """Files of this working tree that are not committed, which a clone does not have."""
    return subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
