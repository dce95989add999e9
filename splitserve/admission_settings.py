"""Settings of the coordinator's queue; section `admission` of the coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class AdmissionConfig(BaseModel):
    """Who waits at the coordinator, and how long; see docs/admission.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mode: Literal["queue", "off"] = "queue"
    """`queue`: requests wait at the coordinator, in fair order, until workers can start them soon. `off`: all go to
    the workers at once and wait there, first come, first served."""
    max_queued_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Requests of one model that may wait."""
    max_queued_prompt_tokens: Annotated[int, Field(ge=1, le=2**40)] = 2 * 2**20
    """Prompt tokens of one model that may wait, about 36 bytes of memory each."""
    max_queue_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time in the queue. A request that is predicted to wait longer is refused when it comes."""
    ttft_slo_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Time to the first token that interactive and standard requests are to get: one that is predicted to miss it is
    refused. Default: none."""
    tpot_slo_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """Time per output token that running requests are to keep: a request that would make steps longer waits. Default:
    none."""
    prefill_horizon_s: Annotated[float, Field(gt=0, le=60)] = 0.3
    """Work that a prefill worker is sent in advance. Less makes order at the coordinator count for more; below two
    steps of the worker, and its time to reserve KV, it costs throughput."""
    decode_headroom: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Share of decode slots and KV that is kept from lower classes while a higher one was seen in the last 30 s."""
