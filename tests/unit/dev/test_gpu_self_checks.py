"""Each check passes what computes rightly, and finds what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from bench.faults.plan import FaultPlan, Trigger
from bench.faults.transport import FaultyTransport
from dev.gpu_self_checks import (
    KvShape,
    WrongResultError,
    check_attention,
    check_graphs,
    check_sampling,
    check_transfer,
)
from engine.core.model_runner import SampledToken
from engine.kv_cache.memory import KvCacheMemory
from engine.model.probe import AttentionKind
from engine.runner.sampler import sample_rows
from engine.runner.sampling_row import SamplingRow
from kv_transfer.transports.transport import Transport
from splitserve.errors import SplitserveError, TransferError
from tests.support.self_test.plain_attention import GraphFault, KernelFault, PlainAttention, PlainGraphs
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport

CPU = torch.device("cpu")
SHAPE = KvShape(kv_heads=2, head_dim=16, block_size=8, dtype="float32")
KINDS = [AttentionKind(6), AttentionKind(4, 5), AttentionKind(4, 12, 3.0)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def kernels(fault: KernelFault) -> Callable[[KvCacheMemory], PlainAttention]:
    return partial(PlainAttention, fault=fault)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_attention_passes(dtype: str) -> None:
    shape = KvShape(2, 16, 8, dtype)
    check_attention(kernels("none"), shape, KINDS, CPU, long_context=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [fault for fault in get_args(KernelFault) if fault != "none"])
def test_wrong_attention_is_found(fault: KernelFault, dtype: str) -> None:
    with pytest.raises((WrongResultError, RuntimeError)) as found:
        check_attention(kernels(fault), KvShape(2, 16, 8, dtype), KINDS, CPU, long_context=60)
    if fault == "no window":
        assert str(found.value).startswith("4 heads, window 5: off by ")


def check(fault: GraphFault) -> None:
    check_graphs(partial(PlainGraphs, fault=fault), kernels("none"), SHAPE, KINDS[0], CPU)


def test_replayed_steps() -> None:
    check("none")
    for fault, why in {
        "nothing captured": "nothing could be captured",
        "stale": "rows: off by",
        "padded rows write": "wrote other KV",
        "too small": "no graph for 3 rows",
        "old table": "rows: off by",
    }.items():
        with pytest.raises((WrongResultError, RuntimeError), match=why):
            check(fault)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling(dtype: str) -> None:
    check_sampling(3000, dtype, CPU)

    def without_penalties(
        logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | SplitserveError | None]:
        return sample_rows(
            logits, [row._replace(sampling=replace(row.sampling, frequency_penalty=0.0)) for row in rows]
        )

    with pytest.raises(WrongResultError, match="the host samples"):
        check_sampling(3000, dtype, CPU, on_device=without_penalties)
    with pytest.raises(WrongResultError, match="the largest logits"):
        # A NaN that is taken for a token.
        check_sampling(3000, dtype, CPU, argmax=lambda logits: logits.argmax(-1).tolist)


def transports(plan: FaultPlan) -> Callable[[], Transport]:
    hub = MemoryHub()
    return lambda: FaultyTransport(MemoryTransport(hub), plan)


def test_transfers() -> None:
    always = Trigger(every=1)
    check_transfer(transports(FaultPlan()), CPU)
    with pytest.raises(WrongResultError, match="other bytes"):
        check_transfer(transports(FaultPlan(wrong_bytes=always)), CPU)
    seconds = [0.0]

    def wait(_: float) -> None:
        seconds[0] += 1.0

    for plan, why in (
        (FaultPlan(drop_notification=always), "its notification did not arrive in 20 s"),
        (FaultPlan(stall_write=always), "it did not end in 20 s"),
        (FaultPlan(break_connection=always), "was disconnected"),
    ):
        with pytest.raises(TransferError, match=why):
            check_transfer(transports(plan), CPU, clock=lambda: seconds[0], sleep=wait)
