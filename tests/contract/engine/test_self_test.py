"""The self-test of a device: on a GPU as it is, else Triton's interpreter and graphs that compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from dev.gpu_self_checks import (
    Capture,
    KvShape,
    MakeAttention,
    WrongResultError,
    check_attention,
    check_graphs,
    check_transfer,
)
from engine.kv_cache.memory import KvCacheMemory
from engine.model.probe import AttentionKind
from kv_transfer.transports import make_transport
from splitserve.errors import UnavailableError
from tests.support.engine.triton_interpreter import triton_interpreter
from tests.support.self_test.plain_attention import PlainGraphs

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
CONTEXT = 1500 if ON_GPU else 150


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with nullcontext() if ON_GPU else triton_interpreter(), torch.inference_mode():
        yield


def triton_kernels() -> MakeAttention:
    from engine.backends.cuda.triton_attention import TritonAttention

    return TritonAttention


def capture() -> Capture:
    if not ON_GPU:
        return PlainGraphs
    from engine.backends.cuda.step_graphs import CudaStepGraphs

    return CudaStepGraphs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_pass(dtype: str) -> None:
    kinds = [AttentionKind(6), AttentionKind(4, 20), AttentionKind(2, 12, 3.0)]
    check_attention(triton_kernels(), KvShape(2, 16, 8, dtype), kinds, DEVICE, long_context=CONTEXT)


def test_kernels_that_miss_a_key_do_not() -> None:
    class Short(triton_kernels()):  # type: ignore[misc]
        def __init__(self, pool: KvCacheMemory) -> None:
            super().__init__(pool)
            self._views = [kv._replace(keys=kv.keys.roll(1, 2)) for kv in self._views]

    with pytest.raises(WrongResultError, match="off by"):
        check_attention(Short, KvShape(2, 16, 8, "float32"), [AttentionKind(4)], DEVICE, long_context=30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_pass(dtype: str) -> None:
    check_graphs(capture(), triton_kernels(), KvShape(2, 16, 8, dtype), AttentionKind(4, 9), DEVICE)


@pytest.mark.parametrize("kind", ["nixl", "ucx"])
def test_a_process_writes_to_itself(kind: str) -> None:
    try:
        check_transfer(lambda: make_transport(kind), DEVICE)
    except UnavailableError as error:
        if not error.reason.endswith("_MISSING"):
            raise
        pytest.skip(error.message)
