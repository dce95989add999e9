"""What vLLM's callbacks and `VllmEngine` tell each other. All on the engine thread; imports nothing of vLLM.

vLLM makes connector and logits processor itself, from the names of their classes, and keeps its own group of KV
connectors per process. So there is one bridge per process, which they find by `the_bridge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.engine import ReservedBlocks
from engine.core.model_runner import SampledToken
from engine.core.sequence import Sequence
from splitserve.errors import BrokenInvariantError, SplitserveError

ROW_FIELD = "splitserve_row"
"""Where a request's key stands in vLLM's `SamplingParams.extra_args` and in its `kv_transfer_params`."""


@dataclass(eq=False, slots=True)
class VllmRow:
    """One request at vLLM: its sequence here, and what vLLM said of it."""

    key: str
    sequence: Sequence
    vllm_id: str = ""
    """The id that vLLM gave it."""
    awaits_kv: bool = False
    """A peer is going to write the KV of its tokens, and vLLM has not allocated their blocks yet."""
    reserved: ReservedBlocks | None = None
    """The blocks that vLLM allocated for a peer."""
    received: bool = False
    """vLLM has been told that the peer is done with them."""
    held: bool = False
    """It has ended, and vLLM keeps its blocks until it is told that they were sent."""
    vllm_tokens: int = 0
    """Its tokens at vLLM, prompt and output. Fewer than the sequence's until the first token is vLLM's, too."""
    num_new: int = 0
    """Tokens that the running step computes of it."""
    sampled: SampledToken | None = None
    """What the running step sampled."""
    was_given: bool = False
    """Whether the token that vLLM took last was known before."""
    bypassed: int = 0
    """How many later requests vLLM got while there was no room for its adapter."""
    failure: SplitserveError | None = None
    """Why the running step could not sample."""

    @property
    def ends_tokens(self) -> bool:
        """Whether the running step computes its last token at vLLM, so that vLLM takes the next one."""
        return self.sequence.num_computed + self.num_new == self.vllm_tokens

    @property
    def given_token(self) -> int | None:
        """The next token at vLLM if it is known already; None if it is to be sampled."""
        tokens = self.sequence.tokens
        return tokens[self.vllm_tokens] if self.vllm_tokens < len(tokens) else None


@dataclass(slots=True)
class VllmBridge:
    """Shared by the engine, the connector and the logits processor of one process."""

    rows: dict[str, VllmRow] = field(default_factory=dict)
    """By key, as long as vLLM may name them."""
    kv_caches: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's KV cache tensors, by layer."""
    scheduled: list[VllmRow] = field(default_factory=list)
    """The rows of the running step."""
    reports_received: set[str] = field(default_factory=set)
    """vLLM's ids of requests whose peer is done, to be reported in the next step. Twice would end the engine."""
    reports_sent: set[str] = field(default_factory=set)
    """vLLM's ids of ended requests whose blocks may be freed, to be reported in the next step."""

    def schedule(self, key: str, computed: int, num_new: int) -> None:
        """vLLM computes tokens [`computed`, `computed + num_new`) of a request in the step that begins."""
        row = self.rows[key]
        row.sequence.num_computed, row.num_new = computed, num_new
        row.sampled = row.failure = None
        self.scheduled.append(row)

    def take_reports(self) -> tuple[set[str], set[str]]:
        """The ids to report as sent and as received, once."""
        taken = self.reports_sent, self.reports_received
        self.reports_sent, self.reports_received = set(), set()
        return taken


_bridge: VllmBridge | None = None


def open_bridge() -> VllmBridge:
    """Makes the process's bridge. Raises BrokenInvariantError if there is one: vLLM has one KV connector a process."""
    global _bridge
    if _bridge is not None:
        raise BrokenInvariantError("this process runs a vLLM engine already")
    _bridge = VllmBridge()
    return _bridge


def the_bridge() -> VllmBridge:
    """The bridge of this process. Raises BrokenInvariantError if there is none."""
    if _bridge is None:
        raise BrokenInvariantError("this process runs no vLLM engine of splitserve")
    return _bridge


def close_bridge() -> None:
    """Forgets the bridge. Idempotent."""
    global _bridge
    _bridge = None
