"""What a worker's settings say of drafts."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.model_runner import ModelRunner
from engine.speculation.draft_lengths import MAX_DRAFT, MAX_ROWS, MAX_SEQUENCES
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter
from engine.speculation.prompt_lookup import PromptLookup
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError


def max_decode_rows(config: EngineConfig) -> int:
    """Most rows of a step that only decodes."""
    return (
        config.max_running_requests
        if config.speculation == "off"
        else max(config.max_running_requests, MAX_ROWS)
    )


def warm_up_drafts(config: EngineConfig) -> range:
    """Lengths of drafts to compute at the start, for what is compiled or captured for each number of rows."""
    return range(0) if config.speculation == "off" else range(1, MAX_DRAFT + 1)


def check_drafts(config: EngineConfig) -> None:
    """Raises ConfigError for settings of drafts that contradict each other."""
    field, wanted = "engine.draft_model", config.speculation == "draft-model"
    if wanted and config.kind == "simulated":
        message = "engine.speculation: the simulated engine takes no draft model"
        raise ConfigError(message, field="engine.speculation")
    if wanted and config.draft_model is None:
        raise ConfigError(f"{field}: speculation draft-model needs one", field=field)
    if config.draft_model is not None and not wanted:
        raise ConfigError(f"{field}: needs speculation draft-model, not {config.speculation}", field=field)


def make_drafter(
    config: EngineConfig,
    draft_runner: ModelRunner | None = None,
    vocabulary_size: int = 0,
    take_cores: Callable[[], None] = lambda: None,
) -> Drafter | None:
    """The drafter that the settings choose; None without speculation. A draft model is `draft_runner`'s; it guesses
    tokens below `vocabulary_size`, and calls `take_cores` before it computes."""
    if draft_runner is None:
        return None if config.speculation == "off" else PromptLookup()
    drafter = DraftModel(draft_runner, vocabulary_size, take_cores)
    drafter.warm_up(min(MAX_SEQUENCES, config.max_running_requests))
    return drafter
