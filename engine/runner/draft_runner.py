"""The runner of a draft model: its weights, and KV blocks in step with those of the model that it guesses for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.loaded_model import LoadedModel
from engine.runner.torch_runner import TorchRunner, kv_layout
from engine.runner.weights import Weights, load_weights
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource, localize_model, resolve_model
from splitserve.models.tokenizer import Tokenizer

FIELD = "engine.draft_model"


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A loaded draft model, before its KV blocks are allocated."""

    weights: Weights
    config: EngineConfig

    @property
    def block_bytes(self) -> int:
        """Memory of a KV block."""
        return kv_layout(self.weights.model, self.config).block_bytes

    def runner(self, num_blocks: int) -> TorchRunner:
        """Its runner, with so many blocks."""
        config = self.config.model_copy(update={"num_blocks": num_blocks})
        return TorchRunner(self.weights.model, config, kernels=self.weights.kernels)


def load_draft_model(config: EngineConfig, target: ModelSource) -> DraftWeights | None:
    """Loads `config.draft_model`; None without one.

    Raises ConfigError (`engine.draft_model`) if there is none of that name or its vocabulary is not that of the
    `target`, before its weights are read; otherwise as `load_weights`.
    """
    if config.draft_model is None:
        return None
    source = _found(config.draft_model)
    check_vocabulary(load_tokenizer(target.tokenizer_source), load_tokenizer(source.tokenizer_source))
    own = config.model_copy(
        update={
            "context_tokens": None,
            "contiguous_kv_bytes": 0,  # copies would have guesses in them
            "core_exchange": None,
            "draft_model": None,
            "kv_cache_dtype": "auto",
            "kv_host_tier_bytes": None,  # the model's own
            "speculation": "off",
        }
    )
    weights = load_weights(own, source, lambda _fraction: None)
    return DraftWeights(weights, own.model_copy(update={"context_tokens": _context(weights.model, config)}))


def _found(name: str) -> ModelSource:
    try:
        return localize_model(resolve_model(name))
    except ConfigError as error:  # which names the setting of the model
        why = error.message.removeprefix("model: ")
        raise ConfigError(f"{FIELD}: {why}", field=FIELD) from None


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises ConfigError (`engine.draft_model`) unless both tokenizers have the same tokens under the same ids."""
    sizes = target.vocabulary_size, draft.vocabulary_size
    if sizes[0] != sizes[1]:
        message = f"{FIELD}: its vocabulary has {sizes[1]} tokens, that of the model {sizes[0]}"
        raise ConfigError(message, field=FIELD)
    for token_id in range(sizes[0]):
        if target.token_bytes(token_id) != draft.token_bytes(token_id):
            message = f"{FIELD}: its vocabulary is another one than the model's: token {token_id} differs"
            raise ConfigError(message, field=FIELD)


def _context(model: LoadedModel, config: EngineConfig) -> int:
    return min(model.facts.context_tokens, config.context_tokens or model.facts.context_tokens)
