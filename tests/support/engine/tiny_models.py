"""Tiny models with random weights, one of each attention kind, saved as folders that workers can load.

All have a vocabulary of 257: the 256 bytes and one end-of-sequence token, like `ByteTokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCABULARY = 257
EOS = 256
CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # Wide enough that greedy output wanders instead of repeating one token.
    "initializer_range": 0.4,
}


def _config(class_name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        config_class = vars(transformers).get(class_name) or transformers.__getattr__(class_name)
        return config_class(**(_COMMON | settings))

    return make


WINDOW = 24
_ALTERNATING = ["sliding_attention", "full_attention"]

# What the engine serves.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "qwen2": _config("Qwen2Config"),
    "qwen2_window": _config(
        "Qwen2Config",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        num_hidden_layers=3,
    ),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral": _config("MistralConfig", sliding_window=WINDOW, head_dim=8),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=_ALTERNATING * 2,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    "gemma3_text": _config(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=_ALTERNATING * 2,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    "phi3": _config("Phi3Config", sliding_window=None),
    "olmo2": _config("Olmo2Config"),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
}

# Served as well, for what the others are too small for.
# The wide_ ones have sizes that the cpu's kernels know; heads of 32 unless they say otherwise.
_WIDE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 192,
    "initializer_range": 0.15,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "llama_wide": _config("LlamaConfig", head_dim=64),
    # Enough layers that what is once in a step counts for little.
    "llama_deep": _config("LlamaConfig", num_hidden_layers=8),
    "wide_llama": _config("LlamaConfig", **_WIDE),
    "wide_qwen2": _config("Qwen2Config", **_WIDE),
    "wide_qwen3": _config("Qwen3Config", **_WIDE, head_dim=64),
    "wide_mistral": _config("MistralConfig", **_WIDE, head_dim=32, sliding_window=WINDOW),
    "wide_gemma2": _config(
        "Gemma2Config",
        **_WIDE,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=64,
    ),
    "wide_gemma3": _config(
        "Gemma3TextConfig",
        **_WIDE,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=64,
        tie_word_embeddings=False,
    ),
    "wide_phi3": _config("Phi3Config", **_WIDE, sliding_window=None),
    "wide_mixtral": _config("MixtralConfig", **_WIDE, num_local_experts=4, num_experts_per_tok=2),
}

# What the engine must refuse, and a word of the reason it must give.
REFUSED: dict[str, Callable[[], Any]] = {
    # attention sinks
    "gpt_oss": _config(
        "GptOssConfig",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # recurrent state
    "mamba": _config("MambaConfig", state_size=4),
    # multi-head latent attention
    "deepseek_v3": _config(
        "DeepseekV3Config",
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    # short convolutions between attention layers
    "lfm2": _config("Lfm2Config", layer_types=["conv", "full_attention"]),
    # attention without the interface
    "gpt_neo": _config("GPTNeoConfig", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
}

# What engine vllm serves beside: of sizes that vLLM's kernels on cpu take.
_FOR_VLLM: dict[str, Any] = _WIDE | {"num_hidden_layers": 4, "head_dim": 64, "max_position_embeddings": 512}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
VLLM_FAMILIES: dict[str, Callable[[], Any]] = {
    "vllm_llama": _config("LlamaConfig", **_FOR_VLLM),
    "vllm_qwen3": _config("Qwen3Config", **_FOR_VLLM),
    "vllm_qwen3_moe": _config(
        "Qwen3MoeConfig", **_FOR_VLLM, **_EXPERTS, num_experts=8, decoder_sparse_step=1
    ),
    "vllm_mixtral": _config("MixtralConfig", **_FOR_VLLM, num_local_experts=4, num_experts_per_tok=2),
    "vllm_glm4_moe": _config(
        "Glm4MoeConfig",
        **_FOR_VLLM,
        **_EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "vllm_gemma3": _config(
        "Gemma3TextConfig",
        **_FOR_VLLM,
        sliding_window=64,
        layer_types=_ALTERNATING * 2,
        query_pre_attn_scalar=64,
        tie_word_embeddings=False,
    ),
    "vllm_gpt_oss": _config(
        "GptOssConfig",
        **_FOR_VLLM,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "vllm_deepseek_v3": _config(
        "DeepseekV3Config",
        **{name: value for name, value in _FOR_VLLM.items() if name != "head_dim"},
        **_EXPERTS,
        num_key_value_heads=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
}

# What tensor-parallel ranks can share out: four KV heads, of a size that vLLM's kernels take.
SHARED_OUT: dict[str, Callable[[], Any]] = {
    "llama_4_heads": _config("LlamaConfig", hidden_size=128, intermediate_size=192, num_key_value_heads=4)
}


def make_tiny_model(family: str, folder: Path) -> Path:
    """Saves the family's model in float32, with generation settings and tokenizer; returns its folder.

    The same weights every time. Does nothing when the folder has it already.
    """
    target = folder / family
    if target.exists():
        return target
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(20240)
        model = AutoModelForCausalLM.from_config(
            (FAMILIES | OTHERS | REFUSED | SHARED_OUT | VLLM_FAMILIES)[family](), dtype=torch.float32
        )
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS)
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
