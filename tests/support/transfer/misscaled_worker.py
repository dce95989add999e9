"""A worker whose narrow KV has wrong scales: `python -m tests.support.transfer.misscaled_worker prefill-worker ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from engine.runner import torch_runner
from engine.runner.fp8_wire import Fp8Wire
from kv_transfer.layout import SCALE_BYTES
from splitserve.cli.main import main

FACTOR = 4.0


class MisscaledWire(Fp8Wire):
    """Sends each vector as FACTOR times what it is. The bytes arrive as they were sent, so checksums are right."""

    def pack(self, block_ids: Sequence[int]) -> None:
        super().pack(block_ids)
        scales = self._blocks.layout.block_vectors * SCALE_BYTES
        with torch.inference_mode():
            for block in set(block_ids):
                self._blocks.bytes[block, :scales].view(torch.bfloat16).mul_(FACTOR)


if __name__ == "__main__":
    torch_runner.Fp8Wire = MisscaledWire  # type: ignore[misc]
    sys.exit(main())
