"""Where a process spends its CPU time, by layer and by function: samples of py-spy while a load runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

RATE_PER_S = 200
RECORDED_S = 3
SHOWN = 40
"""Functions that are shown, those with the most samples."""
OURS = ("coordinator", "decode_worker", "prefill_worker", "worker", "engine", "kv_transfer", "splitserve")


async def profiled(pid: int, load: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The shares of the samples, 0..1, by layer and by function, of a process during a load. A call into C belongs to
    the function that made it. Raises FileNotFoundError without py-spy."""
    found = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if (py_spy := shutil.which("py-spy", path=found)) is None:
        raise FileNotFoundError("py-spy is not installed; the extra `dev` has it")
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        running = asyncio.ensure_future(load)
        try:
            await asyncio.sleep(RECORDED_S / 2)
            options = ["--format", "raw", "--output", str(stacks), "--duration", str(RECORDED_S)]
            command = [py_spy, "record", "--pid", str(pid), "--rate", str(RATE_PER_S), *options]
            recorder = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            await recorder.wait()
        finally:
            await running
        return shares(stacks.read_text().splitlines())


def shares(stacks: Iterable[str]) -> dict[str, dict[str, float]]:
    """The shares by layer and by function of stacks as py-spy writes them: "frame;frame;frame count", the innermost
    frame last, each "function (file:line)"."""
    layers: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        function, _, place = frames.rpartition(";")[2].partition(" (")
        path = place.rpartition(":")[0]
        layers[_layer(path)] += int(count)
        functions[f"{path}: {function}"] += int(count)
    total = max(1, layers.total())
    return {
        "layers": {name: count / total for name, count in layers.most_common()},
        "functions": {name: count / total for name, count in functions.most_common(SHOWN)},
    }


def _layer(path: str) -> str:
    """A package of another project, or a room of ours."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in OURS and len(parts) > 2 else parts[0]
