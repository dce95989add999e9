"""The Python clients, `AsyncClient` and `Client`, and their value types. Read `async_client.py` first."""

from __future__ import annotations

from splitserve.client.async_client import AsyncClient
from splitserve.client.client import Client
from splitserve.client.types import (
    ChatMessage,
    Completion,
    Delta,
    FinishReason,
    GenerateOptions,
    Prompt,
    ServedBy,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Completion",
    "Delta",
    "FinishReason",
    "GenerateOptions",
    "Prompt",
    "ServedBy",
    "Timings",
    "TokenLogprob",
    "Usage",
]
