"""Shapes of models that sizing is tested with."""

from __future__ import annotations

from autoscaler.sizing.model_shape import shape_of

CONFIG_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LARGER = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""With a vocabulary of 96,000 they are 70.0 billion parameters."""
LLAMA_8B = shape_of("8b", CONFIG_8B)
LLAMA_70B = shape_of("70b", CONFIG_8B | LARGER | {"vocab_size": 96_000})
