"""What is set once before the first product on a GPU, in one place, so that no default of a library decides it."""

from __future__ import annotations

import torch


def prepare_device(device: torch.device) -> None:
    """Makes a device the calling thread's own, and sets how exactly this process multiplies on GPUs.

    * float32 is there for those who want exact answers, so no TF32, which keeps 10 bits of the mantissa.
    * bfloat16 products are summed in float32, also where cuBLAS splits a sum over several multiprocessors. It may
      otherwise put the parts together in bfloat16, which depends on the batch and costs accuracy in long sums.
    """
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
